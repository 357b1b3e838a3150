"""What a run says in a tracking store at its start and at its end."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from runner.forwarding.client import Client
from runner.forwarding.curves import Point
from runner.forwarding.names import params_of, shortened, value_text
from runner.forwarding.process import identity, is_gone
from runner.forwarding.state import RunSpec, State
from runner.records import JOURNAL, RECORD, RunRecord

QUALITY = {"ok": "unchecked", "diverged": "diverged"}
"""Quality of a run that no comparison has judged; `error` for every other status."""
NAME_LIMIT = 250


def now_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def ended_ms(folder: Path) -> int:
    """When the run ended: when its record was written, else now."""
    record = folder / RECORD
    return int(record.stat().st_mtime * 1000) if record.exists() else now_ms()


def end_stale(client: Client, experiment_id: str) -> list[str]:
    """Set to KILLED what a launcher of this host left RUNNING when it was killed."""
    notes = []
    for run in client.search(experiment_id, "attributes.status = 'RUNNING'"):
        here = run.tags.get("host") == socket.gethostname()
        if not here or not is_gone(run.tags.get("process", "")):
            continue
        client.log(run.run_id, (), {"status": "killed", "ended_by": "a later start"})
        client.end(run.run_id, "KILLED", now_ms())
        notes.append(f"ended the run {run.name} ({run.run_id}), whose launcher was killed")
    return notes


def tags_of(spec: RunSpec) -> dict[str, str]:
    """Tags of a run that starts."""
    tags = {
        "status": "running",
        "setup": spec.setup,
        "workload_id": spec.workload_id,
        "setup_id": spec.setup_id,
        "emulated": str(spec.emulated).lower(),
        "job_id": spec.job_id,
    }
    if spec.sweep_id is not None:
        tags["sweep_id"] = spec.sweep_id
    if spec.parent is not None:
        tags["mlflow.parentRunId"] = spec.parent
    return tags


def process_tags() -> dict[str, str]:
    """Who is responsible for ending the run, so that a later start can tell when it is gone."""
    return {"host": socket.gethostname(), "pid": str(os.getpid()), "process": identity()}


def add_params(client: Client, run_id: str, params: Mapping[str, str]) -> None:
    """Log parameters. A store never changes one: another value goes to a tag `changed.KEY`."""
    known = client.run(run_id).params
    client.log_params(run_id, {key: text for key, text in params.items() if key not in known})
    changed = {
        shortened(f"changed.{key}", NAME_LIMIT): text
        for key, text in params.items()
        if known.get(key, text) != text
    }
    if changed:
        client.log(run_id, (), changed)


def is_timed(name: str) -> bool:
    """Whether a figure of a summary comes from a clock: seconds, rates and utilisation."""
    return re.search(r"_s(_|$)|[mh]fu", name) is not None


def log_record(client: Client, state: State, record: RunRecord) -> None:
    """Figures, parameters and tags of a record; emulated runs log nothing from a clock."""
    assert state.run_id is not None
    points = [
        Point(name=f"summary/{name}", value=float(value), step=0, timestamp=state.start_ms)
        for name, value in record.summary.items()
        if not (state.spec.emulated and is_timed(name))
    ]
    largest = record.memory.get("largest_live_object")
    tags = {} if largest is None else {"largest_live_object": value_text(largest)}
    add_params(client, state.run_id, params_of(record.config, {}))
    client.log(state.run_id, points, tags)


def log_status(client: Client, run_id: str, status: str) -> None:
    """Tags `status` and, unless a comparison has set it already, `quality`."""
    tags = client.run(run_id).tags
    if "ended_by" in tags:
        client.delete_tag(run_id, "ended_by")
    quality = tags.get("quality", QUALITY.get(status, "error"))
    client.log(run_id, (), {"status": status, "quality": quality})


def upload_all(client: Client, run_id: str, folder: Path) -> None:
    """Upload record, journal, configuration and whatever the run put into `artifacts`."""
    for path in (folder / RECORD, folder / JOURNAL, folder / "config.yaml", folder / "artifacts"):
        if path.exists():
            client.upload(run_id, path)
