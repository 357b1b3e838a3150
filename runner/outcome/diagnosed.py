"""What the diagnosis of a run is about."""

from __future__ import annotations

from dataclasses import asdict

from runner import accounting
from runner.assemble import Job
from runner.diagnosis import Figures, stages
from runner.environment import device_bytes
from runner.loop import Loop
from runner.measure.peaks import peak_bytes_per_s
from runner.outcome.memory import memory_figures
from runner.outcome.run import Run
from runner.outcome.work import device_name, optimizer_bytes


def diagnosis_of(run: Run) -> list[dict[str, str]]:
    """Every stage of the step with its figure, in execution order, symptoms with advice."""
    if run.loop is None or run.job is None or run.device is None or run.emulated:
        return []
    return [asdict(stage) for stage in stages(figures_of(run, run.job, run.loop))]


def figures_of(run: Run, job: Job, loop: Loop) -> Figures:
    """What the diagnosis is about."""
    counted = accounting.timed(loop.records)
    steps = accounting.statistics([u.total for u in counted])
    total = sum(u.total for u in counted)
    at_peak = run.account.at_peak if run.account else {}
    seconds = accounting.phase_totals(counted)["optimizer"]
    moved = accounting.rate(optimizer_bytes(job) * len(counted), seconds)
    assert run.device is not None
    return Figures(
        shares=accounting.phase_shares(counted),
        host_data_share=sum(u.host["data"] for u in counted) / total if total else None,
        copy_share=sum(u.host["transfer"] for u in counted) / total if total else None,
        padding=accounting.padding_share(accounting.total_counts(loop.records)),
        peak_bytes=memory_figures(run).get("peak_allocated_bytes"),
        device_bytes=device_bytes(run.device),
        largest_category=max(at_peak, key=lambda name: at_peak[name]) if at_peak else None,
        peak_phase=run.account.peak_phase if run.account else None,
        accum=run.config["accum"],
        workers=job.feed.workers,
        skipped=sum(not u.applied for u in loop.records),
        spread=steps["spread"] if steps else None,
        optimizer_bytes_per_s=moved,
        bandwidth=peak_bytes_per_s(device_name(run.device)),
        others=len(run.others),
        retries=int(memory_figures(run).get("allocator_retries", 0)),
    )
