"""Speed and memory as ratios: paired by seed, one family under Holm's procedure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from runner.comparison.results import METRICS, Contrast, Quality, Ratio
from runner.comparison.setups import Setup, is_emulated, is_narrow_and_eager
from runner.comparison.statistics import holm_levels, p_value, paired
from runner.forwarding.runs import is_timed

EAGER = "eager"
"""Beside a ratio of times of FP8 or narrower products that ran without compilation."""
JUDGED = ("passed", "failed", "unknown")
"""Verdicts beside which a ratio may stand: the same work was done, to its end."""


def log_ratios(base: Setup, setup: Setup, metric: str) -> list[float]:
    """log(setup / baseline) of a figure for every seed that has it on both sides.

    None where a side is emulated: that time and that memory are the emulation's.
    """
    found: list[float] = []
    if is_emulated(base) or is_emulated(setup):
        return []
    for seed, run in setup.runs.items():
        other = base.runs.get(seed)
        if other is None or {run.record.status, other.record.status} != {"ok"}:
            continue
        own, theirs = run.record.summary.get(metric), other.record.summary.get(metric)
        if own and theirs:
            found.append(math.log(own / theirs))
    return found


def with_ratios(
    contrasts: Sequence[Contrast], setups: Mapping[str, Setup], quality: Quality
) -> list[Contrast]:
    """The contrasts with their ratios; all ratios of all contrasts are one family."""
    logs = {
        (place, metric): found
        for place, contrast in enumerate(contrasts)
        if contrast.verdict.word in JUDGED
        for metric in METRICS
        if (found := log_ratios(setups[contrast.baseline], setups[contrast.setup], metric))
    }
    tested = {key: p for key, found in logs.items() if (p := p_value(found)) is not None}
    levels = dict(zip(tested, holm_levels(list(tested.values()), quality.confidence), strict=True))
    ratios: dict[int, dict[str, Ratio]] = {}
    for (place, metric), found in logs.items():
        passed = contrasts[place].verdict.word == "passed"
        level = levels.get((place, metric))
        judged = judge(found, metric, level=level, passed=passed, least=quality.min_effect)
        pair = (setups[contrasts[place].baseline], setups[contrasts[place].setup])
        if is_timed(metric) and any(map(is_narrow_and_eager, pair)):
            judged = replace(judged, note=EAGER)
        ratios.setdefault(place, {})[metric] = judged
    return [replace(c, ratios=ratios.get(place, {})) for place, c in enumerate(contrasts)]


def judge(
    logs: Sequence[float], metric: str, *, level: float | None, passed: bool, least: float
) -> Ratio:
    """A ratio with its interval at `level` (None: a single seed) and what may be said of it."""
    if level is None:
        return Ratio(value=math.exp(logs[0]), seeds=1, outcome="one seed")
    found = paired(logs, level)
    assert found.low is not None and found.high is not None
    value, low, high = (math.exp(x) for x in (found.mean, found.low, found.high))
    return Ratio(
        value=value,
        seeds=found.count,
        low=low,
        high=high,
        level=level,
        outcome=_outcome(value, low, high, metric, passed=passed, least=least),
    )


def _outcome(
    value: float, low: float, high: float, metric: str, *, passed: bool, least: float
) -> str:
    clear = low > 1 or high < 1
    if not clear or abs(value - 1) < least:
        return "not distinguishable"
    if (value < 1) != (METRICS[metric] == "lower"):
        return "worse"
    return "win" if passed else "better"
