"""Tests of scripts/benchmark.py: its figures by hand, and that unequal arithmetic is refused."""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runner.compose import Plan
from runner.records import read_journal, updates_of
from scripts import benchmark
from scripts.benchmark import Workload
from scripts.overhead import contestants
from scripts.overhead.contestants import CONTESTANTS, Gate, Material, Over, summed_loss
from scripts.overhead.figures import (
    BEGIN,
    END,
    LABELS,
    Row,
    Turn,
    difference,
    interval,
    line,
    rows_of,
    write_between,
)
from scripts.overhead.rounds import Contestant, Load, Round

# --- figures ----------------------------------------------------------------------------------


def turn(*wall: float, cpu: Sequence[float] = (1.0, 1.0)) -> Turn:
    return Turn(wall=wall, cpu=cpu, losses=())


def test_the_first_update_of_a_turn_is_left_out_and_ratios_are_taken_within_a_block() -> None:
    first = [{"bare": turn(9.0, 1.0, 2.0, 3.0), "runner": turn(50.0, 2.0, 4.0, 9.0)}]
    second = [
        {"bare": turn(9.0, 10.0, 10.0, 40.0), "runner": turn(50.0, 11.0, 11.0, 99.0)},
        {"bare": turn(9.0, 10.0, 10.0, 40.0), "runner": turn(50.0, 13.0, 13.0, 13.0)},
    ]
    bare, runner = rows_of([first, second])
    assert (bare.name, runner.name) == ("bare", "runner")
    assert runner.wall == [2.0, 4.0, 9.0, 11.0, 11.0, 99.0, 13.0, 13.0, 13.0]
    assert runner.ratios == [4.0 / 2.0, (1.1 + 1.3) / 2]  # of rounds, not of blocks
    assert bare.ratios == [1.0, 1.0]


def test_the_only_update_of_a_turn_counts() -> None:
    rows = rows_of([[{"bare": turn(2.0, cpu=(4.0,)), "runner": turn(3.0, cpu=(5.0,))}]])
    assert [(row.wall, row.ratios, row.cpu_ratio) for row in rows] == [
        ([2.0], [1.0], 1.0),
        ([3.0], [1.5], 1.25),
    ]


def test_processor_time_is_total_over_total() -> None:
    blocks = [
        {"bare": turn(1.0, 1.0, cpu=(9.0, 1.0)), "runner": turn(1.0, 1.0, cpu=(99.0, 2.0))},
        {"bare": turn(1.0, 1.0, cpu=(9.0, 3.0)), "runner": turn(1.0, 1.0, cpu=(99.0, 3.0))},
    ]
    assert rows_of([blocks])[1].cpu_ratio == 5.0 / 4.0  # not (2 + 1) / 2


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(3, 1, 3), (6, 1, 6), (10, 2, 9), (20, 6, 15), (40, 14, 27)],
)
def test_the_interval_of_a_median_ends_at_the_order_statistics_of_the_sign_test(
    count: int, low: int, high: int
) -> None:
    assert interval([float(place) for place in range(count, 0, -1)]) == (low, high)
    if count >= 6:
        outside = 2 * sum(math.comb(count, k) for k in range(low)) / 2**count
        assert outside <= 0.05 < outside + 2 * math.comb(count, low) / 2**count


@pytest.mark.parametrize("wrong", [2.00002, math.nan, math.inf])
def test_a_loss_that_differs_from_the_bare_loops_is_refused(wrong: float) -> None:
    bare = [3.0, 2.0, 1.0]
    assert difference({"bare": bare, "runner": [3.0, 2.000005, 1.0]}, 3) == pytest.approx(5e-6)
    with pytest.raises(ValueError, match="runner differs from the bare loop by"):
        difference({"bare": bare, "runner": [3.0, wrong, 1.0]}, 3)


def test_a_contestant_that_reports_few_losses_is_refused() -> None:
    bare = [3.0, 2.0, 1.0, 0.5]
    assert difference({"bare": bare, "trainer": bare[:2]}, 4) == 0.0
    with pytest.raises(ValueError, match="trainer reported 1 losses of 4"):
        difference({"bare": bare, "trainer": bare[:1]}, 4)


def test_a_row_shows_median_p90_and_the_ratio_with_its_interval_and_the_rounds() -> None:
    ratios = [1.00, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07, 1.08, 1.20]
    wall = [number / 1000 for number in range(11)]
    row = Row(name="runner", wall=wall, ratios=ratios, cpu_ratio=1.0149)
    assert line(row) == (
        "| this runner, everything on | 5.00 ms | 9.00 ms | 1.045 (1.010 to 1.080) "
        "| 1.000 to 1.200 | 1.015 |"
    )


