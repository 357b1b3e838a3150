"""Tests for streams (stream.py, streamed.py), processes ahead (processes.py) and what feeds the
loop (runner/ahead.py, runner/feed.py): the same updates, however they are prepared."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.ahead import Copied, Work, fed
from runner.compose import command_of
from runner.contracts import Corpus, Example, MicroBatch, Place, StreamDraw, UserError
from runner.data import lines
from runner.data.bpe import Bpe
from runner.data.jsonl import Jsonl
from runner.data.order import Numbered, order
from runner.data.packed import Packed
from runner.data.padded import Padded
from runner.data.parquet import Parquet
from runner.data.plain import PlainText
from runner.data.processes import prepared_ahead
from runner.data.stream import ExampleStream
from runner.door import parser
from runner.feed import Feed
from runner.objective import SequenceMean, TokenMean
from runner.step import to_device
from tests.filed import END, jsonl, write
from tests.support import examples

CPU = torch.device("cpu")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 300 bytes: a few lines each."""
    monkeypatch.setattr(lines.blocks, "__defaults__", (300,))


def stream_of(tmp_path: Path, rows: int = 60, **changes: Any) -> Corpus:
    for name, numbers in (("a", range(rows // 3)), ("b", range(rows // 3, rows))):
        content = jsonl(*({"text": f"row {i:03d} " + "x" * (i % 9)} for i in numbers))
        write(tmp_path, f"files/{name}.jsonl", content)
    part = Jsonl(**({"files": str(tmp_path / "files"), "streaming": True, "buffer": 16} | changes))
    return part.load(seq_len=64, cache=str(tmp_path / "cache"))


def said(found: Sequence[Example]) -> list[str]:
    return [bytes(e.ids[e.ids != END].tolist()).decode().split(" x")[0].strip() for e in found]


def drawn(corpus: Corpus, count: int, **changes: Any) -> list[StreamDraw]:
    assert corpus.stream is not None
    settings: dict[str, Any] = {"batch": 8, "seed": 0} | changes
    return list(itertools.islice(corpus.stream.updates(**settings), count))


# --- streams ----------------------------------------------------------------------------------


def test_an_epoch_of_a_stream_has_each_training_row_once(
    tmp_path: Path, small_blocks: None
) -> None:
    corpus = stream_of(tmp_path, eval_share=0.2)
    held_out = said(corpus.eval)
    count = -(-(60 - len(held_out)) // 8)
    epoch = drawn(corpus, count)
    rows = [row for draw in epoch for row in said(draw.examples)]
    assert sorted(rows + held_out) == [f"row {i:03d}" for i in range(60)]
    assert 4 <= len(held_out) <= 24
    assert epoch[-1].after == Place(epoch=1)
    assert [len(draw.examples) for draw in epoch[:-1]] == [8] * (count - 1)
    assert rows != sorted(rows)


def test_a_stream_has_the_rows_and_the_split_of_the_mapped_corpus(
    tmp_path: Path, small_blocks: None
) -> None:
    streamed = stream_of(tmp_path, eval_share=0.2)
    mapped = stream_of(tmp_path, eval_share=0.2, streaming=False)
    assert said(streamed.eval) == said(mapped.eval)
    epoch = drawn(streamed, 1, batch=1000)[0].examples
    assert sorted(said(epoch)) == sorted(said(mapped.train))


def test_the_order_of_a_stream_is_that_of_seed_epoch_and_buffer(
    tmp_path: Path, small_blocks: None
) -> None:
    corpus = stream_of(tmp_path)

    def order(epoch: int, **changes: Any) -> list[str]:
        (draw,) = drawn(corpus, 1, batch=1000, place=Place(epoch=epoch), **changes)
        return said(draw.examples)

    assert order(0) == order(0)
    orders = [order(0), order(1), order(0, seed=1)]
    other = said(drawn(stream_of(tmp_path, buffer=8), 1, batch=1000)[0].examples)
    assert len({tuple(rows) for rows in [*orders, other]}) == 4
    assert {tuple(sorted(rows)) for rows in [*orders, other]} == {tuple(sorted(order(0)))}


@pytest.mark.parametrize("batch", [3, 8, 16])
def test_a_stream_goes_on_from_any_place(batch: int, tmp_path: Path, small_blocks: None) -> None:
    """Case C51, without replaying: 60 rows, past two ends of an epoch."""
    corpus = stream_of(tmp_path)
    whole = drawn(corpus, 45, batch=batch)
    for stop in range(0, 44, 3):
        rest = drawn(corpus, 44 - stop, batch=batch, place=whole[stop].after)
        expected = [said(draw.examples) for draw in whole[stop + 1 :]]
        assert [said(draw.examples) for draw in rest] == expected
        assert [draw.after for draw in rest] == [draw.after for draw in whole[stop + 1 :]]


def test_a_stream_that_goes_on_reads_no_block_before_its_place(
    tmp_path: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = stream_of(tmp_path)
    whole = drawn(corpus, 6)
    read: list[int] = []
    pieces = ExampleStream.pieces
    monkeypatch.setattr(
        ExampleStream, "pieces", lambda self, n: (read.append(n), pieces(self, n))[1]
    )
    drawn(corpus, 6)
    everything, place = list(read), whole[4].after
    assert place.block >= 2
    read.clear()
    drawn(corpus, 1, place=place)
    assert read and read == everything[place.block :][: len(read)]


@pytest.mark.parametrize("workers", [1, 2])
def test_processes_ahead_change_nothing_of_a_stream(
    workers: int, tmp_path: Path, small_blocks: None
) -> None:
    """Case C50."""
    corpus = stream_of(tmp_path)
    alone = drawn(corpus, 17)
    ahead = drawn(corpus, 17, workers=workers)
    assert [said(d.examples) for d in ahead] == [said(d.examples) for d in alone]
    assert [d.after for d in ahead] == [d.after for d in alone]
    assert sum(d.seconds for d in ahead) > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_faulty_row_met_in_a_stream_is_named_or_counted_once(
    workers: int, tmp_path: Path, small_blocks: None
) -> None:
    corpus = stream_of(tmp_path, on_bad="skip", eval_share=0.01)
    path = tmp_path / "files" / "b.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*whole[:30], '{"txt": "b"}\n', *whole[30:]]))
    strict = stream_of_existing(tmp_path, on_bad="error")
    with pytest.raises(UserError, match=f"{path} line 31: no field 'text'; its fields: 'txt'"):
        drawn(strict, 20, workers=workers)
    lenient = stream_of_existing(tmp_path, on_bad="skip")
    drawn(lenient, 30, workers=workers)
    assert dict(lenient.dropped) == {"missing": 1}
    assert corpus.fingerprint != lenient.fingerprint


def stream_of_existing(tmp_path: Path, **changes: Any) -> Corpus:
    # Few rows are held out, so that the faulty one is not met while they are looked for.
    settings = {"streaming": True, "buffer": 16, "eval_files": str(tmp_path / "held.jsonl")}
    if not (tmp_path / "held.jsonl").exists():
        write(tmp_path, "held.jsonl", jsonl({"text": "held out"}))
    part = Jsonl(files=str(tmp_path / "files"), **(settings | changes))
    return part.load(seq_len=64, cache=str(tmp_path / "cache"))


def test_what_a_stream_truncates_is_counted_as_it_is_read(tmp_path: Path) -> None:
    write(tmp_path, "files/a.jsonl", jsonl(*({"text": "x" * 70} for _ in range(20))))
    corpus = stream_of_existing(tmp_path)
    assert corpus.stream is not None
    assert corpus.stream.truncated == 0
    drawn(corpus, 9)
    assert corpus.stream.truncated == 20
    feed_of(examples=(), stream=corpus.stream).probes(2)  # another pass, as before training
    drawn(corpus, 9, workers=1)
    assert corpus.stream.truncated == 20


def test_an_epoch_with_nothing_to_train_on_ends_the_job(tmp_path: Path) -> None:
    write(tmp_path, "files/a.jsonl", jsonl({"text": " "}, {"text": " "}))
    corpus = stream_of_existing(tmp_path, on_bad="skip")
    with pytest.raises(UserError, match="0 usable for train"):
        drawn(corpus, 1)


def test_only_as_much_is_read_for_the_held_out_as_it_takes(tmp_path: Path) -> None:
    rows = [{"text": f"row {i}"} for i in range(400)]
    write(tmp_path, "files/a.jsonl", jsonl(*rows) + "{broken\n")
    part = Jsonl(files=str(tmp_path / "files"), streaming=True, held_out=5, eval_share=0.5)
    assert len(part.load(seq_len=64, cache=str(tmp_path / "cache")).eval) == 5


def test_parquet_and_text_are_streamed_too(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = [f"row {i}" for i in range(50)]
    write(tmp_path, "x.txt", "\n".join(values))
    pq.write_table(pa.table({"text": values}), tmp_path / "x.parquet", row_group_size=7)
    for part in (
        PlainText(files=str(tmp_path / "x.txt"), streaming=True, eval_share=0.3),
        Parquet(files=str(tmp_path / "x.parquet"), streaming=True, eval_share=0.3),
    ):
        corpus = part.load(seq_len=64, cache=str(tmp_path / "cache"))
        (epoch,) = drawn(corpus, 1, batch=1000)
        assert sorted(said(epoch.examples) + said(corpus.eval)) == sorted(values)


def test_the_identity_of_a_stream_changes_with_every_write(tmp_path: Path) -> None:
    path = write(tmp_path, "files/a.jsonl", jsonl({"text": "row 1"}))
    before = stream_of_existing(tmp_path).fingerprint
    assert stream_of_existing(tmp_path).fingerprint == before
    path.write_bytes(path.read_bytes().replace(b"1", b"2"))
    after = stream_of_existing(tmp_path).fingerprint
    path.write_bytes(path.read_bytes().replace(b"2", b"1"))  # as at first, written later
    assert len({before, after, stream_of_existing(tmp_path).fingerprint}) == 3


def test_epochs_of_a_stream_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "x.jsonl", jsonl({"text": "a"}))
    words = ["data=jsonl", f"data.files={path}", "data.streaming=true", "updates=null", "epochs=1"]
    with pytest.raises(UserError) as raised:
        command_of(parser().parse_args(words), tmp_path)
    assert [fault.key for fault in raised.value.faults] == ["epochs"]


def test_processes_ahead_may_use_a_tokenizer_that_this_process_has_used(
    tmp_path: Path, small_blocks: None
) -> None:
    """Its threads do not survive a fork; the processes must not wait for them."""
    corpus = stream_of(tmp_path, tokenizer=Bpe(size=280))
    assert corpus.eval  # tokenized here, by threads
    found = [[draw.examples for draw in drawn(corpus, 9, workers=n)] for n in (0, 2)]
    ids = [[[e.ids.tolist() for e in update] for update in updates] for updates in found]
    assert ids[0] == ids[1]


# --- processes ahead --------------------------------------------------------------------------


def test_items_come_in_order_from_several_processes_and_their_work_is_shared() -> None:
    def prepare(number: int) -> tuple[int, int]:
        time.sleep(0.02 * (number % 2))  # the second process is slower
        return number, os.getpid()

    found = itertools.islice(prepared_ahead(prepare, itertools.count(3), workers=2, prefetch=2), 12)
    items = list(found)
    assert [number for number, _ in items] == list(range(3, 15))
    assert len({pid for _, pid in items} - {os.getpid()}) == 2


def test_more_processes_than_items_are_no_mistake() -> None:
    """Case C50: 3 rows, 10 processes."""
    assert list(prepared_ahead(abs, [1, 2, 3], workers=10, prefetch=2)) == [1, 2, 3]


def test_processes_end_with_the_iterator() -> None:
    found = prepared_ahead(lambda _: os.getpid(), itertools.count(), workers=1, prefetch=1)
    pid = next(found)
    os.kill(pid, 0)
    found.close()  # type: ignore[attr-defined]
    del found
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and Path(f"/proc/{pid}").exists():
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


# --- the feed ---------------------------------------------------------------------------------


def feed_of(**changes: Any) -> Feed:
    settings: dict[str, Any] = {
        "examples": examples(*[3 + i % 11 for i in range(50)]),
        "batching": Padded(),
        "objective": TokenMean(),
        "pad_id": 256,
        "seq_len": 64,
        "batch": 8,
        "micro": 4,
        "seed": 1,
    }
    return Feed(**{**settings, **changes})


def taken(updates: Iterator[list[MicroBatch]], count: int) -> list[list[Any]]:
    return [
        [
            [tensor.tolist() for tensor in micro.tensors] + [micro.lengths, micro.counts]
            for micro in micros
        ]
        for micros in itertools.islice(updates, count)
    ]


@pytest.mark.parametrize("batching", [Padded(), Packed()])
@pytest.mark.parametrize("objective", [TokenMean(), SequenceMean()])
def test_updates_are_the_same_for_any_number_of_processes(batching: Any, objective: Any) -> None:
    """Case C50: 20 updates of 50 examples by 8, nearly three epochs."""
    feed = feed_of(batching=batching, objective=objective)
    alone = taken(fed(feed, CPU), 20)
    for workers in (1, 2):
        assert taken(fed(replace(feed, workers=workers), CPU), 20) == alone


def test_updates_by_number_are_the_slices_of_each_epochs_order() -> None:
    numbered = Numbered(50, batch=8, seed=3)
    for number in (6, 0, 13, 7):
        epoch, index = divmod(number, 7)
        found = numbered[number]
        assert (found.epoch, found.number) == (epoch, index)
        expected = order(50, seed=3, epoch=epoch)[index * 8 : index * 8 + 8]
        assert found.indices.tolist() == expected.tolist()


class Counted(list[Any]):
    """Examples that note which of them were looked up."""

    def __init__(self, found: Sequence[Any]) -> None:
        super().__init__(found)
        self.looked_up: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.looked_up.append(index)
        return super().__getitem__(index)


def test_a_prepared_corpus_is_entered_at_an_update_without_replaying_those_before() -> None:
    """Case C51: update 17 is number 3 of the third epoch; its 8 examples are all that is read."""
    found = Counted(feed_of().examples)
    feed = feed_of(examples=found)
    wanted = taken(feed.draws(), 19)[17:]
    found.looked_up.clear()
    later = feed_of(examples=found).draws(17)
    assert taken(later, 1) == wanted[:1]
    assert found.looked_up == order(50, seed=1, epoch=2)[24:32].tolist()
    assert taken(later, 1) == wanted[1:]


def test_no_worker_means_nothing_between_the_loop_and_the_feed() -> None:
    assert not hasattr(fed(feed_of(), CPU), "work")


def test_a_stream_is_fed_in_the_same_updates_with_and_without_processes(
    tmp_path: Path, small_blocks: None
) -> None:
    feed = feed_of(examples=(), stream=stream_of(tmp_path).stream)
    alone = taken(fed(feed, CPU), 15)
    ahead = fed(replace(feed, workers=2), CPU)
    assert taken(ahead, 15) == alone
    assert [len(micros) for micros in alone][:3] == [2, 2, 2]


def test_the_largest_micro_batch_of_a_stream_is_looked_for(tmp_path: Path) -> None:
    feed = feed_of(examples=(), stream=stream_of(tmp_path).stream)
    widths = [[m.counts.slots for m in micros] for micros in itertools.islice(feed.draws(), 7)]
    first, later = feed.probes(7)
    assert first[0].counts.slots == max(row[0] for row in widths)
    assert later[-1].counts.slots == max(row[-1] for row in widths if len(row) > 1)


def test_a_stream_whose_epoch_is_shorter_than_an_update_is_refused_unless_rows_may_lack(
    tmp_path: Path,
) -> None:
    """As of a prepared corpus, case C47: every update would be shorter than `batch` says."""
    assert stream_of(tmp_path).whole_updates
    assert not stream_of(tmp_path, on_bad="skip").whole_updates
    stream = stream_of(tmp_path, eval_share=0.5).stream
    assert stream is not None
    count = len(next(stream.updates(batch=1000, seed=0)).examples)
    feed = feed_of(examples=(), stream=stream, whole_updates=True)
    assert replace(feed, batch=count).probes(1)
    assert replace(feed, batch=count + 1, whole_updates=False).probes(1)
    with pytest.raises(UserError) as raised:
        replace(feed, batch=count + 1).probes(1)
    (fault,) = raised.value.faults
    assert fault.given == f"{count + 1} examples per update; an epoch of the stream has {count}"


def test_what_was_prepared_elsewhere_is_the_whole_and_what_was_waited_for_its_part() -> None:
    host = {"data": 0.2, "transfer": 0.1}
    assert Work(data_s=0.5).totals(host) == {"data": 0.5, "transfer": 0.1}
    assert Work(data_s=0.1).totals(host) == host
    assert Work().totals(host) == host


def test_closing_what_is_fed_ends_its_processes_though_it_is_held(tmp_path: Path) -> None:
    for feed in (feed_of(), feed_of(examples=(), stream=stream_of(tmp_path).stream)):
        before = set(multiprocessing.active_children())
        draws = fed(replace(feed, workers=2), CPU)
        next(draws)
        started = set(multiprocessing.active_children()) - before
        assert len(started) == 2
        draws.close()
        assert not any(process.is_alive() for process in started)


# --- copies ahead -----------------------------------------------------------------------------


class FakeEvent:
    """Stands for a CUDA event: remembers on which stream it was recorded."""

    def __init__(self) -> None:
        self.stream: Any = None

    def record(self, stream: Any) -> None:
        self.stream = stream


def test_copies_are_one_update_ahead_on_their_own_stream_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of things, without a GPU: events and streams are stand-ins."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "copies")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr("runner.ahead.event", lambda timed: FakeEvent())
    asked: list[int] = []

    def draws() -> Iterator[list[MicroBatch]]:
        for number, micros in enumerate(feed_of().draws()):
            asked.append(number)
            yield micros

    copied = Copied(draws(), CPU)  # type: ignore[arg-type]
    plain = feed_of().draws()
    seen = []
    for number in range(3):
        micros = next(copied)
        assert asked == list(range(number + 2))
        for micro, expected in zip(micros, next(plain), strict=True):
            assert micro.ready.stream == "copies"
            assert micro.input_ids.tolist() == expected.input_ids.tolist()
            assert micro.counts == expected.counts
        assert copied.work.copies is not None
        assert [one.stream for one in copied.work.copies] == ["copies", "copies"]
        seen.append(copied.work)
    assert len({id(work) for work in seen}) == 3


def test_a_copied_micro_batch_is_waited_for_on_the_stream_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (micro, _) = next(feed_of().draws())
    waits: list[Any] = []

    class Compute:
        def wait_event(self, event: Any) -> None:
            waits.append(event)

    compute = Compute()
    held: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: held.append(stream))
    ready = object()
    moved = to_device(replace(micro, ready=ready), torch.device("cuda", 0))
    assert waits == [ready]
    assert held == [compute] * len(micro.tensors)
    assert moved.input_ids is micro.input_ids
