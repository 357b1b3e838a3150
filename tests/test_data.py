"""Tests for the corpora: runner/data/docstrings.py, pydocs.py and their configs."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from runner.accounting import unigram_entropy
from runner.contracts import Batching, Corpus, Data, Example, Objective
from runner.data import stdlib
from runner.data.docstrings import Docstrings
from runner.data.pydocs import PyDocs
from runner.data.stats import target_counts

ROOT = Path(__file__).parents[1]
END = 257

pytestmark = pytest.mark.xdist_group("docstrings")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def documented() -> list[ast.AST]:
    """Everything that was found to have a docstring while the corpus was made."""
    return []


@pytest.fixture(scope="module")
def docstrings(cache: str, documented: list[ast.AST]) -> Corpus:
    find = stdlib.signature
    with pytest.MonkeyPatch.context() as patch, pytest.warns(UserWarning, match="no target"):
        patch.setattr(stdlib, "signature", lambda node: documented.append(node) or find(node))
        return Docstrings().load(seq_len=256, cache=cache)


def texts(example: Example) -> tuple[str, str]:
    """Prompt and completion; bytes cut within a character are replaced."""
    ids = example.ids[example.ids != END].astype(np.uint8)
    loss = example.loss[: len(ids)]
    prompt, completion = ids[~loss].tobytes(), ids[loss].tobytes()
    return prompt.decode(errors="replace"), completion.decode(errors="replace")


def everything(corpus: Corpus) -> list[Example]:
    return [*corpus.train, *corpus.eval]


def test_a_docstring_is_predicted_from_its_signature(docstrings: Corpus) -> None:
    found = dict(texts(example) for example in everything(docstrings))
    joined = found["def join(a, *p):\n"]
    assert os.path.join.__doc__ is not None
    assert joined == (inspect.getdoc(os.path.join) or "")[: len(joined)]


def test_every_documented_thing_is_an_example_or_counted(
    docstrings: Corpus, documented: list[ast.AST]
) -> None:
    kept = len(docstrings.train) + len(docstrings.eval)
    assert kept + sum(docstrings.dropped.values()) == len(documented)
    assert kept > 5000


def test_an_example_ends_with_end_of_text_unless_it_was_truncated(docstrings: Corpus) -> None:
    cut = [e for e in everything(docstrings) if e.ids[-1] != END]
    assert len(cut) == docstrings.truncated
    assert {e.length for e in cut} == {256}
    assert max(e.length for e in everything(docstrings)) == 256


def test_the_signature_is_masked_up_to_its_newline_and_nothing_else(docstrings: Corpus) -> None:
    for example in docstrings.eval:
        first = int(np.argmax(example.loss))
        assert example.loss[first:].all()
        assert chr(example.ids[first - 1]) == "\n"
        assert b"\n" not in example.ids[: first - 1].astype(np.uint8).tobytes()


def test_no_held_out_text_is_trained_on(docstrings: Corpus) -> None:
    trained = {texts(e) for e in docstrings.train if e.ids[-1] == END}
    held_out = {texts(e) for e in docstrings.eval if e.ids[-1] == END}
    assert not trained & held_out
    assert len(trained) == sum(e.ids[-1] == END for e in docstrings.train)


def test_about_a_twentieth_is_held_out(docstrings: Corpus) -> None:
    share = len(docstrings.eval) / len(everything(docstrings))
    assert 0.04 < share < 0.06


def test_guessing_by_frequency_alone_costs_about_what_english_bytes_do(docstrings: Corpus) -> None:
    """English text with spaces has some 4.1 to 4.8 bits per letter without context."""
    bits = unigram_entropy(target_counts(docstrings.eval)) / np.log(2)
    assert 4.0 < bits < 5.2


def test_the_same_corpus_comes_from_the_cache(docstrings: Corpus, cache: str) -> None:
    again = Docstrings().load(seq_len=256, cache=cache)
    assert again.fingerprint == docstrings.fingerprint
    assert all(
        np.array_equal(a.ids, b.ids) and np.array_equal(a.loss, b.loss)
        for a, b in zip(everything(again), everything(docstrings), strict=True)
    )


def test_the_topics_are_cut_and_put_together_again_whole(cache: str) -> None:
    corpus = PyDocs().load(seq_len=100, cache=cache)
    path = stdlib.library() / "pydoc_data" / "topics.py"
    whole = {text.completion for text in stdlib.topics(path)}
    found: list[str] = []
    for examples in (corpus.train, corpus.eval):
        ids = np.concatenate([e.ids for e in examples])
        for topic in np.split(ids, np.flatnonzero(ids == END) + 1)[:-1]:
            found.append(topic[:-1].astype(np.uint8).tobytes().decode())
        assert ids[-1] == END
    assert sorted(found) == sorted(whole)
    assert all(e.loss.all() and 2 <= e.length <= 100 for e in everything(corpus))
    assert (corpus.truncated, corpus.dropped.get("no_targets", 0)) == (0, 0)


JOB = """
import json, sys
import runner.data.docstrings, runner.data.padded, runner.objective
from runner.data.pydocs import PyDocs
heavy = sorted({"torch", "datasets", "transformers", "mlflow"} & set(sys.modules))
corpus = PyDocs().load(seq_len=256, cache=sys.argv[1])
imported = sorted({"torch", "pydoc_data.topics"} & set(sys.modules))
print(json.dumps({"heavy": heavy, "imported": imported, "fingerprint": corpus.fingerprint}))
"""


def test_loading_is_quiet_light_and_writes_to_the_cache_alone(cache: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(tmp_path / "cache")],
        env={key: value for key, value in environment.items() if not key.startswith("HF_")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert json.loads(done.stdout) == {
        "heavy": [],
        "imported": [],
        "fingerprint": PyDocs().load(seq_len=256, cache=cache).fingerprint,
    }
    assert list(home.rglob("*")) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "home"]


CONTRACTS = {"data": Data, "batching": Batching, "objective": Objective}
OPTIONS = [
    (group, path) for group in CONTRACTS for path in sorted((ROOT / "conf" / group).glob("*.yaml"))
]


@pytest.mark.parametrize(("group", "path"), OPTIONS, ids=[path.stem for _, path in OPTIONS])
def test_each_option_builds_a_part_of_its_group(group: str, path: Path) -> None:
    node: dict[str, Any] = yaml.safe_load(path.read_text())
    node.pop("defaults", None)
    module, _, name = node.pop("_target_").rpartition(".")
    part = getattr(importlib.import_module(module), name)(**node)
    assert isinstance(part, CONTRACTS[group])


@pytest.mark.parametrize("part", [Docstrings, PyDocs])
def test_a_share_out_of_range_is_refused_when_the_part_is_made(part: Any) -> None:
    with pytest.raises(ValueError, match=r"eval_share: given 1\.5; allowed: above 0, below 1"):
        part(eval_share=1.5)


def test_all_fields_of_a_corpus_but_its_feeding_belong_to_the_workload() -> None:
    assert Docstrings.setup_keys == PyDocs.setup_keys == {"workers", "prefetch"}
