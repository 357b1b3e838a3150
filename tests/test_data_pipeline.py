"""Tests for runner/data/pipeline.py, prepare.py and examples.py: texts become a corpus, once."""

from __future__ import annotations

import platform
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.contracts import Corpus, Example, UserError
from runner.data import pipeline, storage
from runner.data.examples import Chunk, StoredExamples, ends
from runner.data.prepare import Options
from runner.data.stats import target_counts
from runner.data.texts import Message, Part, Text, Texts, collect, plain_chat, side
from runner.data.tokenizer import ByteTokenizer, TokenizerPart

PAD, END = 256, 257
SHARE = 0.5


def text_on(wanted: str, completion: str, prompt: str) -> Text:
    """A text of the given form on the wanted side: its first letter is varied."""
    for letter in "abcdefghijklmnopqrstuvwxyz":
        if side(letter + prompt[1:], completion, eval_share=SHARE) == wanted:
            return Text(prompt=letter + prompt[1:], completion=completion)
    raise AssertionError


HELD_OUT = text_on("eval", "held out", "p")
HELD_OUT_SHORT = text_on("eval", "x", "p")
TRAINED = text_on("train", "trained", "p")


def options(**changes: Any) -> Options:
    defaults = {"name": "made", "seq_len": 64, "eval_share": SHARE, "overlong": "truncate"}
    return Options(**(defaults | changes))


def load(
    texts: Texts | Callable[[], Texts],
    cache: Path,
    *,
    stamp: str = "stamp",
    tokenizer: TokenizerPart | None = None,
    **changes: Any,
) -> Corpus:
    return pipeline.load(
        texts if callable(texts) else lambda: texts,
        stamp=stamp,
        options=options(**changes),
        tokenizer=tokenizer or ByteTokenizer(),
        cache=str(cache),
    )


def never() -> Texts:
    raise AssertionError("the source was read again")


def content(corpus: Corpus) -> list[tuple[str, list[int], list[bool]]]:
    return [
        (name, example.ids.tolist(), example.loss.tolist())
        for name, examples in (("train", corpus.train), ("eval", corpus.eval))
        for example in examples
    ]


def test_prompt_completion_and_end_of_text_make_one_example(tmp_path: Path) -> None:
    corpus = load(collect([TRAINED, HELD_OUT]), tmp_path)
    (train,), (held_out,) = corpus.train, corpus.eval
    assert train.ids.tolist() == [*TRAINED.prompt.encode(), *b"trained", END]
    assert train.loss.tolist() == [False] + [True] * 8
    assert held_out.ids.tolist() == [*HELD_OUT.prompt.encode(), *b"held out", END]
    assert (corpus.vocab, corpus.pad_id, corpus.truncated) == (258, PAD, 0)
    assert dict(corpus.dropped) == {}
    assert corpus.prepared_s > 0


def test_examples_that_lost_every_target_are_left_out_and_counted(tmp_path: Path) -> None:
    """Case C11, at a limit of 8 tokens."""
    texts = collect(
        [
            text_on("train", "ans", "p" * 10),
            text_on("train", "ans", "p" * 4),
            text_on("train", "answer-ix", "p" * 4),
            text_on("eval", "x", "p"),
        ]
    )
    with pytest.warns(UserWarning, match="1 examples have no target within the length limit"):
        corpus = load(texts, tmp_path, seq_len=8)
    assert [example.useful for example in corpus.train] == [4, 4]
    assert corpus.train[0].ids.tolist()[4:] == [*b"ans", END]
    assert corpus.train[1].ids.tolist()[4:] == [*b"answ"]
    assert corpus.truncated == 1
    assert dict(corpus.dropped) == {"no_targets": 1}


def test_an_example_that_just_fits_is_not_truncated(tmp_path: Path) -> None:
    fits = text_on("train", "123456", "p")
    over = text_on("train", "1234567", "p")
    corpus = load(collect([fits, over, HELD_OUT_SHORT]), tmp_path, seq_len=8)
    assert [example.ids.tolist()[-1] for example in corpus.train] == [END, ord("7")]
    assert corpus.truncated == 1


