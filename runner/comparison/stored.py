"""Compared runs from a tracking store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from runner.comparison.runs import ComparedRun
from runner.comparison.sources import bare_record
from runner.contracts import Fault, UserError
from runner.readback import TrackedRun, read_runs
from runner.tracking import Mlflow


def stored_runs(options: Mapping[str, str], launch: Path) -> list[ComparedRun]:
    """The runs that `sweep`, `runs` or `experiment` name, in the store that `uri` names.

    Raises UserError for a store, experiment, sweep or run that is not there.
    """
    tracking = Mlflow(uri=options.get("uri"), experiment=options.get("experiment", "runner"))
    wanted = [word for word in options.get("runs", "").split(",") if word]
    sweep = options.get("sweep")
    if sweep is None and not wanted and "experiment" not in options:
        sweep = "latest"
    found = read_runs(tracking, launch, sweep, run_ids=wanted or None)
    if not found:
        fault = Fault(
            key="runs",
            given="none",
            allowed="an experiment that holds runs",
            next_step="run a sweep: python -m runner -m precision=fp32,bf16 seed=0,1,2",
        )
        raise UserError(fault)
    return [of_tracked(run) for run in found]


def of_tracked(tracked: TrackedRun) -> ComparedRun:
    """A stored run; one without a record counts as killed, or as one that still runs."""
    run, record = tracked.run, tracked.record
    if record is None:
        running = run.status == "RUNNING"
        message = "it still runs, or its launcher was killed" if running else "there is no record"
        record = replace(
            bare_record("killed", message, {}),
            workload_id=run.tags.get("workload_id"),
            setup_id=run.tags.get("setup_id"),
        )
    job = record.job
    return ComparedRun(
        run_id=run.run_id,
        setup=run.tags.get("setup", run.name),
        seed=int(run.params.get("seed", record.config.get("seed", 0))),
        record=record,
        journal=tracked.journal,
        swept=job.get("swept") or {},
        axes=job.get("axes") or {},
    )
