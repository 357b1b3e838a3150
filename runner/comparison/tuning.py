"""Keys that every setup may choose for itself: the best of the same grid on each side.

Some changes need their own learning rate (adapters above all). Held against one fixed rate they
would be judged by the rate and not by the change, so the runs that differ in a tuned key only are
grouped, and of each group the value with the lowest held-out loss stands for the setup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from runner.checks import not_swept
from runner.comparison.results import TunedRow
from runner.comparison.runs import ComparedRun
from runner.comparison.setups import Setup
from runner.contracts import UserError

Values = tuple[str, ...]
"""One value for each tuned key, as typed."""
SEPARATOR = " "


def words(row: TunedRow) -> str:
    """One sentence for a report."""
    tried = ", ".join(
        f"{values}: {'failed' if loss is None else f'{loss:.4f}'}"
        for values, loss in row.tried.items()
    )
    best = " ".join(f"{key}={value}" for key, value in row.chosen.items())
    return (
        f"{row.setup}: {best} is the best of {len(row.tried)} tried by held-out loss ({tried})"
        f"{_edge(row)}."
    )


def _edge(row: TunedRow) -> str:
    """A best value at an end of its grid is said to be one."""
    ends = []
    for place, (key, own) in enumerate(row.chosen.items()):
        numbers = [_number(values.split(SEPARATOR)[place]) for values in row.tried]
        known = [number for number in numbers if number is not None]
        value = _number(own)
        if value is not None and len(set(known)) > 1 and value in (min(known), max(known)):
            ends.append(f"the {'largest' if value == max(known) else 'smallest'} {key}")
    return f"; that is {' and '.join(ends)}, so a wider grid may hold a better one" if ends else ""


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def keys_of(runs: Sequence[ComparedRun]) -> list[str]:
    """The keys that the runs' own configurations say are tuned, as far as they were swept."""
    stated = (run.record.config.get("compare", {}).get("tune", []) for run in runs)
    swept = {key for run in runs for key in run.swept}
    return [key for key in next(filter(None, stated), []) if key in swept]


def tuned(setups: Sequence[Setup], keys: Sequence[str]) -> tuple[list[Setup], list[TunedRow]]:
    """One setup for each group of setups that differ in the tuned keys only, in their order.

    Raises UserError for a key that was not swept.
    """
    missing = [key for key in keys if not any(key in setup.swept for setup in setups)]
    if missing:
        raise UserError(not_swept(missing, [key for s in setups for key in s.swept]))
    groups: dict[tuple[tuple[str, str], ...], list[Setup]] = {}
    for setup in setups:
        rest = tuple(item for item in setup.swept.items() if item[0] not in keys)
        groups.setdefault(rest, []).append(setup)
    chosen = [_best(group, tuple(keys)) for group in groups.values()]
    return [setup for setup, _ in chosen], [row for _, row in chosen]


def _best(group: Sequence[Setup], keys: Values) -> tuple[Setup, TunedRow]:
    """The setup of the group with the lowest mean held-out loss, as tuned."""
    values = [tuple(setup.swept.get(key, "") for key in keys) for setup in group]
    losses = dict(zip(values, _mean_losses(group), strict=True))
    trained = [place for place, value in enumerate(values) if losses[value] is not None]
    place = min(trained, key=lambda p: losses[values[p]] or 0.0) if trained else 0
    best = group[place]
    rest = {key: value for key, value in best.swept.items() if key not in keys}
    own = dict(zip(keys, values[place], strict=True))
    others = [run.run_id for s in group if s is not best for run in s.runs.values()]
    tried = {SEPARATOR.join(value): loss for value, loss in losses.items()}
    row = TunedRow(setup=best.name, chosen=own, tried=tried, passed_over=others)
    return replace(best, swept=rest, tuned=own, grid=frozenset(values)), row


def _mean_losses(group: Sequence[Setup]) -> list[float | None]:
    """Mean held-out loss of each over the seeds that all share; None where a run failed."""
    own = [_losses(setup.runs) for setup in group]
    known = [losses for losses in own if losses]
    shared = set.intersection(*map(set, known)) if known else set()
    return [
        fmean(losses[seed] for seed in (shared or losses)) if losses else None for losses in own
    ]


def _losses(runs: Mapping[int, ComparedRun]) -> dict[int, float]:
    """Held-out losses by seed; empty when a run ended otherwise than ok. Killed ones are apart:
    they say nothing about the value."""
    ended = [run for run in runs.values() if run.record.status != "killed"]
    if any(run.record.status != "ok" for run in ended):
        return {}
    found = {run.seed: run.record.summary.get("eval_loss") for run in ended}
    if any(loss is None for loss in found.values()):
        return {}
    return {seed: loss for seed, loss in found.items() if loss is not None}
