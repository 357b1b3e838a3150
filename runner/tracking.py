"""Run folders in MLflow and back; the only module that knows MLflow.

Only `MlflowClient` is used, with the address handed in: an active run, MLFLOW_RUN_ID and
MLFLOW_TRACKING_URI of the surrounding process neither matter nor change. MLflow takes more than
a second to import, so it is imported when a store is opened.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from runner.contracts import Fault, UserError
from runner.curves import Point
from runner.follow import Follower, RunSpec, State
from runner.names import params_of, safe_name, safe_value, value_text
from runner.process import identity, is_gone
from runner.records import JOURNAL, RECORD, RunRecord
from runner.stores import probe, resolve_uri, sqlite_path, uri_fault, within

Result = TypeVar("Result")

TERMINAL = {"ok": "FINISHED", "killed": "KILLED"}
"""MLflow's status by ours; every other one is FAILED."""
QUALITY = {"ok": "unchecked", "diverged": "diverged"}
"""The quality of a run that no comparison has judged; `error` for every other status."""
CHECK_S = 10.0
FIRST_FILE_S = 120.0
"""Limit for a local file: creating its tables takes seconds, more on a busy machine."""
TAG_LIMIT = 5000
PARAMS_PER_CALL = 100
CHARACTERS_PER_CALL = 100_000


@dataclass(frozen=True, kw_only=True)
class Mlflow:
    """Tracking in an MLflow store (conf/tracking/mlflow.yaml).

    uri: address of the store; None is mlflow.db in the folder the command was started in.
    experiment: name of the experiment; created, or restored if it was deleted.
    """

    uri: str | None = None
    experiment: str = "runner"

    def __post_init__(self) -> None:
        if not self.experiment.strip():
            raise ValueError(f"experiment: given {self.experiment!r}; allowed: a name")

    def open(self, launch: Path) -> MlflowStore:
        """The store, without touching it. Raises UserError for an address that is refused."""
        return MlflowStore(uri=resolve_uri(self.uri, launch.resolve()), experiment=self.experiment)


@dataclass(frozen=True, kw_only=True)
class Off:
    """No tracking (conf/tracking/off.yaml): the same calls, and nothing happens."""

    def open(self, launch: Path) -> NoStore:
        """A store that takes everything and keeps nothing."""
        return NoStore()


class NoFollower:
    """Stands for a Follower when tracking is off."""

    run_id: str | None = None
    problem: str | None = None

    def close(self, timeout: float, record: RunRecord | None = None) -> bool:
        """True: nothing is left to send."""
        return True


class NoStore:
    """Stands for a store when tracking is off."""

    uri = ""
    experiment = ""

    def check(self) -> Sequence[str]:
        """Nothing to check, nothing to say."""
        return ()

    def follow(self, folder: Path, spec: RunSpec) -> NoFollower:
        """A follower that does nothing."""
        return NoFollower()

    def start_parent(self, *, sweep_id: str, name: str, tags: Mapping[str, str]) -> str | None:
        """None: there is no parent run."""
        return None

    def finish_parent(
        self,
        run_id: str | None,
        *,
        status: str,
        tags: Mapping[str, str] | None = None,
        artifacts: Sequence[Path] = (),
    ) -> bool:
        """True: nothing is left to do."""
        return True

    def tag(self, run_id: str | None, tags: Mapping[str, str]) -> None:
        """Keeps nothing."""

    def attach(self, run_id: str | None, paths: Sequence[Path]) -> None:
        """Keeps nothing."""