# --- the table's place ------------------------------------------------------------------------


def test_only_what_stands_between_the_markers_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    for _ in range(2):
        write_between(page, "new")
    assert page.read_text(encoding="utf-8") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"


@pytest.mark.parametrize("text", ["none", f"{BEGIN}", f"{END} {BEGIN}", f"{BEGIN}{END}{END}"])
def test_a_file_without_the_markers_is_refused_and_stays(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="once each, in this order"):
        write_between(page, "new")
    assert page.read_text(encoding="utf-8") == text


# --- turns ------------------------------------------------------------------------------------


class Pipe:
    """A pipe whose other end lets a contestant wait for 100 s before each turn."""

    def __init__(self, turns: list[int], clock: list[float]) -> None:
        self.turns = turns
        self.clock = clock
        self.sent: list[Turn] = []

    def recv(self) -> int:
        self.clock[0] += 100.0
        return self.turns.pop(0)

    def send(self, turn: Turn) -> None:
        self.sent.append(turn)


def gate_of(turns: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[Gate, Pipe, list[float]]:
    """A gate, its pipe, and the time it reads: seconds on the wall, of which a tenth is work."""
    clock = [0.0]
    monkeypatch.setattr(contestants, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(contestants, "process_time", lambda: clock[0] / 10)
    pipe = Pipe(turns, clock)
    return Gate(pipe, iter(list, None)), pipe, clock  # type: ignore[arg-type]


def test_an_update_lasts_from_one_request_to_the_next_and_waiting_counts_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, pipe, clock = gate_of([2, 1, 0], monkeypatch)
    for seconds in (3.0, 5.0, 7.0):
        next(gate)
        clock[0] += seconds
    with pytest.raises(Over):
        next(gate)
    assert [turn.wall for turn in pipe.sent] == [[3.0, 5.0], [7.0]]
    assert [turn.cpu for turn in pipe.sent] == [pytest.approx([0.3, 0.5]), pytest.approx([0.7])]


def test_the_losses_of_a_turn_are_those_known_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, pipe, _ = gate_of([1, 1, 0], monkeypatch)
    for loss in (2.5, 1.5):
        next(gate)
        gate.kept.append(loss)
    with pytest.raises(Over):
        next(gate)
    assert [turn.losses for turn in pipe.sent] == [[2.5], [2.5, 1.5]]


def test_what_is_put_off_is_paid_in_the_last_update_of_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, pipe, clock = gate_of([2, 1, 0], monkeypatch)

    def put_off() -> None:
        clock[0] += 1.0

    gate.settle = put_off
    for _ in range(3):
        next(gate)
        clock[0] += 3.0
    with pytest.raises(Over):
        next(gate)
    assert [turn.wall for turn in pipe.sent] == [[3.0, 4.0], [4.0]]


def test_a_turn_of_this_runner_ends_with_its_journal_written(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.journal.INTERVAL_S", 1e6)
    written: list[int] = []

    class Reading(Pipe):
        def send(self, turn: Turn) -> None:
            super().send(turn)
            written.append(len(updates_of(read_journal(tmp_path / "journal.jsonl"))))

    pipe = Reading([2, 3, 0], [0.0])
    material = Material.of(plan.config, tmp_path)
    with pytest.raises(Over):
        CONTESTANTS["runner"](material, Gate(pipe, material.feed().draws()))  # type: ignore[arg-type]
    assert written == [2, 5]


# --- equal arithmetic -------------------------------------------------------------------------

SMALL = Workload(
    name="small",
    overrides=("seq_len=16", "model.width=16", "model.positions=16", "model.init_std=0.08"),
    check=6,
    turn=3,
    blocks=1,
    rounds=2,
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return SMALL.plan()


def losses_of(train: Callable[[Material, Gate], None], plan: Plan, folder: Path) -> list[float]:
    """Losses that a contestant reports of 6 updates, trained here."""
    ours, theirs = multiprocessing.Pipe()
    material = Material.of(plan.config, folder)
    ours.send(6)
    ours.send(0)
    with pytest.raises(Over):
        train(material, Gate(theirs, material.feed().draws()))
    return list(ours.recv().losses)


def test_this_runner_trains_as_the_bare_loop_does(plan: Plan, tmp_path: Path) -> None:
    found = {name: losses_of(CONTESTANTS[name], plan, tmp_path) for name in ("bare", "runner")}
    assert difference(found, 6) <= 1e-5
    assert [len(losses) for losses in found.values()] == [6, 6]
    recorded = updates_of(read_journal(tmp_path / "journal.jsonl"))
    assert [update.loss for update in recorded] == found["runner"]
    assert all(update.grad_norm is not None and update.grad_norm > 0 for update in recorded)


def test_a_mean_of_micro_batch_means_is_refused(plan: Plan, tmp_path: Path) -> None:
    def naive(material: Material, gate: Gate) -> None:
        model = material.model()
        optimizer, _ = material.optimizer(model)
        for micros in gate:
            optimizer.zero_grad()
            total = 0.0
            for m in micros:
                part = summed_loss(model(m.input_ids), m.targets) / m.counts.useful / 4
                part.backward()  # type: ignore[no-untyped-call]
                total += part.item()
            optimizer.step()
            gate.kept.append(total)

    found = {
        "bare": losses_of(CONTESTANTS["bare"], plan, tmp_path),
        "trainer": losses_of(naive, plan, tmp_path),
    }
    with pytest.raises(ValueError, match="trainer differs"):
        difference(found, 6)


def test_training_without_clipping_is_refused(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = losses_of(CONTESTANTS["bare"], plan, tmp_path)
    monkeypatch.setattr(contestants, "clip_grad_norm_", lambda parameters, clip: torch.ones(()))
    unclipped = losses_of(CONTESTANTS["bare"], plan, tmp_path)
    with pytest.raises(ValueError, match="again differs"):
        difference({"bare": bare, "again": unclipped}, 6)


# --- other processes --------------------------------------------------------------------------


def test_the_load_of_others_is_the_machines_less_our_own() -> None:
    before = Load(at=10.0, machine=100.0, own=40.0)
    after = Load(at=14.0, machine=107.0, own=45.0)
    assert after.others_since(before) == 0.5  # (7 - 5) / 4


def test_our_own_processor_time_is_counted_as_ours() -> None:
    before = Load.now([os.getpid()])
    limit = time.process_time() + 0.3
    while time.process_time() < limit:
        pass
    after = Load.now([os.getpid()])
    assert after.own - before.own == pytest.approx(0.3, abs=0.03)
    assert after.machine - before.machine >= 0.27


def test_a_block_waits_until_the_machine_is_quiet(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = iter([0.0, 1.5, 1.5, 1.9, 1.9, 1.99])  # machine seconds at 1 s intervals
    clock = iter(range(100))
    made = Round(plan=plan, names=["bare"], check=1, turn=1, blocks=1, quiet=0.3)
    monkeypatch.setattr(
        Load, "now", lambda pids: Load(at=next(clock), machine=next(loads), own=0.0)
    )
    monkeypatch.setattr("scripts.overhead.rounds.time.sleep", lambda seconds: None)
    made._wait([], math.inf)
    assert list(loads) == []  # 1.5, then 0.4, then 0.09 cores
    loads = iter([0.0, 1.0])
    with pytest.raises(RuntimeError, match=r"kept using over 0\.3 cores"):
        made._wait([], 0.0)


# --- whole runs -------------------------------------------------------------------------------


@pytest.mark.long
def test_a_contestant_that_fails_says_what_it_printed(plan: Plan, tmp_path: Path) -> None:
    broken = replace(plan, config={**plan.config, "accum": 0})
    one = Contestant("bare", broken, tmp_path / "bare", 1)
    with pytest.raises(RuntimeError, match=r"bare ended early:[\s\S]*ZeroDivisionError"):
        one.turn(1)
    one.kill()


@pytest.mark.long
def test_all_contestants_train_alike_and_the_table_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("accelerate", "lightning"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed; the extra `bench` brings it")
    monkeypatch.setattr(benchmark, "WORKLOADS", (SMALL,))
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}{END}", encoding="utf-8")
    names = ["runner", "trainer", "lightning"]
    words = ["--rounds", "1", "--blocks", "2", "--only", *names, "--write", str(page)]
    assert benchmark.main(words) == 0
    text = page.read_text(encoding="utf-8")
    labels = [row.split(" | ")[0] for row in text.splitlines() if row.startswith("| ")]
    assert labels == [f"| {label}" for label in ("small", *map(LABELS.get, ["bare", *names]))]
    assert "1 rounds of fresh processes, 2 blocks in all of 2 taken" in text
