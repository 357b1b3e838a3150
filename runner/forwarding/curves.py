"""Journal lines as points of curves, exact and thinned; knows no store.

The abscissa of every curve is the number of the attempt, which is the update as long as none
was skipped. A skipped attempt does not advance `update`, so two lines can share one update;
attempts number the lines uniquely, keep one value per step, and align runs by the data they saw.
An evaluation stands at the last attempt before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from runner.accounting import KINDS, rate
from runner.records import (
    PHASES,
    EvaluationRecord,
    JournalLine,
    NumericsRecord,
    UpdateRecord,
    nonfinite,
)

NONFINITE = "nonfinite/"
"""Prefix of the curve beside a curve that says at which steps its value was not finite."""
KINDS_OF_NONFINITE = ("nan", "+inf", "-inf")
"""What the values 1, 2 and 3 of such a curve stand for."""
SPACING_S = 0.2
"""Step time that lies between two ordinary points: five a second."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One value of one curve; `timestamp` in milliseconds since the epoch."""

    name: str
    value: float
    step: int
    timestamp: int


def values_of(update: UpdateRecord, *, emulated: bool) -> Iterator[tuple[str, float | None]]:
    """Name and value of every curve at one update; None where it has no value.

    A token rate is that update's tokens over that update's whole time. Emulated runs have no
    times and no rates: those would describe the emulation.
    """
    yield "loss/train", update.loss
    yield "optim/lr", update.lr
    yield "optim/grad_norm", update.grad_norm
    yield "optim/loss_scale", update.loss_scale
    yield "optim/skipped", float(not update.applied)
    memory = update.memory or {}
    for kind in ("allocated", "reserved", "inactive_split"):
        yield f"memory/peak_{kind}_bytes", memory.get(kind)
    yield "memory/allocator_retries", memory.get("retries")
    if emulated:
        return
    yield "time/step_s", update.total
    for phase in PHASES:
        yield f"time/{phase}_s", update.time[phase]
    for kind in KINDS:
        yield f"tokens/{kind}_per_s", rate(getattr(update.tokens, kind), update.total)


NUMERICS = "numerics/"


def is_notable(update: UpdateRecord) -> bool:
    """Whether thinning must keep this update: skipped, not finite, with an
    evaluation, or with a retry of the allocator."""
    odd = nonfinite(update.loss) or nonfinite(update.grad_norm)
    retried = bool(update.memory and update.memory.get("retries"))
    return bool(odd) or not update.applied or retried or "evaluation" in update.marks


@dataclass(kw_only=True)
class Curves:
    """Turns the lines of one journal, taken in order from its start, into points.

    What is kept and every timestamp follow from the journal alone, so forwarding a journal twice
    gives the same points. A timestamp is `start_ms` plus the step time so far (emulated: plus the
    attempt, in milliseconds). Ordinary updates are kept once per SPACING_S of step time; notable
    ones, the first, and all evaluations always; the last when `last` is called.
    """

    start_ms: int
    emulated: bool
    nonfinite_first_step: int | None = None
    last_finite_loss: float | None = None
    _elapsed: float = 0.0
    _attempt: int = 0
    _kept_at: float = -math.inf
    _held: UpdateRecord | None = field(default=None)

    def take(self, line: JournalLine) -> list[Point]:
        """Points to send for the next line; empty when it is thinned out."""
        if isinstance(line, EvaluationRecord):
            return self._points("loss/eval", line.eval_loss)
        if isinstance(line, NumericsRecord):
            whole = {name: value for name, value in line.values.items() if "/" not in name}
            return [
                p for name, value in whole.items() for p in self._points(NUMERICS + name, value)
            ]
        self._elapsed += line.total
        self._attempt = line.attempt
        self._watch(line)
        if self._elapsed - self._kept_at < SPACING_S and not is_notable(line):
            self._held = line
            return []
        self._kept_at = self._elapsed
        return self._of(line)

    def last(self) -> list[Point]:
        """Points of the last update, if thinning left it out."""
        return [] if self._held is None else self._of(self._held)

    def tags(self) -> dict[str, str]:
        """Where the training loss first was not finite, and the last finite one before it."""
        if self.nonfinite_first_step is None:
            return {}
        found = {"nonfinite_first_step": str(self.nonfinite_first_step)}
        if self.last_finite_loss is not None:
            found["last_finite_loss"] = repr(self.last_finite_loss)
        return found

    def _watch(self, update: UpdateRecord) -> None:
        if self.nonfinite_first_step is not None or update.loss is None:
            return
        if nonfinite(update.loss):
            self.nonfinite_first_step = update.attempt
        else:
            self.last_finite_loss = update.loss

    def _of(self, update: UpdateRecord) -> list[Point]:
        self._held = None
        values = values_of(update, emulated=self.emulated)
        return [point for name, value in values for point in self._points(name, value)]

    def _points(self, name: str, value: float | None) -> list[Point]:
        """The point, and beside a value that is not finite the point that says which one."""
        if value is None:
            return []
        kind = nonfinite(value)
        if kind is None:
            return [self._point(name, float(value))]
        code = float(KINDS_OF_NONFINITE.index(kind) + 1)
        return [self._point(name, math.nan), self._point(NONFINITE + name, code)]

    def _point(self, name: str, value: float) -> Point:
        passed = self._attempt if self.emulated else round(1000 * self._elapsed)
        return Point(name=name, value=value, step=self._attempt, timestamp=self.start_ms + passed)
