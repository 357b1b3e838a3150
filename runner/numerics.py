"""What the looks at the numerics of a run come to: extremes and where they were; knows no torch.

A figure that was not finite is counted and its first update named; it is in no extreme, since
no number is larger or smaller than one that is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from runner.records import NumericsRecord, finite

Points = Sequence[tuple[int, float]]
"""Update and value of one figure, by look; a value may be NaN or infinite."""


@dataclass(frozen=True, kw_only=True)
class Extremes:
    """One figure over the looks that have it.

    looks: their number. least, most: of the finite values, each with the first update that had it;
    None where no value is finite. nonfinite: looks in which it was not finite, the first of them
    after update `nonfinite_update`.
    """

    looks: int
    least: float | None
    least_update: int | None
    most: float | None
    most_update: int | None
    nonfinite: int = 0
    nonfinite_update: int | None = None


@dataclass(frozen=True, kw_only=True)
class Worst:
    """The group of layers with the largest rounding error of any look; error: None where it was
    not finite, which is worse than any number."""

    group: str
    error: float | None
    update: int


def extremes(points: Points) -> Extremes:
    """The extremes of one figure. points: at least one, in any order."""
    known = [(value, update) for update, value in points if math.isfinite(value)]
    lost = [update for update, value in points if not math.isfinite(value)]
    least = min(known, default=(None, None))
    most = max(known, key=lambda found: (found[0], -found[1]), default=(None, None))
    return Extremes(
        looks=len(points),
        least=least[0],
        least_update=least[1],
        most=most[0],
        most_update=most[1],
        nonfinite=len(lost),
        nonfinite_update=min(lost, default=None),
    )


def points_of(looks: Sequence[NumericsRecord]) -> dict[str, list[tuple[int, float]]]:
    """Every figure of the whole model, by name; those of groups of layers are left out."""
    found: dict[str, list[tuple[int, float]]] = {}
    for look in looks:
        for name, value in look.values.items():
            if "/" not in name:
                found.setdefault(name, []).append((look.update, value))
    return found


def worst_groups(looks: Sequence[NumericsRecord]) -> dict[str, Worst]:
    """The worst group of layers for each figure that is known by group, such as `inputs_error`."""
    found: dict[str, Worst] = {}
    for look in looks:
        for name, value in look.values.items():
            kind, mark, group = name.partition("/")
            if mark:
                own = Worst(group=group, error=finite(value), update=look.update)
                found[kind] = max(found.get(kind, own), own, key=_size)
    return found


def _size(worst: Worst) -> float:
    return math.inf if worst.error is None else worst.error


def summed_up(looks: Sequence[NumericsRecord]) -> dict[str, Any]:
    """What a record keeps of its run's looks: their number and updates, each figure's first and
    last value and extremes, the worst groups; empty without looks."""
    if not looks:
        return {}
    return {
        "count": len(looks),
        "first_update": looks[0].update,
        "last_update": looks[-1].update,
        "figures": {
            name: {
                "first": finite(points[0][1]),
                "last": finite(points[-1][1]),
                **asdict(extremes(points)),
            }
            for name, points in points_of(looks).items()
        },
        "worst_groups": {kind: asdict(worst) for kind, worst in worst_groups(looks).items()},
    }


def not_finite(found: Mapping[str, Any]) -> str:
    """`not finite in 2 of 6 looks, first after update 15`; empty where all were finite. found:
    `Extremes` as a mapping."""
    count, looks = found["nonfinite"], found["looks"]
    if not count:
        return ""
    plural = "s" if looks > 1 else ""
    return f"not finite in {count} of {looks} look{plural}, first after update " + str(
        found["nonfinite_update"]
    )
