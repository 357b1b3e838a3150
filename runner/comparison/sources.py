"""Where compared runs come from: results of a sweep that just ended, run folders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from runner import checks
from runner.comparison.runs import ComparedRun
from runner.contracts import UserError
from runner.records import (
    JOURNAL,
    MISREAD,
    RECORD,
    JournalLine,
    RunRecord,
    Unreadable,
    read_journal,
    read_run,
)
from runner.states import JOB


class PlanLike(Protocol):
    """What of a job's plan is needed here, see `runner.compose.Plan`."""

    @property
    def setup(self) -> str: ...
    @property
    def swept(self) -> Mapping[str, str]: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def folder(self) -> Path: ...


class ResultLike(Protocol):
    """What of a job's end is needed here, see `runner.launch.Result`."""

    @property
    def plan(self) -> PlanLike: ...
    @property
    def status(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def record(self) -> RunRecord | None: ...
    @property
    def run_id(self) -> str | None: ...


def of_result(
    result: ResultLike, *, launch: Path, axes: Mapping[str, Sequence[str]]
) -> ComparedRun:
    """A job of a sweep that just ended; its journal is read from its folder."""
    plan = result.plan
    folder = launch / plan.folder
    return ComparedRun(
        run_id=result.run_id or str(plan.folder),
        setup=plan.setup,
        seed=int(plan.config["seed"]),
        record=result.record or bare_record(result.status, result.message, plan.config),
        journal=read_journal(folder / JOURNAL),
        swept=plan.swept,
        axes=axes,
    )


def bare_record(status: str, message: str, config: Mapping[str, Any]) -> RunRecord:
    """The record of a run that left none."""
    try:
        setup = checks.setup_id(config) if config else None
    except UserError:  # a part of the configuration is not installed here
        setup = None
    return RunRecord(
        status=status, message=message, command=(), workload_id=None, setup_id=setup, config=config
    )


def of_record(
    record: RunRecord, run_id: str, ticket: Mapping[str, Any], journal: Sequence[JournalLine]
) -> ComparedRun:
    """A run with its record; `ticket`: setup, swept keys and axes."""
    return ComparedRun(
        run_id=run_id,
        setup=str(ticket.get("setup") or run_id),
        seed=int(record.config.get("seed", 0)),
        record=record,
        journal=journal,
        swept=ticket.get("swept") or {},
        axes=ticket.get("axes") or {},
    )


def of_folder(folder: Path) -> ComparedRun:
    """The run of a run folder; one without a record counts as killed. Raises Unreadable."""
    record, journal = read_run(folder)
    if record is not None and record.job:
        return of_record(record, str(folder), record.job, journal)
    ticket = _ticket(folder / JOB)
    if record is None:
        record = bare_record("killed", "there is no record", ticket.get("config", {}))
    return of_record(record, str(folder), ticket, journal)


def _ticket(path: Path) -> dict[str, Any]:
    """What `job.yaml` says of the run; empty where there is none. Raises Unreadable."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not path.exists():
        return {}
    try:
        found = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        assert isinstance(found, dict), "it names no keys"
        assert isinstance(found.get("config", {}), dict), "its config has no keys"
    except (OmegaConfBaseException, YAMLError, *MISREAD) as error:
        raise Unreadable(path, error) from error
    return {str(key): value for key, value in found.items()}


def folders_under(root: Path) -> list[Path]:
    """Every run folder at or below `root`, in the order of their jobs."""
    found = {path.parent for name in (JOB, RECORD) for path in root.rglob(name)}
    return sorted(found, key=_job_order)


def _job_order(folder: Path) -> tuple[str, int, str]:
    """Sweeps by name, that is by time; the jobs of one by number."""
    number = int(folder.name) if folder.name.isdigit() else -1
    return str(folder.parent), number, folder.name


def axes_in(folder: Path) -> dict[str, list[str]]:
    """The axes that a sweep's listing states; empty where it states none."""
    path = folder / "jobs.json"
    if not path.exists():
        return {}
    listing = json.loads(path.read_text(encoding="utf-8"))
    axes = listing.get("axes", {}) if isinstance(listing, dict) else {}
    return {str(key): [str(value) for value in values] for key, values in axes.items()}