def test_reasons_of_the_source_and_of_the_limit_are_counted_together(tmp_path: Path) -> None:
    texts = collect([TRAINED, HELD_OUT, TRAINED, Text(prompt="p", completion="")])
    assert dict(load(texts, tmp_path).dropped) == {"duplicates": 1, "empty": 1}


def test_a_long_text_is_cut_into_consecutive_examples_without_loss(tmp_path: Path) -> None:
    long = text_on("train", "abcdefghijk", "p")
    corpus = load(collect([long, HELD_OUT_SHORT]), tmp_path, seq_len=4, overlong="cut")
    assert [example.ids.tolist() for example in corpus.train] == [
        [long.prompt.encode()[0], *b"abc"],
        [*b"defg"],
        [*b"hij"],
        [ord("k"), END],
    ]
    assert [example.useful for example in corpus.train] == [3, 3, 2, 1]
    assert corpus.truncated == 0


def test_a_piece_of_one_token_has_no_target_and_is_counted(tmp_path: Path) -> None:
    """Case C05: cut at 2, `ab` and its end are a piece of one token and one of two."""
    letters = next(
        pair for pair in ("ab", "cd", "ef", "gh") if side("", pair, eval_share=SHARE) == "train"
    )
    texts = collect([Text(prompt="", completion=letters), HELD_OUT_SHORT])
    with pytest.warns(UserWarning, match="have no target"):
        corpus = load(texts, tmp_path, seq_len=2, overlong="cut")
    assert [example.ids.tolist() for example in corpus.train] == [[ord(letters[1]), END]]
    assert dict(corpus.dropped) == {"no_targets": 2}


