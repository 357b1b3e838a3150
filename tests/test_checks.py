"""Tests of runner/checks.py: what identifies a workload, and what a setup."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.checks import job_id, setup_id, workload_id
from runner.compose import command_of
from runner.contracts import Fault, UserError
from runner.door import parser

HERE = Path()


def config(*words: str) -> dict[str, Any]:
    command = command_of(parser().parse_args(list(words)), Path("/tmp/nowhere"))
    return dict(command.jobs[0].config)


def refused(*words: str) -> list[Fault]:
    """The faults that the words are refused with, all of them together."""
    with pytest.raises(UserError) as raised:
        config(*words)
    return list(raised.value.faults)


def ids(*words: str) -> tuple[str, str]:
    chosen = config(*words)
    return workload_id(chosen, "corpus"), setup_id(chosen)


BASE = ids()


@pytest.mark.parametrize(
    "word",
    [
        "precision=bf16",
        "precision.scaling.init=8",
        "accum=4",
        "memory/gradients=zero",
        "optimizer.implementation=foreach",
    ],
)
def test_what_is_varied_changes_the_setup_and_not_the_workload(word: str) -> None:
    words = ["precision=fp16", word] if "scaling" in word else [word]
    workload, setup = ids(*words)
    assert workload == BASE[0]
    assert setup != BASE[1]


@pytest.mark.parametrize(
    "word",
    [
        "batch=32",
        "updates=151",
        "seq_len=64",
        "optimizer.lr=1e-3",
        "schedule.warmup=3",
        "clip=null",
        "model.layers=3",
        "data=pydocs",
        "eval.examples=100",
        "objective=sequence_mean",
    ],
)
def test_what_is_held_fixed_changes_the_workload_and_not_the_setup(word: str) -> None:
    workload, setup = ids(word)
    assert workload != BASE[0]
    assert setup == BASE[1]


@pytest.mark.parametrize(
    "word", ["seed=7", "tracking=off", "device=cpu", "cache=elsewhere", "quality.margin=0.02"]
)
def test_repeats_and_places_change_neither(word: str) -> None:
    assert ids(word) == BASE


def test_another_corpus_is_another_workload() -> None:
    assert workload_id(config(), "a") != workload_id(config(), "b")


def test_the_same_job_is_known_again_and_any_change_makes_another() -> None:
    assert job_id(config("seed=1"), HERE) == job_id(config("seed=1", "tracking=off"), HERE)
    others = ["seed=2", "optimizer.lr=1e-3", "precision=bf16", "accum=2", "updates=7"]
    assert len({job_id(config("seed=1", *([w] if w else [])), HERE) for w in ["", *others]}) == 6
