"""Updates one after another: warm-up, evaluation, skips, divergence, and what each one left."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from runner.contracts import MicroBatch
from runner.evaluation import Evaluation
from runner.journal import Journal
from runner.measure.allocator import Peaks
from runner.measure.clock import HostClock, Interval
from runner.measure.looks import Looks
from runner.records import EvaluationRecord, NumericsRecord, UpdateRecord
from runner.step import Outcome, Training, measured_update

NONFINITE_LIMIT = 3
"""Non-finite losses in a row after which a run has diverged."""
RUNAWAY_NATS = 1.0
"""A final held-out loss this far above the one before training is a runaway."""
IN_FLIGHT = 2
"""Updates that may be dispatched to the device before the host reads the oldest."""


class Diverged(Exception):
    """Training went wrong numerically; the run is still a result."""


class Stopped(Exception):
    """A signal asked the run to stop."""


def attempt_limit(updates: int) -> int:
    """Attempts allowed to reach `updates` applied ones: a quarter and at least 20 may fail."""
    return updates + max(20, updates // 4)


@dataclass(kw_only=True, eq=False)
class Pending:
    """An update that was dispatched and is not yet recorded. work: see `runner.ahead.Work`; None
    where the loop's own time is all there is."""

    attempt: int
    outcome: Outcome
    marks: list[str]
    memory: dict[str, int] | None
    work: Any = None
    interval: Interval | None = None
    figures: list[float] | None = None
    applied_before: int = 0


