"""The statistics of a comparison: paired t bounds, numbers of seeds, Holm's procedure. Pure.

The run is the unit: updates within a run are not independent of each other. scipy is imported
where a quantile is needed, since the launching process must stay light.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

POWER = 0.95
"""Least probability of the right answer at the recommended number of seeds, when the true
difference is 0 (pass) or twice the margin (fail)."""
SPREAD_CONFIDENCE = 0.80
"""Confidence of the upper bound that stands for an unknown spread (a standard deviation from
three pairs is often far too small)."""
FIRST_SEEDS = 3
"""Seeds to run before anything is known of their spread."""
MOST_SEEDS = 200
"""No more seeds than this are ever recommended."""


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Differences of pairs, with what a t distribution says about their mean.

    count: pairs. stdev: sample standard deviation of one difference, None for one pair.
    lower, upper: one-sided bounds of the mean, each at the given confidence.
    low, high: two-sided interval of the mean at the same confidence. None for one pair.
    """

    count: int
    mean: float
    stdev: float | None = None
    lower: float | None = None
    upper: float | None = None
    low: float | None = None
    high: float | None = None


def t_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))


def paired(differences: Sequence[float], confidence: float) -> Paired:
    """Mean of the differences with its bounds; equal differences have bounds equal to them."""
    count = len(differences)
    mean = fmean(differences)
    if count < 2:
        return Paired(count=count, mean=mean)
    spread = stdev(differences)
    error = spread / math.sqrt(count)
    one = t_quantile(confidence, count - 1) * error
    two = t_quantile((1 + confidence) / 2, count - 1) * error
    return Paired(
        count=count,
        mean=mean,
        stdev=spread,
        lower=mean - one,
        upper=mean + one,
        low=mean - two,
        high=mean + two,
    )


def p_value(differences: Sequence[float]) -> float | None:
    """Two-sided p value of "the mean is 0"; None for one pair.

    Without any spread the mean is known: 0 for a mean that is not 0, else 1.
    """
    if len(differences) < 2:
        return None
    from scipy.special import stdtr

    mean, spread = fmean(differences), stdev(differences)
    if spread == 0:
        return 0.0 if mean else 1.0
    t = abs(mean) / (spread / math.sqrt(len(differences)))
    return float(2 * stdtr(len(differences) - 1, -t))


# --- how many seeds ---------------------------------------------------------------------------


def power(*, shift: float, spread: float, seeds: int, confidence: float) -> float:
    """Probability that a one-sided t bound clears a value that lies `shift` away from the mean.

    spread: standard deviation of one difference. From the noncentral t distribution.
    """
    if spread == 0:
        return 1.0
    from scipy.special import nctdtr

    centre = shift / spread * math.sqrt(seeds)
    return 1 - float(nctdtr(seeds - 1, centre, t_quantile(confidence, seeds - 1)))


def seeds_for(*, shift: float, spread: float, confidence: float) -> int | None:
    """Least number of seeds with `power` of at least POWER; None beyond MOST_SEEDS."""

    def enough(seeds: int) -> bool:
        found = power(shift=shift, spread=spread, seeds=seeds, confidence=confidence)
        return found >= POWER

    if shift <= 0 or not enough(MOST_SEEDS):
        return None
    return next(seeds for seeds in range(2, MOST_SEEDS + 1) if enough(seeds))


def spread_bound(spread: float, count: int) -> float:
    """Upper confidence bound of a standard deviation estimated from `count` normal values."""
    from scipy.special import chdtri

    return spread * math.sqrt((count - 1) / float(chdtri(count - 1, SPREAD_CONFIDENCE)))


def settling_seeds(found: Paired, *, margin: float, confidence: float) -> int | None:
    """Number of seeds in all that would settle an undecided check; None beyond MOST_SEEDS.

    First the number at which no difference passes, and twice the margin fails, with POWER, for
    the upper bound of the spread seen so far. Where that many seeds are there already, the mean
    lies close to the margin: then the number that tells this mean from the margin.

    To add seeds and look again is a second chance: at a true difference equal to the margin, two
    looks pass at most twice as often as one (10 % at a confidence of 95 %; simulated: 9 to 10 %).
    """
    if found.stdev is None:
        return FIRST_SEEDS
    spread = spread_bound(found.stdev, found.count)
    seeds = seeds_for(shift=margin, spread=spread, confidence=confidence)
    if seeds is None or seeds > found.count:
        return seeds
    gap = abs(margin - found.mean)
    seeds = seeds_for(shift=gap, spread=found.stdev, confidence=confidence)
    return None if seeds is None else max(seeds, found.count + 1)


# --- many comparisons at once -----------------------------------------------------------------


def holm_levels(p_values: Sequence[float], confidence: float) -> list[float]:
    """Confidence of each two-sided interval that agrees with Holm's step-down procedure.

    Sorted ascending, the k-th of m p values is held against alpha / (m - k + 1); the first that
    exceeds its share stops the procedure, and all later ones are held to that same share. So an
    interval at the returned confidence excludes "no difference" exactly where Holm rejects it.
    """
    alpha = 1 - confidence
    levels = [confidence] * len(p_values)
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    stopped: float | None = None
    for place, index in enumerate(order):
        share = stopped or alpha / (len(order) - place)
        levels[index] = 1 - share
        if stopped is None and p_values[index] > share:
            stopped = share
    return levels