class MlflowStore:
    """One experiment of one MLflow store; safe to use from several threads."""

    def __init__(self, *, uri: str, experiment: str) -> None:
        self.uri = uri
        self.experiment = experiment
        self._found: tuple[Any, str] | None = None

    # --- at start ---

    def check(self) -> Sequence[str]:
        """Make sure, before any work, that runs can be written; what was done besides, in words.

        Creates the store and the experiment, restores a deleted experiment, and ends runs that
        a killed launcher of this host left RUNNING. Creates no run. Raises UserError, within
        about CHECK_S seconds for a server.
        """
        seconds = CHECK_S if sqlite_path(self.uri) is None else FIRST_FILE_S
        try:
            probe(self.uri, CHECK_S / 2)
            return within(seconds, self._prepare)
        except UserError:
            raise
        except Exception as error:
            step = "check the address, start the server, or type tracking=off"
            raise uri_fault(self.uri, str(error).partition("\n")[0], step) from error

    def _prepare(self) -> Sequence[str]:
        client, experiment_id, notes = self._connect()
        client.set_experiment_tag(experiment_id, "written_by", "fullstep")
        self._found = (client, experiment_id)
        return [*notes, *self._end_stale(client, experiment_id)]

    def _connect(self) -> tuple[Any, str, list[str]]:
        """A client and the id of the experiment, created or restored where need be."""
        client = _client(self.uri)
        found = client.get_experiment_by_name(self.experiment)
        if found is None:
            return client, self._create(client), []
        self._refuse_artifacts(found.artifact_location)
        if found.lifecycle_stage == "active":
            return client, found.experiment_id, []
        client.restore_experiment(found.experiment_id)
        return client, found.experiment_id, [f"restored the deleted experiment {self.experiment}"]

    def _create(self, client: Any) -> str:
        path = sqlite_path(self.uri)
        folder = None
        if path is not None:
            folder = (path.parent / "mlartifacts" / safe_name(self.experiment)).as_uri()
        try:
            return str(client.create_experiment(self.experiment, artifact_location=folder))
        except Exception:
            # Another launcher may have created it in between.
            found = client.get_experiment_by_name(self.experiment)
            if found is None:
                raise
            return str(found.experiment_id)

    def _refuse_artifacts(self, location: str) -> None:
        if location.startswith("mlflow-artifacts:") and not self.uri.startswith("http"):
            raise UserError(
                Fault(
                    key="tracking.experiment",
                    given=f"{self.experiment} (its artifacts are kept by a server: {location})",
                    allowed="an experiment whose artifacts this store can write",
                    next_step="type tracking.uri=http://HOST:PORT, or another experiment",
                )
            )

    def _end_stale(self, client: Any, experiment_id: str) -> list[str]:
        """Set to KILLED what a launcher of this host left RUNNING when it was killed."""
        notes = []
        for run in _search(client, experiment_id, "attributes.status = 'RUNNING'"):
            tags = run.data.tags
            if tags.get("host") != socket.gethostname() or not is_gone(tags.get("process", "")):
                continue
            client.set_tag(run.info.run_id, "status", "killed")
            client.set_tag(run.info.run_id, "ended_by", "a later start: its launcher was gone")
            client.set_terminated(run.info.run_id, "KILLED")
            notes.append(f"ended the stale run {run.info.run_name} ({run.info.run_id})")
        return notes

    # --- runs ---

    def follow(self, folder: Path, spec: RunSpec) -> Follower:
        """Start to forward a run folder, in a thread."""
        return Follower(self, folder, spec)

    def start_run(self, state: State) -> str:
        """The run id of `state.key`; the run is created unless it exists."""
        spec = state.spec

        def start(client: Any, experiment_id: str) -> str:
            found = _search(client, experiment_id, f"tags.run_key = '{state.key}'")
            if not found:
                tags = {"run_key": state.key, **_tags_of(spec), **_process_tags()}
                found = [_create_run(client, experiment_id, state.start_ms, tags, spec.setup)]
            run_id = str(found[0].info.run_id)
            batches = {"global_batch": spec.global_batch, "micro_batch": spec.micro_batch}
            _log_params(client, run_id, params_of(spec.config, batches))
            return run_id

        return self._call(start)

    def log(self, run_id: str, points: Sequence[Point], tags: Mapping[str, str]) -> None:
        """Add points and set tags, in one call."""
        self._call(lambda client, _: _log(client, run_id, points, tags))

    def finish(self, state: State, folder: Path, record: RunRecord | None) -> None:
        """Log final figures, tags and artifacts, and end the run whatever fails before that.

        Without a record the run is KILLED. May be repeated.
        """
        run_id = state.run_id
        assert run_id is not None
        status = "killed" if record is None else record.status
        try:
            if record is not None:
                self._call(lambda client, _: _log_record(client, state, record))
            self._call(lambda client, _: _log_status(client, run_id, status))
            self._call(lambda client, _: _log_artifacts(client, run_id, folder))
        finally:
            ended = TERMINAL.get(status, "FAILED")
            when = _ended_ms(folder)
            self._call(lambda client, _: client.set_terminated(run_id, ended, when))

    def start_parent(self, *, sweep_id: str, name: str, tags: Mapping[str, str]) -> str | None:
        """Run id of a new parent run of a sweep."""
        now = time.time_ns() // 1_000_000
        all_tags = {"status": "running", "sweep_id": sweep_id, "sweep_parent": "true"}
        all_tags |= {**_process_tags(), **tags}
        run = self._call(lambda client, where: _create_run(client, where, now, all_tags, name))
        return str(run.info.run_id)

    def finish_parent(
        self,
        run_id: str | None,
        *,
        status: str,
        tags: Mapping[str, str] | None = None,
        artifacts: Sequence[Path] = (),
    ) -> bool:
        """Attach files and tags to a sweep's parent and end it; whether all of it worked.

        Raises nothing: the jobs' results do not depend on it.
        """
        assert run_id is not None
        done = True
        for work in (
            lambda: self.attach(run_id, artifacts),
            lambda: self.tag(run_id, {"status": status, **(tags or {})}),
            lambda: self._call(
                lambda client, _: client.set_terminated(run_id, TERMINAL.get(status, "FAILED"))
            ),
        ):
            try:
                work()
            except Exception:
                done = False
        return done

    def tag(self, run_id: str | None, tags: Mapping[str, str]) -> None:
        """Set tags of a run, for example its quality after a comparison."""
        self._call(lambda client, _: _log(client, run_id, (), tags))

    def attach(self, run_id: str | None, paths: Sequence[Path]) -> None:
        """Upload files, or folders with what is in them, to the artifacts of a run."""
        self._call(lambda client, _: _upload(client, run_id, paths))

    def _call(self, work: Callable[[Any, str], Result]) -> Result:
        """Run `work(client, experiment_id)`; a database that is locked is tried again."""
        for pause in (0.1, 0.3, 1.0, 3.0):
            probe(self.uri, 2.0)
            try:
                return work(*self._opened())
            except Exception as error:
                if not _is_locked(error):
                    raise
            time.sleep(pause * (0.5 + random.random()))
        return work(*self._opened())

    def _opened(self) -> tuple[Any, str]:
        if self._found is None:
            client, experiment_id, _ = self._connect()
            self._found = (client, experiment_id)
        return self._found