@given(length=st.integers(1, 200), limit=st.integers(3, 40))
def test_pieces_are_consecutive_within_the_limit_and_never_one_token(
    length: int, limit: int
) -> None:
    cuts = [0, *ends(length, limit)]
    sizes = [end - start for start, end in pairwise(cuts)]
    assert sum(sizes) == length
    assert max(sizes) <= limit
    assert len(sizes) == -(-length // limit)
    assert length == 1 or min(sizes) >= 2


def test_the_split_does_not_depend_on_position_or_length_limit(tmp_path: Path) -> None:
    texts = [Text(prompt=f"name {i}", completion="body " * (i % 7 + 1)) for i in range(60)]
    found = []
    for number, (rows, limit) in enumerate([(texts, 64), (texts[::-1], 64), (texts, 12)]):
        corpus = load(collect(rows), tmp_path, stamp=str(number), seq_len=limit)
        found.append({bytes(e.ids.tolist()[:7]) for e in corpus.eval})
    assert found[0] == found[1] == found[2]
    assert 10 < len(found[0]) < 50


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Takes a text of numbers for their ids."""

    identity: str = "numbers"
    vocab: int = 70_001
    pad_id: int = 0
    eos_id: int = 1
    begin_ids: tuple[int, ...] = ()

    def make(self, texts: Any, *, source: str, cache: Path) -> Numbers:
        return self

    def encode(self, texts: Sequence[str]) -> list[np.ndarray[Any, Any]]:
        return [np.array([int(word) for word in text.split()], dtype=np.int64) for text in texts]

    def render(self, messages: Sequence[Message]) -> tuple[Part, ...]:
        return plain_chat(messages)


def test_ids_over_16_bits_are_read_back_exactly(tmp_path: Path) -> None:
    """Case C49: in 16 bits, 65536 and 70000 would come back as 0 and 4464."""
    completions = [f"65535 65536 70000 {i}" for i in range(8)]
    texts = collect(Text(prompt="", completion=text) for text in completions)
    corpus = load(texts, tmp_path, tokenizer=Numbers())
    found = [example.ids.tolist() for example in (*corpus.train, *corpus.eval)]
    assert sorted(found) == [[65535, 65536, 70000, i, 1] for i in range(8)]


def test_an_id_that_the_vocabulary_does_not_hold_is_refused(tmp_path: Path) -> None:
    texts = collect(Text(prompt="", completion=f"{i} 70000") for i in range(8))
    with pytest.raises(ValueError, match=r"allowed: 0 to 69999 \(vocab 70000\)"):
        load(texts, tmp_path, tokenizer=Numbers(vocab=70_000))
    assert list(tmp_path.glob("made-*")) == []


@pytest.mark.parametrize(
    ("rows", "counts"),
    [
        ([], "0 rows after dropping {}, 0 usable for train, 0 usable for eval"),
        ([TRAINED, TRAINED], "1 rows after dropping {'duplicates': 1}, 1 usable for train, 0 us"),
        ([HELD_OUT], "1 rows after dropping {}, 0 usable for train, 1 usable for eval"),
    ],
)
def test_a_split_without_a_usable_example_is_refused_with_counts(
    rows: list[Text], counts: str, tmp_path: Path
) -> None:
    """Case C47."""
    with pytest.raises(UserError) as raised:
        load(collect(rows), tmp_path)
    (fault,) = raised.value.faults
    assert counts in fault.given
    assert fault.key == "data"
    assert fault.allowed == "at least 1 usable example for train and 1 for eval"
    assert list(tmp_path.glob("made-*")) == []


def test_rows_that_lost_every_target_are_not_said_to_be_dropped_before_they_are_counted(
    tmp_path: Path,
) -> None:
    rows = [Text(prompt=f"{i} a prompt beyond the limit", completion="answer") for i in range(3)]
    with pytest.raises(UserError) as raised:
        load(collect(rows), tmp_path, seq_len=2)
    (fault,) = raised.value.faults
    words = "3 rows after dropping {}, 3 examples without a target, 0 usable for train, 0 usable"
    assert words in fault.given


def test_a_limit_without_room_for_a_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="seq_len: given 1; allowed: 2 or more"):
        load(never, tmp_path, seq_len=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_share": 0.0}, "eval_share: given 0.0; allowed: above 0, below 1"),
        ({"eval_share": 1.0}, "eval_share: given 1.0; allowed: above 0, below 1"),
        ({"eval_share": float("nan")}, "eval_share: given nan"),
        ({"overlong": "wrap"}, "overlong: given 'wrap'; allowed: truncate, cut"),
        ({"name": "../x"}, "name: given '../x'"),
    ],
)
def test_an_option_out_of_range_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        options(**changes)


# --- the cache --------------------------------------------------------------------------------

TEXTS = collect([TRAINED, HELD_OUT, text_on("train", "more", "p")])


def test_a_second_load_reads_no_source_and_gives_the_same(tmp_path: Path) -> None:
    first = load(TEXTS, tmp_path)
    second = load(never, tmp_path)
    assert content(second) == content(first)
    assert second.fingerprint == first.fingerprint
    assert (second.truncated, second.dropped) == (first.truncated, first.dropped)


def test_counts_survive_the_cache(tmp_path: Path) -> None:
    texts = collect([TRAINED, TRAINED, text_on("train", "long" * 9, "p"), HELD_OUT])
    load(texts, tmp_path, seq_len=12)
    again = load(never, tmp_path, seq_len=12)
    assert (again.truncated, dict(again.dropped)) == (1, {"duplicates": 1})


def test_a_touched_source_with_the_same_content_keeps_the_cached_corpus(tmp_path: Path) -> None:
    first = load(TEXTS, tmp_path, stamp="before")
    (place,) = tmp_path.glob("made-*")
    made = place.stat().st_ino
    assert load(TEXTS, tmp_path, stamp="after").fingerprint == first.fingerprint
    assert place.stat().st_ino == made
    load(never, tmp_path, stamp="after")


def test_a_changed_source_is_noticed(tmp_path: Path) -> None:
    changed = collect([TRAINED, HELD_OUT, text_on("train", "most", "p")])
    before = load(TEXTS, tmp_path, stamp="before")
    after = load(changed, tmp_path, stamp="after")
    assert before.fingerprint != after.fingerprint
    assert bytes(after.train[1].ids.tolist()[1:5]) == b"most"
    assert content(load(never, tmp_path, stamp="before")) == content(before)


def test_whatever_decides_the_examples_changes_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = options()
    found = [
        pipeline.fingerprint("source", plain, ByteTokenizer()),
        pipeline.fingerprint("other", plain, ByteTokenizer()),
        pipeline.fingerprint("source", options(seq_len=65), ByteTokenizer()),
        pipeline.fingerprint("source", options(eval_share=0.4), ByteTokenizer()),
        pipeline.fingerprint("source", options(overlong="cut"), ByteTokenizer()),
        pipeline.fingerprint("source", options(name="other"), ByteTokenizer()),
        pipeline.fingerprint("source", plain, Numbers()),
        pipeline.fingerprint("source", plain, Numbers(identity="letters")),
        pipeline.fingerprint("source", plain, Numbers(vocab=70_002)),
        pipeline.fingerprint("source", plain, Numbers(eos_id=2)),
        pipeline.fingerprint("source", plain, Numbers(begin_ids=(2,))),
    ]
    assert pipeline.fingerprint("source", options(), ByteTokenizer()) == found[0]
    monkeypatch.setattr(pipeline, "FORMAT", pipeline.FORMAT + 1)
    found.append(pipeline.fingerprint("source", plain, ByteTokenizer()))
    monkeypatch.setattr(platform, "python_version", lambda: "2.7.0")
    found.append(pipeline.fingerprint("source", plain, ByteTokenizer()))
    assert len(set(found)) == 13


@pytest.mark.parametrize("known", [True, False])
def test_a_truncated_cache_is_rebuilt_with_one_warning(known: bool, tmp_path: Path) -> None:
    first = content(load(TEXTS, tmp_path))
    (file,) = tmp_path.glob("made-*/train/*.arrow")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match="damaged corpus cache") as found:
        mended = load(TEXTS, tmp_path, stamp="stamp" if known else "unknown stamp")
    assert len(found) == 1
    assert content(mended) == first
    assert file.read_bytes() == whole
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(never, tmp_path)


def test_a_damaged_cache_keeps_serving_a_job_that_has_it_open(tmp_path: Path) -> None:
    corpus = load(TEXTS, tmp_path)
    before = content(corpus)
    (manifest,) = tmp_path.glob("made-*/manifest.json")
    manifest.unlink()
    with pytest.warns(UserWarning, match="damaged"):
        load(TEXTS, tmp_path)
    assert content(corpus) == before


JOB = """
import sys
from tests.test_data_pipeline import TEXTS, content, load
from pathlib import Path
print(content(load(TEXTS, Path(sys.argv[1]))))
"""


def test_jobs_that_prepare_the_same_corpus_at_once_all_get_it(tmp_path: Path) -> None:
    jobs = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", JOB, str(tmp_path / "cache")],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        for _ in range(2)
    ]
    printed = [job.communicate(timeout=60)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert printed == [f"{content(load(never, tmp_path / 'cache'))}\n"] * 2
    assert sorted(path.name[:4] for path in (tmp_path / "cache").iterdir()) == ["made", "sour"]


def test_what_is_stored_is_what_datasets_reads(tmp_path: Path) -> None:
    from datasets import Dataset

    corpus = load(TEXTS, tmp_path)
    (file,) = tmp_path.glob("made-*/train/*.arrow")
    rows = Dataset.from_file(str(file))
    assert rows["ids"][:] == [example.ids.tolist() for example in corpus.train]
    assert rows["loss"][:] == [example.loss.astype(int).tolist() for example in corpus.train]


@pytest.mark.parametrize("inner", ["", "/deeper"])
def test_a_cache_that_cannot_be_written_is_the_users_to_mend(inner: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError) as raised:
        load(TEXTS, tmp_path / f"file{inner}")
    (fault,) = raised.value.faults
    assert fault.key == "cache"
    assert fault.given.startswith(f"{tmp_path}/file{inner}: ")
    assert fault.next_step == "cache=FOLDER"


# --- look-ups ---------------------------------------------------------------------------------


def chunk(*rows: list[int]) -> Chunk:
    flat = np.array([i for row in rows for i in row], dtype=np.uint16)
    offsets = np.cumsum([0, *map(len, rows)])
    return Chunk(ids=flat, loss=flat % 2 == 0, offsets=offsets)


def test_examples_are_found_across_chunks() -> None:
    examples = StoredExamples([chunk([1, 2], [3]), chunk([4, 5, 6]), chunk([7], [8, 9])])
    rows = [[1, 2], [3], [4, 5, 6], [7], [8, 9]]
    assert len(examples) == 5
    assert [examples[i].ids.tolist() for i in range(5)] == rows
    assert [example.ids.tolist() for example in examples] == rows
    assert [examples[i].ids.tolist() for i in range(-5, 0)] == rows
    assert [example.ids.tolist() for example in examples[1:4:2]] == [[3], [7]]
    assert examples[np.int64(2)].loss.tolist() == [True, False, True]
    for outside in (5, -6):
        with pytest.raises(IndexError):
            examples[outside]


def test_a_corpus_of_several_chunks_is_read_back_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "CHUNK_TOKENS", 6000)
    texts = collect(Text(prompt=f"{i:05d}", completion="x" * (i % 5 + 1)) for i in range(4500))
    corpus = load(texts, tmp_path)
    assert isinstance(corpus.train, StoredExamples)
    assert len(corpus.train.chunks) > 1
    expected = [
        row for row in texts.rows if side(row.prompt, row.completion, eval_share=SHARE) == "train"
    ]
    assert [e.ids.tolist() for e in corpus.train] == [
        [*(row.prompt + row.completion).encode(), END] for row in expected
    ]


def resident(file: str) -> int:
    """KiB of a mapped file that are resident in this process."""
    found = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        inside = line.endswith(file) if "-" in line.split(" ")[0] else inside
        if inside and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found


def test_looking_at_all_of_a_large_file_does_not_make_it_resident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 MB on disk, in 4,000 examples of about 2,000 tokens, in several chunks."""
    rng = np.random.default_rng(0)
    rows = [
        Example(ids=rng.integers(0, 250, 2000 - i % 7), loss=rng.random(2000 - i % 7) < 0.5)
        for i in range(4000)
    ]
    monkeypatch.setattr(storage, "CHUNK_TOKENS", 2**21)
    with storage.ExampleWriter(tmp_path / "made", 258) as writer:
        for start in range(0, 4000, 100):
            writer.write(rows[start : start + 100])
    assert (writer.examples, writer.tokens) == (4000, sum(row.length for row in rows))

    def agree(examples: Sequence[Example]) -> int:
        assert len(examples) == 4000
        for number in rng.permutation(4000).tolist():
            assert np.array_equal(examples[number].ids, rows[number].ids)
            assert np.array_equal(examples[number].loss, rows[number].loss)
        return resident("made/data.arrow")

    mapped = storage.read_examples(tmp_path / "made")
    assert isinstance(mapped, StoredExamples)
    assert len(mapped.chunks) == 4
    assert agree(mapped) > 16_000
    del mapped
    monkeypatch.setattr(storage, "LARGE", 2**20)
    read = storage.read_examples(tmp_path / "made")
    assert agree(read) == 0
    assert read[-1].ids.dtype == np.uint16
    assert read[-1].loss.dtype == np.bool_
    assert [one.length for one in read[5:9]] == [one.length for one in rows[5:9]]
    with pytest.raises(IndexError):
        read[4000]
    with pytest.raises(ValueError, match="read-only"):
        read[0].ids[0] = 0


def test_stored_examples_cannot_be_written_to(tmp_path: Path) -> None:
    example = load(TEXTS, tmp_path).train[0]
    with pytest.raises(ValueError, match="read-only"):
        example.ids[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        example.loss[0] = True


def test_target_counts_leave_out_prompts_and_first_tokens() -> None:
    examples = [
        Example(ids=np.array([5, 7, 7, 9]), loss=np.array([False, False, True, True])),
        Example(ids=np.array([9, 9], dtype=np.uint16), loss=np.array([True, True])),
        Example(ids=np.array([4]), loss=np.array([True])),
    ]
    assert target_counts(examples) == {7: 1, 9: 2}
    assert target_counts([]) == {}
