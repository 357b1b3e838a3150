"""Tests for runner/data/hub.py, on a folder in the hub's layout, read by the code that reads the
hub; and for runner/data/synthetic.py."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from runner.accounting import unigram_entropy
from runner.contracts import UserError
from runner.data.hub import Hub
from runner.data.padded import Padded
from runner.data.stats import target_counts
from runner.data.synthetic import Synthetic, entropy_of, probabilities
from runner.feed import Feed
from runner.objective import TokenMean
from tests.filed import texts

CARD = """---
configs:
- config_name: small
  default: true
  data_files:
  - {split: train, path: "data/train-*"}
  - {split: validation, path: "data/validation-*"}
---
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 rows to train on in two shards, the last one null, and 4 to hold out."""
    folder = tmp_path_factory.mktemp("owner") / "name"
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    rows = [f"train {i}" for i in range(19)] + [None]
    for number in range(2):
        table = pa.table({"body": pa.array(rows[10 * number : 10 * number + 10], pa.string())})
        pq.write_table(table, folder / "data" / f"train-0000{number}-of-00002.parquet")
    held_out = pa.table({"body": [f"held out {i}" for i in range(4)]})
    pq.write_table(held_out, folder / "data" / "validation-00000-of-00001.parquet")
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` keeps what it prepares in the test's folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def load(part: Hub, tmp_path: Path) -> Any:
    return part.load(seq_len=64, cache=str(tmp_path / "cache"))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_is_read_by_name_and_its_splits_are_kept(
    streaming: bool, stand_in: Path, tmp_path: Path
) -> None:
    part = Hub(
        name=str(stand_in),
        text="body",
        eval_split="validation",
        on_bad="skip",
        streaming=streaming,
    )
    corpus = load(part, tmp_path)
    assert [bytes(e.ids[:-1].tolist()).decode() for e in corpus.eval] == [
        f"held out {i}" for i in range(4)
    ]
    if streaming:
        (draw,) = itertools.islice(corpus.stream.updates(batch=100, seed=0), 1)
        found = sorted(bytes(e.ids[:-1].tolist()).decode() for e in draw.examples)
    else:
        found = [text for text in texts(corpus) if text.startswith("train")]
    assert found == sorted(f"train {i}" for i in range(19))
    assert dict(corpus.dropped) == {"null": 1}


def test_without_an_evaluation_split_a_share_is_held_out(stand_in: Path, tmp_path: Path) -> None:
    part = Hub(name=str(stand_in), text="body", eval_share=0.4, on_bad="skip")
    corpus = load(part, tmp_path)
    assert texts(corpus) == sorted(f"train {i}" for i in range(19))
    assert 0 < len(corpus.eval) < 19
    assert load(part, tmp_path).fingerprint == corpus.fingerprint
    other = Hub(name=str(stand_in), text="body", eval_share=0.5, on_bad="skip")
    assert load(other, tmp_path).fingerprint != corpus.fingerprint


def test_a_faulty_row_is_named(stand_in: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"split train, row 20: field 'body' is null"):
        load(Hub(name=str(stand_in), text="body"), tmp_path)
    with pytest.raises(UserError, match=r"row 1: no field 'text'; its fields: 'body'"):
        load(Hub(name=str(stand_in)), tmp_path)
    streamed = Hub(name=str(stand_in), text="body", streaming=True, eval_split="validation")
    stream = load(streamed, tmp_path).stream
    with pytest.raises(UserError, match=r"shard 2 of 2, row 10: field 'body' is null"):
        list(itertools.islice(stream.updates(batch=2, seed=0), 40))


def test_a_split_or_a_folder_that_is_not_there_is_named(stand_in: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{stand_in}, split test"):
        load(Hub(name=str(stand_in), text="body", split="test"), tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=f"data.name: given {tmp_path}/empty"):
        load(Hub(name=str(tmp_path / "empty")), tmp_path)


def test_what_a_hub_stream_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="workers: given 2; allowed: 0 with streaming=true"):
        Hub(name="owner/name", streaming=True, workers=2)
    job = {"epochs": 1, "skip_finished": True}
    keys = [fault.key for fault in Hub(name="owner/name", streaming=True).conflicts(job)]
    assert keys == ["epochs", "skip_finished"]
    assert not Hub(name="owner/name", revision="abc").conflicts(job)


# --- synthetic --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "entropy"), [(2, 0.3), (256, 4.0), (256, math.log(256)), (50_000, 7.0)]
)
def test_the_distribution_has_the_entropy_asked_for(vocab: int, entropy: float) -> None:
    found = probabilities(vocab, entropy)
    assert entropy_of(found) == pytest.approx(entropy, abs=1e-9)
    assert found.sum() == pytest.approx(1)
    assert (np.diff(found) <= 0).all()


def test_drawn_tokens_have_the_stated_entropy_and_lengths() -> None:
    part = Synthetic(entropy=3.0, length=40, spread=0.5, vocab=100, examples=3000)
    corpus = part.load(seq_len=1000, cache="")
    assert (len(corpus.train), len(corpus.eval), corpus.vocab) == (3000, 256, 100)
    counts = target_counts(corpus.train)
    assert sum(counts.values()) == sum(e.length - 1 for e in corpus.train) > 100_000
    assert unigram_entropy(counts) == pytest.approx(3.0, abs=0.01)
    logs = np.log([example.length for example in corpus.train])
    assert np.exp(np.median(logs)) == pytest.approx(40, abs=1.5)
    assert logs.std() == pytest.approx(0.5, abs=0.02)
    pairs = Counter(
        (int(a), int(b)) for e in corpus.train for a, b in itertools.pairwise(e.ids[:2])
    )
    expected = probabilities(100, 3.0)[0] ** 2
    assert pairs[0, 0] / pairs.total() == pytest.approx(expected, rel=0.25)


def test_the_same_source_gives_the_same_examples_and_another_others() -> None:
    def digest(**changes: Any) -> str:
        return Synthetic(**({"examples": 64} | changes)).load(seq_len=64, cache="").fingerprint

    assert digest() == digest() == digest(delay=0.001)
    assert len({digest(), digest(source=1), digest(entropy=2.0), digest(length=20)}) == 4


def test_lengths_beyond_the_limit_are_cut_and_counted() -> None:
    corpus = Synthetic(length=10, spread=0, examples=20, held_out=5).load(seq_len=8, cache="")
    assert {e.length for e in (*corpus.train, *corpus.eval)} == {8}
    assert corpus.truncated == 25
    assert corpus.tokens == 160


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"entropy": 6.0}, "entropy: given 6.0; allowed: above 0, up to ln"),
        ({"entropy": 0.0}, "entropy: given 0.0"),
        ({"entropy": math.nan}, "entropy: given nan"),
        ({"examples": 0}, "examples: given 0; allowed: 1 or more"),
        ({"delay": -1.0}, "delay: given -1.0"),
        ({"workers": -1}, "workers: given -1; allowed: 0 or more"),
        ({"prefetch": 0}, "prefetch: given 0; allowed: 1 or more"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Synthetic(**changes)


def test_a_delay_is_felt_in_training_and_not_in_looking_ahead() -> None:
    corpus = Synthetic(delay=0.01, examples=50, length=20).load(seq_len=64, cache="")
    feed = Feed(
        examples=corpus.train,
        batching=Padded(),
        objective=TokenMean(),
        pad_id=0,
        seq_len=64,
        batch=10,
        micro=10,
        seed=0,
    )
    begin = time.perf_counter()
    (first,) = feed.probes(5)
    assert time.perf_counter() - begin < 0.1
    begin = time.perf_counter()
    widest = max(next(feed.draws(start))[0].counts.slots for start in range(5))
    assert time.perf_counter() - begin >= 50 * 0.01
    assert first[0].counts.slots == widest
