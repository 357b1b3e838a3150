"""What a tracking store holds, read back: comparisons need no run folders. Writes nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.contracts import Fault, UserError
from runner.forwarding.address import probe_server, resolve_uri, sqlite_path, uri_fault, within
from runner.forwarding.client import Run
from runner.forwarding.curves import KINDS_OF_NONFINITE, NONFINITE
from runner.forwarding.store import CHECK_S
from runner.records import JournalLine, RunRecord, Unreadable, read_run
from runner.tracking import Mlflow, MlflowCalls


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A job's run as the store keeps it; `record` is None while it runs or when it was killed."""

    run: Run
    record: RunRecord | None
    journal: Sequence[JournalLine]


def read_runs(
    tracking: Mlflow,
    launch: Path,
    sweep: str | None = None,
    run_ids: Sequence[str] | None = None,
) -> list[TrackedRun]:
    """The runs of jobs with what their artifacts hold, oldest first; parents are left out.

    launch: the folder that relative sqlite addresses count from.
    sweep: only those of one sweep, `latest` for the newest one. run_ids: only these, in this
    order. Raises UserError for a store, experiment, sweep or run that is not there.
    """
    calls, experiment_id = _open(tracking, launch)
    runs = calls.search(experiment_id, "")
    if run_ids is not None:
        return [_read_run(calls, run) for run in _pick(run_ids, runs)]
    if sweep is not None:
        chosen = _choose(sweep, [run.tags["sweep_id"] for run in runs if "sweep_id" in run.tags])
        runs = [run for run in runs if run.tags.get("sweep_id") == chosen]
    jobs = [run for run in reversed(runs) if "sweep_parent" not in run.tags]
    return [_read_run(calls, run) for run in jobs]


def _open(tracking: Mlflow, launch: Path) -> tuple[MlflowCalls, str]:
    uri = resolve_uri(tracking.uri, launch.absolute())
    path = sqlite_path(uri)
    step = "start this in the folder of the runs, or name their store with tracking.uri=..."
    if path is not None and not path.exists():
        raise uri_fault(uri, "there is no such file", step)
    try:
        within(CHECK_S, lambda: probe_server(uri, CHECK_S / 2))
        calls = MlflowCalls(uri)
        found = within(CHECK_S, lambda: calls.find_experiment(tracking.experiment))
    except Exception as error:
        raise uri_fault(uri, str(error).partition("\n")[0], step) from error
    if found is None:
        fault = Fault(
            key="tracking.experiment",
            given=tracking.experiment,
            allowed=f"an experiment of {uri}",
            next_step=step,
        )
        raise UserError(fault)
    return calls, found


def _choose(sweep: str, known: Sequence[str]) -> str:
    names = list(dict.fromkeys(known))
    if sweep == "latest" and names:
        return names[0]
    if sweep not in names:
        fault = Fault(
            key="sweep",
            given=sweep,
            allowed=", ".join(["latest", *names]) if names else "nothing: no sweep is stored here",
            next_step="name one of these, or another tracking.uri or tracking.experiment",
        )
        raise UserError(fault)
    return sweep


def _pick(run_ids: Sequence[str], runs: Sequence[Run]) -> list[Run]:
    known = {run.run_id: run for run in runs if "sweep_parent" not in run.tags}
    missing = [run_id for run_id in run_ids if run_id not in known]
    if missing:
        fault = Fault(
            key="runs",
            given=", ".join(missing),
            allowed="ids of runs of this experiment, a sweep's parent not among them",
            next_step="list them with: mlflow runs list, or name another tracking.experiment",
        )
        raise UserError(fault)
    return [known[run_id] for run_id in run_ids]


def _read_run(calls: MlflowCalls, run: Run) -> TrackedRun:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calls.download(run, folder)
        try:
            record, journal = read_run(folder)
        except Unreadable as error:
            raise UserError(_damaged(run, error)) from error
    return TrackedRun(run=run, record=record, journal=journal)


def _damaged(run: Run, error: Unreadable) -> Fault:
    """A run whose artifacts cannot be read: it is not left out in silence."""
    return Fault(
        key="runs",
        given=f"{run.run_id} ({run.name}), of whose artifacts {error.name} is damaged: "
        f"{error.reason}",
        allowed="runs whose artifacts are as they were written",
        next_step="name the others: runs=ID,ID, or delete that run",
    )


def read_curve(uri: str, run_id: str, name: str) -> list[tuple[int, float]]:
    """Step and value of a curve, in order, with nan and infinities as they were.

    uri: resolved, as a store has it.
    """
    calls = MlflowCalls(uri)
    values = calls.history(run_id, name)
    for step, code in calls.history(run_id, NONFINITE + name).items():
        values[step] = float(KINDS_OF_NONFINITE[int(code) - 1])
    return sorted(values.items())
