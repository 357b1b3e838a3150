"""Tests of runner/compiling.py: compiled runs are the same runs, and say what they compiled."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.assemble import assemble, check_device
from runner.checks import build_parts
from runner.compiling import Compilations
from runner.contracts import Unsupported
from runner.journal import Journal
from runner.loop import Loop
from runner.measure.clock import HostClock
from tests.support import example
from tests.test_assemble import CPU, SMALL, corpus
from tests.test_checks import config


def trained(folder: Path, *words: str) -> tuple[Loop, Compilations]:
    """A ragged run of 14 updates: lengths and the rows of the last update of an epoch differ."""
    folder.mkdir()
    chosen = config(*SMALL, "batch=4", "accum=2", *words)
    made = [example(n, seed=n) for n in range(4, 34)]
    job = assemble(chosen, build_parts(chosen), CPU, corpus(train=made))
    with Compilations() as compilations:
        loop = Loop(
            training=job.training,
            draws=job.feed.draws(),
            clock=HostClock(),
            journal=Journal(folder / "journal.jsonl"),
            evaluation=job.evaluation,
            updates=14,
            warmup=0,
            eval_every=5,
            stop=lambda: False,
            compiled=lambda: compilations.graphs,
        )
        loop.run()
    return loop, compilations


@pytest.mark.slow
def test_a_compiled_run_has_the_same_losses_and_compiles_a_handful_of_graphs(
    tmp_path: Path,
) -> None:
    eager, nothing = trained(tmp_path / "eager")
    fast, counted = trained(tmp_path / "fast", "compile=default")
    assert (nothing.graphs, nothing.seconds) == (0, 0.0)
    assert [r.loss for r in fast.records] == pytest.approx(
        [r.loss for r in eager.records], abs=1e-4
    )
    held_out = [[e.eval_loss for e in loop.evaluations] for loop in (eager, fast)]
    assert held_out[0] == pytest.approx(held_out[1], abs=1e-4)
    assert counted.again <= 3
    marked = [r.attempt for r in fast.records if "recompilation" in r.marks]
    assert marked[0] == 1
    assert len(marked) <= 1 + counted.again
    slow = sum(r.total for r in fast.records if "recompilation" in r.marks)
    assert slow > counted.seconds > 0
    assert max(r.total for r in fast.records if not r.marks) < 0.1 * slow


@pytest.mark.slow
def test_a_compiled_optimizer_step_is_the_same_algorithm_and_compiles_once(
    tmp_path: Path,
) -> None:
    plain, _ = trained(tmp_path / "plain", "optimizer.implementation=plain")
    fast, counted = trained(tmp_path / "fast", "optimizer.implementation=compiled")
    assert [r.loss for r in fast.records] == pytest.approx(
        [r.loss for r in plain.records], abs=1e-4
    )
    assert counted.graphs > 0
    assert all("recompilation" not in r.marks for r in fast.records[3:])


def test_recompilations_are_told_from_first_compilations_by_their_id() -> None:
    counted = Compilations()

    def compile_once(number: str, trigger: str = "DYNAMO") -> None:
        args: Any = SimpleNamespace(
            compile_id=number, callback_trigger=SimpleNamespace(name=trigger)
        )
        counted._start(args)
        counted._end(args)

    for number in ("0/0", "1/0", "0/1", "0/2"):
        compile_once(number)
    compile_once("0/0", trigger="CUDAGRAPH_RECORDING")
    assert (counted.graphs, counted.again) == (4, 2)


@pytest.mark.parametrize("word", ["compile=default", "optimizer.implementation=compiled"])
def test_without_a_compiler_compiling_for_a_cpu_is_refused(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = config(word)
    monkeypatch.setattr("runner.assemble.shutil.which", lambda name: None)
    with pytest.raises(Unsupported, match=r"needs a C\+\+ compiler"):
        check_device(chosen, CPU)
    check_device(config(), CPU)