# --- calls on a client ------------------------------------------------------------------------


def _client(uri: str) -> Any:
    from mlflow.tracking.client import MlflowClient

    # MLflow prints tracebacks of errors that it also raises, and the steps of creating tables.
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _is_locked(error: Exception) -> bool:
    text = str(error)
    return "database is locked" in text or "database table is locked" in text


def _search(client: Any, experiment_id: str, condition: str) -> list[Any]:
    """Every run of the experiment that meets the condition, newest first."""
    runs: list[Any] = []
    token = None
    while True:
        page = client.search_runs([experiment_id], condition, max_results=1000, page_token=token)
        runs += page
        token = page.token
        if not token:
            return runs


def _tags_of(spec: RunSpec) -> dict[str, str]:
    tags = {
        "status": "running",
        "setup": spec.setup,
        "workload_id": spec.workload_id,
        "setup_id": spec.setup_id,
        "emulated": str(spec.emulated).lower(),
    }
    if spec.sweep_id is not None:
        tags["sweep_id"] = spec.sweep_id
    if spec.parent is not None:
        tags["mlflow.parentRunId"] = spec.parent
    return tags


def _process_tags() -> dict[str, str]:
    """Who is responsible for ending the run, so that a later start can tell that it is gone."""
    return {
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "process": identity(),
        "mlflow.source.name": "runner",
    }


