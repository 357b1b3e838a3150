"""Runs in, comparison out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from runner.comparison.curves import gap_curve, reach
from runner.comparison.notes import device_of, notes_of, workload_of
from runner.comparison.quality import contrast
from runner.comparison.ratios import JUDGED, with_ratios
from runner.comparison.results import Comparison, Contrast, Quality, TunedRow, Verdict
from runner.comparison.rows import row_of
from runner.comparison.runs import ComparedRun
from runner.comparison.setups import (
    Setup,
    axes_of,
    baseline_of,
    is_emulated,
    neighbours,
    setups_of,
)
from runner.comparison.tuning import keys_of, tuned, words
from runner.contracts import Fault, UserError


def compare(
    runs: Sequence[ComparedRun],
    *,
    axes: Mapping[str, Sequence[str]] | None = None,
    baseline: str | None = None,
    quality: Mapping[str, float] | None = None,
    tune: Sequence[str] | None = None,
) -> Comparison:
    """Judge every setup among the runs against the baseline.

    axes: swept keys with their values as typed; by default what the runs tell. baseline: words
    `key=value` that the baseline carries; by default the first value of every swept key.
    quality: values that replace those of the rule in the baseline's configuration. tune: swept
    keys of which each setup gets its best value, see `tuning`; by default what the runs'
    configuration says. Raises UserError for no runs, a baseline that none of them is, or a tuned
    key that was not swept.
    """
    if not runs:
        fault = Fault(
            key="runs", given="none", allowed="runs that exist", next_step="name a sweep or runs"
        )
        raise UserError(fault)
    known = axes_of(runs) if axes is None else axes
    setups = setups_of(runs, known)
    keys = keys_of(runs) if tune is None else tune
    rows: list[TunedRow] = []
    if keys:
        setups, rows = tuned(setups, keys)
        known = {key: values for key, values in known.items() if key not in keys}
    base = baseline_of(setups, known, baseline)
    stated = (base or setups[0]).first.record.config.get("quality", {})
    rule = Quality(**{**stated, **(quality or {})})
    main = [_contrast(base, s, rule, known) for s in setups if s is not base]
    more = [contrast(other, s, rule) for other, s in neighbours(setups, known, base)]
    by_name = {s.name: s for s in setups}
    judged = [
        _with_curves(c, by_name, rule.margin) for c in with_ratios([*main, *more], by_name, rule)
    ]
    return Comparison(
        baseline=base.name if base else None,
        quality=rule,
        setups=[row_of(setup) for setup in setups],
        contrasts=judged[: len(main)],
        pairs=judged[len(main) :],
        notes=[*notes_of(setups, base, known), *map(words, rows), *_bias(rows)],
        tuning=rows,
        device=device_of(setups),
        workload=workload_of(base or setups[0]),
    )


def _bias(rows: Sequence[TunedRow]) -> list[str]:
    if not rows:
        return []
    return [
        "Tuned keys were chosen on the same held-out examples that the setups are judged on, on "
        "both sides from the same grid: each loss is the best of as many, and a little too good."
    ]


def _contrast(
    base: Setup | None, setup: Setup, rule: Quality, axes: Mapping[str, Sequence[str]]
) -> Contrast:
    if base is not None:
        return contrast(base, setup, rule)
    firsts = " ".join(f"{key}={values[0]}" for key, values in axes.items() if key != "seed")
    verdict = Verdict(word="unchecked", reason=f"the baseline ({firsts}) has no run")
    return Contrast(baseline=firsts, setup=setup.name, verdict=verdict)


def _with_curves(found: Contrast, setups: Mapping[str, Setup], margin: float) -> Contrast:
    """The contrast with its curve of differences and, where it has times, the time to a loss."""
    if found.verdict.word not in JUDGED:
        return found
    base, setup = setups[found.baseline], setups[found.setup]
    timed = not is_emulated(setup) and not is_emulated(base)
    return replace(
        found, gap=gap_curve(base, setup), reach=reach(base, setup, margin) if timed else None
    )