@dataclass(kw_only=True, eq=False)
class Loop:
    """The run of one job's updates.

    updates: applied updates to reach; warmup: first attempts left out of statistics;
    eval_every: applied updates between evaluations. stop: asked before every update.
    compiled: compilations so far; an update in which it grew is marked. looks: what rounding does,
    looked at after some updates, which are marked. peaks: the allocator's, where it has any.
    """

    training: Training
    draws: Iterator[list[MicroBatch]]
    clock: HostClock
    journal: Journal
    evaluation: Evaluation
    updates: int
    warmup: int
    eval_every: int | None
    stop: Callable[[], bool]
    compiled: Callable[[], int] = lambda: 0
    looks: Looks | None = None
    peaks: Peaks | None = None
    records: list[UpdateRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    looked: list[NumericsRecord] = field(default_factory=list)
    lengths: list[Sequence[int]] = field(default_factory=list)
    wall_s: float = 0.0
    attempts: int = 0
    applied: int = 0
    nonfinite_run: int = 0
    flight: deque[Pending] = field(default_factory=deque)

    def run(self) -> None:
        """Train until `updates` are applied.

        Raises Diverged or Stopped; whatever happens, every update that completed is recorded.
        """
        self.evaluate(0)
        begin = perf_counter()
        try:
            while not self._done():
                self._between(self.clock.start("other"))
                self._attempt()
        finally:
            self._close(self.clock.stop())
            self.wall_s = perf_counter() - begin
        self.evaluate(self.applied)

    def evaluate(self, update: int) -> None:
        """Record the held-out loss; raises Diverged when it is not finite, or when at the end it
        is RUNAWAY_NATS above the one before training."""
        found = self.evaluation.run(self.training.model, update)
        self.evaluations.append(found)
        self.journal.append(found)
        rise = found.eval_loss - self.evaluations[0].eval_loss
        runaway = update >= self.updates and rise > RUNAWAY_NATS
        if runaway or not math.isfinite(found.eval_loss):
            raise Diverged(
                f"held-out loss {found.eval_loss:.4g} after {update} updates; "
                f"{self.evaluations[0].eval_loss:.4g} before the first"
            )

    def _unsettled(self) -> int:
        return sum(pending.figures is None for pending in self.flight)

    def _done(self) -> bool:
        if self.applied + self._unsettled() >= self.updates:
            self._settle_all()
        if self.applied >= self.updates:
            return True
        if self.attempts >= attempt_limit(self.updates):
            raise Diverged(
                f"{self.applied} of {self.attempts} attempted updates were applied; "
                f"the limit to reach {self.updates} is {self.attempts} attempts"
            )
        return False

    def _between(self, closed: Interval | None) -> None:
        """Bookkeeping at the boundary: it belongs to `other` of the update that starts."""
        if self.flight:
            self.flight[-1].interval = closed
        keep = IN_FLIGHT - 1 if self.training.device.type == "cuda" else 0
        while len(self.flight) > keep:
            self._finish(self.flight.popleft())
        if self.stop():
            raise Stopped(f"stopped by a signal after {self.applied} updates")

    def _attempt(self) -> None:
        if self.peaks is not None:
            self.peaks.begin()
        self.attempts += 1
        compilations = self.compiled()
        before = self._before_a_look()
        outcome = measured_update(self.training, lambda: next(self.draws), self.clock)
        memory = None if self.peaks is None else self.peaks.end(copied=before is not None)
        marks = ["warmup"] if self.attempts <= self.warmup else []
        if self.compiled() > compilations:
            marks.append("recompilation")
        work = getattr(self.draws, "work", None)
        self.flight.append(
            Pending(attempt=self.attempts, outcome=outcome, marks=marks, memory=memory, work=work)
        )
        if self.training.device.type != "cuda":
            self._settle_all()
        if before is not None:
            self._look(before)
        self._evaluate_if_due()

    def _before_a_look(self) -> Mapping[str, torch.Tensor] | None:
        """What the coming update will change, if a look follows it."""
        coming = self.applied + self._unsettled() + 1
        return self.looks.before() if self.looks is not None and self.looks.due(coming) else None

    def _look(self, before: Mapping[str, torch.Tensor]) -> None:
        """Record what rounding does, if the update was applied; its time counts nowhere."""
        assert self.looks is not None
        self._settle_all()
        self.flight[-1].marks.append("numerics")
        if self.looks.due(self.applied) and self.flight[-1].applied_before < self.applied:
            found = NumericsRecord(update=self.applied, values=self.looks.take(before))
            self.looked.append(found)
            self.journal.append(found)

    def _evaluate_if_due(self) -> None:
        expected = self.applied + self._unsettled()
        if not self.eval_every or expected % self.eval_every or expected >= self.updates:
            return
        self._settle_all()
        due = self.applied and self.applied % self.eval_every == 0
        if due and self.evaluations[-1].update != self.applied:
            self.flight[-1].marks.append("evaluation")
            self.evaluate(self.applied)

    def _settle_all(self) -> None:
        for pending in self.flight:
            self._settle(pending)

    def _settle(self, pending: Pending) -> None:
        """Read what the update left on the device, and count it."""
        if pending.figures is not None:
            return
        figures = pending.outcome.figures
        pending.figures = [] if figures is None else figures.tolist()
        pending.applied_before = self.applied
        if figures is None:
            return
        loss, _, bad, _, _ = pending.figures
        self.applied += not bad
        self.nonfinite_run = 0 if math.isfinite(loss) else self.nonfinite_run + 1

    def _finish(self, pending: Pending) -> None:
        """Record a closed update; raises Diverged after too many non-finite losses."""
        self._settle(pending)
        self.record(pending)
        if self.nonfinite_run >= NONFINITE_LIMIT:
            raise Diverged(
                f"loss not finite in {self.nonfinite_run} attempts in a row, "
                f"first at attempt {pending.attempt - self.nonfinite_run + 1}"
            )

    def record(self, pending: Pending) -> None:
        """Append the update's record to the journal and to `records`."""
        assert pending.interval is not None
        times = self.clock.times(pending.interval)
        outcome = pending.outcome
        loss: float | None = None
        norm: float | None = None
        scale: float | None = None
        lr = 0.0
        reason: str | None = "nothing_valid"
        if pending.figures:
            loss, norm, bad, lr, scale = pending.figures
            reason = "nonfinite_gradient" if bad else None
        entry = UpdateRecord(
            update=pending.applied_before + (reason is None),
            attempt=pending.attempt,
            applied=reason is None,
            skipped_reason=reason,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            loss_scale=scale if self.training.scaler else None,
            tokens=outcome.counts,
            examples=outcome.examples,
            time=times.exposed,
            total=times.total,
            host=pending.work.totals(times.host) if pending.work else times.host,
            memory=pending.memory,
            marks=tuple(pending.marks),
        )
        self.records.append(entry)
        self.lengths.append(outcome.lengths)
        self.journal.append(entry)

    def _close(self, closed: Interval | None) -> None:
        """Record what is still in flight when the loop ends, in whatever way it ended."""
        if self.flight and self.flight[-1].interval is None:
            self.flight[-1].interval = closed
        while self.flight:
            pending = self.flight.popleft()
            self._settle(pending)
            self.record(pending)