def _create_run(
    client: Any, experiment_id: str, start_ms: int, tags: Mapping[str, str], name: str
) -> Any:
    cut = {key: safe_value(text, TAG_LIMIT) for key, text in tags.items()}
    return client.create_run(
        experiment_id, start_time=start_ms, tags=cut, run_name=safe_value(name, 250)
    )


def _log(client: Any, run_id: Any, points: Sequence[Point], tags: Mapping[str, str]) -> None:
    from mlflow.entities import Metric, RunTag

    metrics = [Metric(safe_name(p.name), p.value, p.timestamp, p.step) for p in points]
    cut = [RunTag(key, safe_value(text, TAG_LIMIT)) for key, text in tags.items()]
    client.log_batch(run_id, metrics=metrics, tags=cut)


def _log_params(client: Any, run_id: str, params: Mapping[str, str]) -> None:
    """Log parameters. The store never changes one: another value goes to a tag instead."""
    from mlflow.entities import Param

    known = client.get_run(run_id).data.params
    changed = {f"changed.{k}": v for k, v in params.items() if known.get(k, v) != v}
    batch: list[Any] = []
    for key, text in params.items():
        if key in known:
            continue
        full = sum(len(p.value) for p in batch) + len(text) > CHARACTERS_PER_CALL
        if batch and (full or len(batch) == PARAMS_PER_CALL):
            client.log_batch(run_id, params=batch)
            batch = []
        batch.append(Param(key, text))
    if batch:
        client.log_batch(run_id, params=batch)
    if changed:
        _log(client, run_id, (), {key[:250]: text for key, text in changed.items()})


def _log_record(client: Any, state: State, record: RunRecord) -> None:
    """Final figures of a record; emulated runs have none that came from a clock."""
    assert state.run_id is not None
    points = [
        Point(name=f"summary/{name}", value=float(value), step=0, timestamp=state.start_ms)
        for name, value in record.summary.items()
        if not (state.spec.emulated and is_timed(name))
    ]
    tags = {}
    largest = record.memory.get("largest_live_object")
    if largest is not None:
        tags["largest_live_object"] = value_text(largest)
    _log(client, state.run_id, points, tags)


def is_timed(name: str) -> bool:
    """Whether a figure of a summary was measured with a clock."""
    return "step_s" in name or name.endswith("_per_s") or "mfu" in name


def _log_status(client: Any, run_id: str, status: str) -> None:
    tags = {"status": status}
    if "quality" not in client.get_run(run_id).data.tags:
        tags["quality"] = QUALITY.get(status, "error")
    _log(client, run_id, (), tags)


def _log_artifacts(client: Any, run_id: str, folder: Path) -> None:
    for name in (RECORD, JOURNAL, "config.yaml"):
        if (folder / name).exists():
            client.log_artifact(run_id, str(folder / name))
    extra = folder / "artifacts"
    if extra.is_dir() and any(extra.iterdir()):
        client.log_artifacts(run_id, str(extra))


def _upload(client: Any, run_id: Any, paths: Sequence[Path]) -> None:
    for path in paths:
        if path.is_dir():
            client.log_artifacts(run_id, str(path), artifact_path=path.name)
        else:
            client.log_artifact(run_id, str(path))


def _ended_ms(folder: Path) -> int:
    """When the run ended: when its record was written, else now."""
    record = folder / RECORD
    return int(record.stat().st_mtime * 1000) if record.exists() else time.time_ns() // 1_000_000
