"""One run as a comparison takes it, with its curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import Any

from runner.accounting import TRAIN_LOSS_WINDOW
from runner.records import (
    EvaluationRecord,
    JournalLine,
    NumericsRecord,
    RunRecord,
    UpdateRecord,
    evaluations_of,
    updates_of,
)


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run as a comparison takes it.

    run_id: in the tracking store, or its folder. setup: its full name. record: how it ended; a
    run without a record of its own has one that only says so. journal: its lines.
    swept: keys that its sweep varied, with this run's values, `seed` among them where swept.
    axes: every swept key with all its values, in the order typed; empty when unknown.
    """

    run_id: str
    setup: str
    seed: int
    record: RunRecord
    journal: Sequence[JournalLine] = ()
    swept: Mapping[str, str] = field(default_factory=dict)
    axes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @cached_property
    def updates(self) -> list[UpdateRecord]:
        """The updates of the journal, in order."""
        return updates_of(self.journal)

    @cached_property
    def evaluations(self) -> list[EvaluationRecord]:
        """The held-out losses of the journal, in order."""
        return evaluations_of(self.journal)

    @cached_property
    def looks(self) -> list[NumericsRecord]:
        """The looks at the numerics of the journal, in order."""
        return [line for line in self.journal if isinstance(line, NumericsRecord)]

    @cached_property
    def applied(self) -> list[UpdateRecord]:
        """Applied updates with a loss, in order."""
        return [u for u in self.updates if u.applied and u.loss is not None]

    @cached_property
    def clock(self) -> dict[int, float]:
        """Seconds since training began when each applied update was done.

        Everything counts that passed between: warm-up, compilation, skipped attempts,
        evaluations where the step's clock holds them.
        """
        elapsed = accumulate(u.total for u in self.updates)
        return {u.update: t for u, t in zip(self.updates, elapsed, strict=True) if u.applied}

    @cached_property
    def smoothed(self) -> dict[int, float]:
        """Training loss over the last TRAIN_LOSS_WINDOW applied updates, by useful tokens.

        Starts where the first window is full (a run shorter than it: at its last update).
        """
        updates = [u for u in self.applied if u.tokens.useful]
        losses = window_means(
            [u.loss or 0.0 for u in updates],
            [u.tokens.useful for u in updates],
            min(TRAIN_LOSS_WINDOW, len(updates)),
        )
        ends = updates[len(updates) - len(losses) :]
        return {u.update: loss for u, loss in zip(ends, losses, strict=True)}

    @cached_property
    def held_out(self) -> dict[int, float]:
        """Held-out loss by update, where it was measured."""
        return {e.update: e.eval_loss for e in self.evaluations}

    def evidence(self, name: str) -> Any:
        """The value of an evidence item, or None."""
        return self.record.evidence.get(name, {}).get("value")


def window_means(values: Sequence[float], weights: Sequence[int], size: int) -> list[float]:
    """Weighted mean of every window of `size` neighbours; a value that is not finite makes only
    its own windows so."""
    if not size:
        return []
    finite = [value if math.isfinite(value) else 0.0 for value in values]
    sums = [0.0, *accumulate(map(mul, finite, weights))]
    counts = [0, *accumulate(weights)]
    lost = [0, *accumulate(not math.isfinite(value) for value in values)]
    return [
        math.nan
        if lost[end] > lost[end - size]
        else (sums[end] - sums[end - size]) / (counts[end] - counts[end - size])
        for end in range(size, len(values) + 1)
    ]
