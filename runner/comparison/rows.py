"""The figures of one setup, with the conditions that they stand with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from runner.comparison.curves import held_out_curve, train_curve
from runner.comparison.looks import looks_of
from runner.comparison.results import ExampleCounts, LiveBytes, RunRow, SetupRow
from runner.comparison.runs import ComparedRun
from runner.comparison.setups import Setup, is_emulated
from runner.forwarding.runs import is_timed


def row_of(setup: Setup) -> SetupRow:
    """The figures of a setup, from the runs that ended ok."""
    run, record = setup.first, setup.first.record
    timed = not is_emulated(setup)
    done = [r.record for r in setup.with_status("ok")]
    return SetupRow(
        name=setup.name,
        swept=setup.swept,
        setup_id=record.setup_id,
        workload_id=record.workload_id,
        runs=[_run_row(r, timed) for r in setup.runs.values()],
        figures=_figures([_shown(r.summary, timed) for r in done]),
        conditions=conditions_of(run),
        phases=_phases([r.sizes for r in done]) if timed else {},
        memory=dict(record.memory.get("at_peak", {})),
        live=_live(record.memory),
        largest=record.memory.get("largest_live_object"),
        padding_share=record.sizes.get("padding_share"),
        examples=examples_of(setup),
        emulated=not timed,
        probe=record.numerics.get("gradient_probe") or {},
        train=train_curve(setup, timed=timed),
        held_out=held_out_curve(setup, timed=timed),
        looks=looks_of(setup),
    )


def examples_of(setup: Setup) -> ExampleCounts | None:
    """What was cut or left out, over the runs that state it; None where none does."""
    found = [run.record.sizes for run in setup.runs.values()]
    found = [sizes for sizes in found if "examples_truncated" in sizes]
    if not found:
        return None
    reasons = {reason: None for sizes in found for reason in sizes["examples_dropped"]}
    truncated = [sizes["examples_truncated"] for sizes in found]
    return ExampleCounts(
        train=found[0].get("examples_train"),
        held_out=found[0].get("examples_eval"),
        truncated=(min(truncated), max(truncated)),
        dropped={
            reason: (min(counts), max(counts))
            for reason in reasons
            if (counts := [sizes["examples_dropped"].get(reason, 0) for sizes in found])
        },
    )


def _live(memory: Mapping[str, Any]) -> LiveBytes | None:
    """The account's curve; None where there is none, as in records of an earlier version."""
    if not memory.get("by_category"):
        return None
    return LiveBytes(
        phases=[phase for _, _, phase in memory["curve"]], categories=memory["by_category"]
    )


def _shown(summary: Mapping[str, float], timed: bool) -> dict[str, float]:
    """The figures of a run, without those of a clock where it is emulated."""
    return {name: value for name, value in summary.items() if timed or not is_timed(name)}


def _run_row(run: ComparedRun, timed: bool) -> RunRow:
    return RunRow(
        run_id=run.run_id,
        seed=run.seed,
        status=run.record.status,
        message=run.record.message,
        figures=_shown(run.record.summary, timed),
    )


def _figures(summaries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Figures that every run has, over runs: the median; the mean of losses; most skips."""
    names = set.intersection(*(set(s) for s in summaries)) if summaries else set()
    return {name: _over_runs(name)([s[name] for s in summaries]) for name in sorted(names)}


def _over_runs(name: str) -> Callable[[Sequence[float]], float]:
    if name == "updates_skipped":
        return max
    return fmean if name.endswith("loss") else median


def _phases(sizes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean exposed seconds of one unmarked update by phase, over runs."""
    known = [s for s in sizes if s.get("phase_shares") and s.get("step_s")]
    if not known:
        return {}
    return {
        phase: fmean(s["phase_shares"][phase] * s["step_s"]["mean"] for s in known)
        for phase in known[0]["phase_shares"]
    }


def conditions_of(run: ComparedRun) -> dict[str, Any]:
    """What every rate stands with: global batch, its division, sequence length, recipe."""
    config, sizes = run.record.config, run.record.sizes
    formats = run.evidence("formats") or {}
    found = {
        "global_batch": sizes.get("global_batch", config.get("batch")),
        "micro_batch": sizes.get("micro_batch"),
        "seq_len": config.get("seq_len"),
        "precision": recipe_of(run),
        "compute": formats.get("compute"),
    }
    return {key: value for key, value in found.items() if value is not None}


def recipe_of(run: ComparedRun) -> str | None:
    """Name of the precision recipe: the option as typed, else what the part says of itself."""
    if "precision" in run.swept:
        return run.swept["precision"]
    formats = run.evidence("formats")
    return formats.get("compute") if formats else None
