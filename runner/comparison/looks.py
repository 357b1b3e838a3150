"""The looks at the numerics of one setup's runs, from their journals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from runner.comparison.curves import band
from runner.comparison.results import LookFigure, LooksRow, LossScale
from runner.comparison.runs import ComparedRun
from runner.comparison.setups import Setup
from runner.numerics import extremes, points_of, worst_groups

EVENLY = 47
"""Points of a thinned curve, to which those that must not be lost are added."""


def looks_of(setup: Setup) -> LooksRow | None:
    """What the looks found; None where there are none.

    Extremes are over every run that was looked at, one that diverged included; curves, as those
    of the loss, over the runs that ended ok, or over all when none did.
    """
    runs = [run for run in setup.runs.values() if run.looks]
    if not runs:
        return None
    looks = [look for run in runs for look in run.looks]
    curved = [run for run in runs if run.record.status == "ok"] or runs
    by_run = [{n: dict(p) for n, p in points_of(run.looks).items()} for run in curved]
    return LooksRow(
        seeds=[run.seed for run in runs],
        count=max(len(run.looks) for run in runs),
        first_update=min(look.update for look in looks),
        last_update=max(look.update for look in looks),
        figures={
            name: _figure(points, [figures[name] for figures in by_run if name in figures])
            for name, points in points_of(looks).items()
        },
        worst=worst_groups(looks),
        loss_scale=_loss_scale(runs),
    )


def _figure(points: Sequence[tuple[int, float]], curves: Sequence[dict[int, float]]) -> LookFigure:
    found = extremes(points)
    never_lost = {found.least_update, found.most_update, found.nonfinite_update} - {None}
    curve = band(curves, [], partial(thinned, always=never_lost))
    return LookFigure(
        first=curve.mean[0] if curve else None,
        last=curve.mean[-1] if curve else None,
        extremes=found,
        curve=curve,
    )


def thinned(updates: Sequence[int], always: set[int | None]) -> list[int]:
    """At most EVENLY of the updates, evenly from the first to the last, and those of `always`."""
    if len(updates) <= EVENLY:
        return list(updates)
    last = len(updates) - 1
    even = {updates[round(place * last / (EVENLY - 1))] for place in range(EVENLY)}
    return [update for update in updates if update in even or update in always]


def _loss_scale(runs: Sequence[ComparedRun]) -> LossScale | None:
    """From every attempt of the runs, not from their looks alone."""
    scales = [[u.loss_scale for u in run.updates if u.loss_scale is not None] for run in runs]
    known = [found for found in scales if found]
    if not known:
        return None
    deepest = min(known, key=min)
    return LossScale(
        first=deepest[0],
        last=deepest[-1],
        lowest=min(deepest),
        skipped=max(sum(not u.applied for u in run.updates) for run in runs),
    )
