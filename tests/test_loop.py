"""Tests of runner/loop.py and runner/evaluation.py on a real tiny model."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

from runner import accounting
from runner.ahead import fed
from runner.contracts import Example, MicroBatch, Recipe, ScalePolicy
from runner.data.padded import Padded
from runner.evaluation import Evaluation
from runner.feed import Feed
from runner.journal import Journal
from runner.loop import Diverged, Loop, Stopped, attempt_limit
from runner.measure.clock import HostClock
from runner.memory.loss import Full
from runner.objective import TokenMean
from runner.optimizer import AdamW, Sgd
from runner.records import PHASES, read_journal, updates_of
from runner.schedule import Constant
from runner.step import Training
from tests.support import PAD, example, examples, padded, tiny_gpt, training_of, weights

CPU = torch.device("cpu")


def feed_of(chosen: Sequence[Example], *, batch: int, micro: int, seed: int = 0) -> Feed:
    return Feed(
        examples=chosen,
        batching=Padded(),
        objective=TokenMean(),
        pad_id=PAD,
        seq_len=64,
        batch=batch,
        micro=micro,
        seed=seed,
    )


def evaluation_of(chosen: Sequence[Example], size: int = 4) -> Evaluation:
    return Evaluation(micros=padded(chosen, size), loss=Full(), recipe=Recipe(), device=CPU)


def loop_of(
    training: Training,
    draws: Iterator[list[MicroBatch]],
    folder: Path,
    *,
    updates: int,
    warmup: int = 0,
    eval_every: int | None = None,
    evaluation: Evaluation | None = None,
    stop: Any = lambda: False,
) -> Loop:
    return Loop(
        training=training,
        draws=draws,
        clock=HostClock(),
        journal=Journal(folder / "journal.jsonl"),
        evaluation=evaluation or evaluation_of(examples(5, 9)),
        updates=updates,
        warmup=warmup,
        eval_every=eval_every,
        stop=stop,
    )


def same(*chosen: Example) -> Iterator[list[MicroBatch]]:
    """The same update again and again, one micro-batch."""
    while True:
        yield padded(chosen, len(chosen))


# --- evaluation (cases C14, C15) --------------------------------------------------------------


def test_held_out_loss_does_not_depend_on_the_evaluation_batch_size() -> None:
    chosen = examples(*range(2, 12))  # 1 to 10 targets
    model = tiny_gpt()
    found = [evaluation_of(chosen, size).run(model, 0) for size in (1, 3, 4, 10)]
    assert {record.eval_tokens for record in found} == {55}
    alone = [evaluation_of([one], 1).run(model, 0) for one in chosen]
    expected = sum(r.eval_loss * r.eval_tokens for r in alone) / 55
    assert [r.eval_loss for r in found] == pytest.approx([expected] * 4, abs=1e-6)
    mean_of_means = sum(r.eval_loss for r in alone) / 10
    assert abs(mean_of_means - expected) > 1e-4


def modes_of(model: nn.Module) -> list[bool]:
    """Records `training` at every forward pass of the first block."""
    seen: list[bool] = []
    model.blocks[0].register_forward_pre_hook(lambda module, _: seen.append(module.training))
    return seen


def test_evaluation_neither_stops_dropout_nor_moves_the_random_state(tmp_path: Path) -> None:
    losses = {}
    for every in (None, 2):
        torch.manual_seed(0)
        model = tiny_gpt(dropout=0.5)
        model.train()
        seen = modes_of(model)
        folder = tmp_path / str(every)
        folder.mkdir()
        loop = loop_of(
            training_of(model, optimizer=Sgd(lr=0.1)),
            same(*examples(9, 12)),
            folder,
            updates=6,
            eval_every=every,
        )
        loop.run()
        losses[every] = [record.loss for record in loop.records]
        assert seen.count(True) == 6
        assert seen.count(False) == len(loop.evaluations)
    assert losses[None] == losses[2]
    assert [r.update for r in loop.evaluations] == [0, 2, 4, 6]
    assert [r.marks for r in loop.records] == [(), ("evaluation",)] * 2 + [()] * 2


def test_modules_in_eval_mode_stay_there_after_an_evaluation() -> None:
    model = tiny_gpt(dropout=0.5)
    model.train()
    model.blocks[1].eval()
    before = [m.training for m in model.modules()]
    evaluation_of(examples(4)).run(model, 0)
    assert [m.training for m in model.modules()] == before


def test_evaluation_runs_in_fp32_under_an_autocast_recipe() -> None:
    model = tiny_gpt()
    seen = []
    model.blocks[0].register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = evaluation_of(examples(9)).run(model, 0).eval_loss
    assert seen == [torch.float32]
    assert inside == evaluation_of(examples(9)).run(model, 0).eval_loss


# --- the order of updates (case C04) ----------------------------------------------------------


def test_the_short_last_update_of_an_epoch_uses_its_own_count(tmp_path: Path) -> None:
    chosen = [example(6, seed=n) for n in range(7)]
    feed = feed_of(chosen, batch=4, micro=1)
    model = tiny_gpt()
    loop = loop_of(training_of(model, optimizer=Sgd(lr=0.1)), feed.draws(), tmp_path, updates=4)
    loop.run()
    assert [r.examples for r in loop.records] == [4, 3, 4, 3]
    assert [r.tokens.useful for r in loop.records] == [20, 15, 20, 15]


def test_the_short_update_s_step_is_the_mean_over_its_three_examples(tmp_path: Path) -> None:
    from runner.data.order import Numbered
    from tests.support import reference_gradient, relative_difference

    chosen = [example(6, seed=n) for n in range(7)]
    last = [chosen[i] for i in Numbered(7, batch=4, seed=0)[1].indices]
    assert len(last) == 3
    model = tiny_gpt(double=True)
    _, gradients = reference_gradient(model, last)
    before = weights(model)
    draws = feed_of(chosen, batch=4, micro=1).draws(start=1)
    loop_of(training_of(model), draws, tmp_path, updates=1).run()
    change = [before[name] - p.detach() for name, p in model.named_parameters()]
    assert relative_difference(change, gradients) < 1e-10


# --- skips, schedules, divergence (cases C17, C19) --------------------------------------------


def poison(model: nn.Module, value: float, updates: set[int]) -> None:
    """Set one gradient to `value` in the given updates, counted from 1."""
    count = iter(range(1, 10_000))

    def spoil(parameter: torch.Tensor) -> None:
        if next(count) in updates:
            parameter.grad.fill_(value)

    next(model.parameters()).register_post_accumulate_grad_hook(spoil)


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_the_schedule_advances_with_applied_updates_only(
    implementation: str, tmp_path: Path
) -> None:
    model = tiny_gpt()
    poison(model, math.inf, {1})
    training = training_of(
        model,
        optimizer=AdamW(lr=1.0e-3, implementation=implementation),
        factors=Constant(warmup=4).factors(4),
        policy=ScalePolicy(init=65536.0),
    )
    loop = loop_of(training, same(*examples(9)), tmp_path, updates=4)
    loop.run()
    assert [r.applied for r in loop.records] == [False, True, True, True, True]
    expected = [0.25e-3, 0.25e-3, 0.5e-3, 0.75e-3, 1.0e-3]
    assert [r.lr for r in loop.records] == pytest.approx(expected)
    assert [r.loss_scale for r in loop.records] == [65536.0] + [32768.0] * 4
    assert [r.update for r in loop.records] == [0, 1, 2, 3, 4]
    assert loop.records[0].skipped_reason == "nonfinite_gradient"


def test_a_nan_loss_is_recorded_as_such_and_the_run_diverges(tmp_path: Path) -> None:
    model = tiny_gpt()

    def draws() -> Iterator[list[MicroBatch]]:
        for number in range(100):
            if number == 2:
                with torch.no_grad():
                    next(model.parameters()).fill_(math.nan)
            yield padded(examples(9), 1)

    loop = loop_of(training_of(model), draws(), tmp_path, updates=50)
    with pytest.raises(Diverged, match="3 attempts in a row, first at attempt 3"):
        loop.run()
    loop.journal.close()
    kept = updates_of(read_journal(tmp_path / "journal.jsonl"))
    assert [math.isnan(u.loss) for u in kept] == [False, False, True, True, True]  # type: ignore
    assert [u.applied for u in kept] == [True, True, False, False, False]


def test_a_rate_of_1e30_is_a_divergence_not_a_result(tmp_path: Path) -> None:
    loop = loop_of(
        training_of(tiny_gpt(), optimizer=Sgd(lr=1e30)), same(*examples(9)), tmp_path, updates=5
    )
    with pytest.raises(Diverged):
        loop.run()
    assert any(not math.isfinite(r.loss) for r in loop.records)  # type: ignore


def test_a_held_out_loss_far_above_the_first_is_a_runaway(tmp_path: Path) -> None:
    loop = loop_of(
        training_of(tiny_gpt(), optimizer=Sgd(lr=300.0), clip=1.0),
        same(*examples(9)),
        tmp_path,
        updates=3,
    )
    with pytest.raises(Diverged, match="held-out loss"):
        loop.run()


def test_attempts_are_limited_when_every_update_is_skipped(tmp_path: Path) -> None:
    model = tiny_gpt()
    poison(model, math.inf, set(range(1, 1000)))
    loop = loop_of(training_of(model), same(*examples(5)), tmp_path, updates=4)
    with pytest.raises(Diverged, match="0 of 24 attempted"):
        loop.run()
    assert attempt_limit(4) == 24
    assert attempt_limit(1000) == 1250


def test_an_update_without_targets_is_counted_and_not_applied(tmp_path: Path) -> None:
    def draws() -> Iterator[list[MicroBatch]]:
        yield padded([example(5, masked=5)], 1)
        while True:
            yield padded(examples(9), 1)

    loop = loop_of(training_of(tiny_gpt(), optimizer=Sgd(lr=0.1)), draws(), tmp_path, updates=2)
    loop.run()
    assert [r.skipped_reason for r in loop.records] == ["nothing_valid", None, None]
    assert [r.loss is None for r in loop.records] == [True, False, False]


def test_a_stop_is_honoured_before_the_next_update_and_loses_nothing(tmp_path: Path) -> None:
    asked = iter([False, False, False, True])
    loop = loop_of(
        training_of(tiny_gpt()), same(*examples(5)), tmp_path, updates=9, stop=lambda: next(asked)
    )
    with pytest.raises(Stopped):
        loop.run()
    loop.journal.close()
    assert len(updates_of(read_journal(tmp_path / "journal.jsonl"))) == 3


# --- measurement (cases C38, C40, C41) --------------------------------------------------------


class SlowExamples(Sequence[Example]):
    """A source that sleeps at each item."""

    def __init__(self, chosen: Sequence[Example], seconds: float) -> None:
        self._chosen = chosen
        self._seconds = seconds

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: Any) -> Any:
        time.sleep(self._seconds)
        return self._chosen[index]


@pytest.mark.timing
def test_waiting_for_data_is_in_the_step_and_named(tmp_path: Path) -> None:
    feed = feed_of(SlowExamples(examples(5, 6, 7, 8), 0.05), batch=2, micro=2)
    loop = loop_of(training_of(tiny_gpt()), feed.draws(), tmp_path, updates=10)
    loop.run()
    waits = [r.time["data"] for r in loop.records]
    assert all(wait == pytest.approx(0.1, rel=0.2) for wait in waits)
    for record in loop.records:
        assert sum(record.time[p] for p in PHASES) == pytest.approx(record.total, rel=1e-6)
    assert sum(r.total for r in loop.records) == pytest.approx(loop.wall_s, rel=0.01)


@pytest.mark.timing
def test_work_that_processes_ahead_hide_is_in_the_total_and_not_in_the_step(
    tmp_path: Path,
) -> None:
    """80 ms of looking up per update, and 60 ms between two updates to hide it in."""
    slow = SlowExamples(examples(5, 6, 7, 8), 0.02)
    medians = {}
    for workers in (0, 2):
        feed = replace(feed_of(slow, batch=4, micro=4), workers=workers)
        folder = tmp_path / str(workers)
        folder.mkdir()
        draws = fed(feed, torch.device("cpu"))
        loop = loop_of(training_of(tiny_gpt()), draws, folder, updates=10)
        loop.stop = lambda: time.sleep(0.06)  # type: ignore[assignment, return-value]
        loop.run()
        timed = loop.records[3:]
        assert all(record.host["data"] >= record.time["data"] for record in timed)
        assert [record.time["data"] < 0.06 for record in timed] == [bool(workers)] * 7
        medians[workers] = median(record.host["data"] for record in timed)
        loop.journal.close()
        kept = updates_of(read_journal(folder / "journal.jsonl"))
        assert [r.host for r in kept] == [r.host for r in loop.records]
    assert medians[0] == pytest.approx(0.08, rel=0.2)
    assert medians[2] == pytest.approx(0.08, rel=0.2)


@pytest.mark.timing
def test_a_slow_first_update_stays_out_of_the_statistics(tmp_path: Path) -> None:
    chosen = examples(5)

    def draws() -> Iterator[list[MicroBatch]]:
        for number in range(5):
            time.sleep(1.0 if number == 0 else 0.02)
            yield padded(chosen, 1)

    loop = loop_of(
        training_of(tiny_gpt(), optimizer=Sgd(lr=0.1)), draws(), tmp_path, updates=5, warmup=1
    )
    loop.run()
    found = accounting.summary(loop.records)
    assert 0.02 <= found["step_s_median"] < 0.1
    assert accounting.marked(loop.records)["warmup"]["seconds"] > 1.0
    assert len(accounting.timed(loop.records)) == 4


def test_counts_of_an_update_are_over_all_its_micro_batches(tmp_path: Path) -> None:
    chosen = [example(2), example(3), example(5), example(10, masked=2)]

    def draws() -> Iterator[list[MicroBatch]]:
        while True:
            yield padded(chosen, 2)

    loop = loop_of(training_of(tiny_gpt(), optimizer=Sgd(lr=0.1)), draws(), tmp_path, updates=1)
    loop.run()
    tokens = loop.records[0].tokens
    assert (tokens.slots, tokens.nonpad, tokens.useful) == (26, 20, 15)
    assert list(loop.lengths[0]) == [2, 3, 5, 10]


def test_accumulation_changes_slots_and_nothing_else_of_the_work(tmp_path: Path) -> None:
    chosen = examples(*range(3, 19))
    curves = []
    for micro in (16, 4):
        folder = tmp_path / str(micro)
        folder.mkdir()
        model = tiny_gpt()
        training = training_of(model, optimizer=AdamW(lr=1e-3), clip=1.0)
        feed = feed_of(chosen, batch=16, micro=micro)
        loop = loop_of(training, feed.draws(), folder, updates=12)
        loop.run()
        curves.append([r.loss for r in loop.records])
    assert curves[0] == pytest.approx(curves[1], abs=1e-4)


def test_probes_hold_the_largest_first_and_the_largest_later_micro_batch() -> None:
    chosen = [example(n) for n in (3, 20, 4, 9, 5, 2)]
    feed = feed_of(chosen, batch=2, micro=1)
    first, later = feed.probes(3)
    drawn = [micros for micros, _ in zip(feed.draws(), range(3), strict=False)]
    assert first[0].counts.slots == max(m[0].counts.slots for m in drawn)
    assert later[-1].counts.slots == max(m[1].counts.slots for m in drawn)
    assert len(later) == 2
