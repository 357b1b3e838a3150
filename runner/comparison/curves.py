"""Loss by update and by second: mean curves with seed bands, equality, time to a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

from runner.comparison.results import Curve, Reach
from runner.comparison.runs import ComparedRun
from runner.comparison.setups import Setup
from runner.records import finite

POINTS = 160
"""Points of a curve in a report; each is a window mean, so that none is left out."""
SAME = 1e-4
"""Largest difference of the losses of one update (nats) that `same` numerics may show."""
ENOUGH_EVALUATIONS = 4
"""Held-out losses, the one before training included, from which they serve as a curve."""


# --- mean curves ------------------------------------------------------------------------------


def _every_few(updates: Sequence[int]) -> list[int]:
    step = max(1, len(updates) // POINTS)
    return [*updates[:-1:step], updates[-1]]


def band(
    curves: Sequence[Mapping[int, float]],
    clocks: Sequence[Mapping[int, float]],
    keep: Callable[[Sequence[int]], list[int]] = _every_few,
) -> Curve | None:
    """Mean, lowest and highest over runs, at the updates that all of them have; `keep` chooses
    among those, which are in order."""
    shared = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    updates = sorted(shared)
    if not updates:
        return None
    kept = keep(updates)
    columns = [[curve[u] for curve in curves] for u in kept]
    timed = bool(clocks) and all(u in clock for clock in clocks for u in kept if u)
    return Curve(
        update=kept,
        mean=_unless_lost(fmean, columns),
        low=_unless_lost(min, columns),
        high=_unless_lost(max, columns),
        seconds=[fmean(c.get(u, 0.0) for c in clocks) for u in kept] if timed else (),
        seeds=len(curves),
    )


def _unless_lost(
    merge: Callable[[Sequence[float]], float], columns: Sequence[Sequence[float]]
) -> list[float | None]:
    """Each column merged into one value; None where one of it is not finite."""
    return [merge(c) if all(finite(x) is not None for x in c) else None for c in columns]


def train_curve(setup: Setup, *, timed: bool) -> Curve | None:
    """Smoothed training loss of the runs that ended ok, or of all when none did."""
    runs = setup.with_status("ok") or list(setup.runs.values())
    runs = [run for run in runs if run.updates]
    clocks = [run.clock for run in runs] if timed else []
    return band([run.smoothed for run in runs], clocks)


def held_out_curve(setup: Setup, *, timed: bool) -> Curve | None:
    """Held-out loss of the runs that ended ok."""
    runs = [run for run in setup.with_status("ok") if run.evaluations]
    clocks = [run.clock for run in runs] if timed else []
    return band([run.held_out for run in runs], clocks)


def gap_curve(base: Setup, setup: Setup) -> Curve | None:
    """Smoothed training loss minus the baseline's of the same seed, over shared seeds."""
    gaps = []
    for own, other in finished_pairs(base, setup):
        curves = own.smoothed, other.smoothed
        shared = sorted(curves[0].keys() & curves[1].keys())
        gaps.append({u: curves[0][u] - curves[1][u] for u in shared})
    return band(gaps, [])


def finished_pairs(base: Setup, setup: Setup) -> list[tuple[ComparedRun, ComparedRun]]:
    """(run, baseline's run) of every seed that ended ok on both sides and has updates."""
    pairs = [(run, base.runs[seed]) for seed, run in setup.runs.items() if seed in base.runs]
    return [
        pair for pair in pairs if all(run.record.status == "ok" and run.updates for run in pair)
    ]


# --- equality ---------------------------------------------------------------------------------


def largest_gap(base: ComparedRun, run: ComparedRun) -> tuple[float, int]:
    """Largest difference between the losses of one update, and that update.

    A loss that only one of them has, or that is not finite, is an infinite difference; so is
    having no losses at all.
    """
    curves = [{u.update: u.loss for u in r.applied} for r in (base, run)]
    gaps = []
    for update in sorted(curves[0].keys() | curves[1].keys()):
        first, second = (finite(curve.get(update)) for curve in curves)
        both = first is not None and second is not None
        gaps.append((abs(first - second) if both else float("inf"), update))  # type: ignore
    return max(gaps, key=lambda gap: gap[0], default=(float("inf"), 0))


# --- time to a loss ---------------------------------------------------------------------------


def reach(base: Setup, setup: Setup, margin: float) -> Reach | None:
    """Seconds until the loss is within `margin` (nats) of the baseline's final one, same seed.

    The margin is the one of the quality check: without it a setup whose last loss is a rounding
    higher would never arrive. The baseline's own time is taken to the same loss.

    Held-out losses are used where every run measured enough of them, since they are what quality
    is judged by; else the smoothed training loss, against the baseline's final smoothed training
    loss of the same seed (both saw the same examples). The two are never mixed: training and
    held-out loss are different quantities. The first point at or under the loss counts.
    """
    pairs = finished_pairs(base, setup)
    if not pairs:
        return None
    enough = all(len(r.evaluations) >= ENOUGH_EVALUATIONS for pair in pairs for r in pair)
    name = "held_out" if enough else "smoothed"
    curves = [(getattr(run, name), getattr(other, name)) for run, other in pairs]
    targets = [list(other.values())[-1] + margin for _, other in curves]
    own = [
        _first_under(run, found, target)
        for (run, _), (found, _), target in zip(pairs, curves, targets, strict=True)
    ]
    theirs = [
        _first_under(other, found, target)
        for (_, other), (_, found), target in zip(pairs, curves, targets, strict=True)
    ]
    found = [seconds for seconds in own if seconds is not None]
    known = [seconds for seconds in theirs if seconds is not None]
    return Reach(
        quantity="held-out loss" if enough else "training loss",
        margin=margin,
        seconds=median(found) if found else None,
        baseline_seconds=median(known) if known else None,
        reached=len(found),
        seeds=len(pairs),
    )


def _first_under(run: ComparedRun, curve: dict[int, float], target: float) -> float | None:
    clock = run.clock
    return next((clock.get(u, 0.0) for u, loss in curve.items() if loss <= target), None)
