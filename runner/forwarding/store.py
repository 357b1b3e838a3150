"""Runs in one experiment of a tracking store: their start, their curves and their end."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from runner.contracts import Fault, UserError
from runner.forwarding.address import alone_in, probe, probe_server, sqlite_path, uri_fault, within
from runner.forwarding.client import Client
from runner.forwarding.curves import Point
from runner.forwarding.follower import Follower
from runner.forwarding.names import params_of, safe_name
from runner.forwarding.runs import (
    add_params,
    end_stale,
    ended_ms,
    log_record,
    log_status,
    now_ms,
    process_tags,
    tags_of,
    upload_all,
)
from runner.forwarding.state import RunSpec, State
from runner.records import RunRecord

Result = TypeVar("Result")

TERMINAL = {"ok": "FINISHED", "killed": "KILLED"}
"""The store's status by ours; every other one is FAILED."""
CHECK_S = 10.0
FIRST_FILE_S = 120.0
"""Limit for a local file: creating its tables takes seconds, and many on a busy machine."""
CONNECT_S = 2.0
PAUSES_S = (0.1, 0.3, 1.0, 3.0)
"""Before each repetition of a call that met a locked database."""


class Store:
    """One experiment of a store; safe to use from several threads.

    uri: resolved address. connect: makes the client.
    """

    def __init__(self, *, uri: str, experiment: str, connect: Callable[[str], Client]) -> None:
        self.uri = uri
        self.experiment = experiment
        self._connect = connect
        self._found: tuple[Client, str] | None = None

    # --- at start ---

    def check(self) -> Sequence[str]:
        """Make sure, before any work, that runs can be written; what was done besides, in words.

        Creates the store and the experiment, restores a deleted experiment, and ends runs that
        a killed launcher of this host left RUNNING. Creates no run. Raises UserError; for a
        server within about CHECK_S seconds.
        """
        local = sqlite_path(self.uri) is not None
        try:
            within(CHECK_S, lambda: probe(self.uri, CHECK_S / 2))
            return within(FIRST_FILE_S if local else CHECK_S, self._prepare)
        except UserError:
            raise
        except Exception as error:
            step = "check the address and its permissions, or type tracking=off"
            problem = str(error).partition("\n")[0] or type(error).__name__
            raise uri_fault(self.uri, problem, step) from error

    def _prepare(self) -> Sequence[str]:
        client, experiment_id, restored = self._open()
        client.prove_writable(experiment_id)
        notes = [f"restored the deleted experiment {self.experiment}"] if restored else []
        return [*notes, *end_stale(client, experiment_id)]

    def _open(self) -> tuple[Client, str, bool]:
        path = sqlite_path(self.uri)
        folder = None
        if path is None:
            client = self._connect(self.uri)
        else:
            with alone_in(path.parent):
                client = self._connect(self.uri)
            # MLflow's own default would be a folder under wherever this process happens to be.
            folder = (path.parent / "mlartifacts" / safe_name(self.experiment)).as_uri()
        experiment_id, location, restored = client.experiment(self.experiment, folder)
        self._refuse_artifacts(location)
        self._found = (client, experiment_id)
        return client, experiment_id, restored

    def _refuse_artifacts(self, location: str) -> None:
        if location.startswith("mlflow-artifacts:") and not self.uri.startswith("http"):
            raise UserError(
                Fault(
                    key="tracking.experiment",
                    given=f"{self.experiment} (its artifacts are kept by a server: {location})",
                    allowed="an experiment whose artifacts can be written without a server",
                    next_step="type tracking.uri=http://HOST:PORT, or another experiment",
                )
            )

    # --- runs of jobs ---

    def follow(self, folder: Path, spec: RunSpec) -> Follower:
        """Start to forward a run folder, in a thread; the run is created there."""
        return Follower(self, folder, spec)

    def start_run(self, state: State) -> str:
        """The run id of `state.key`; the run is created unless it exists."""
        spec = state.spec
        sizes = {"global_batch": spec.global_batch, "micro_batch": spec.micro_batch}
        batches = {name: size for name, size in sizes.items() if size is not None}
        tags = {"run_key": state.key, **tags_of(spec), **process_tags()}

        def start(client: Client, experiment_id: str) -> str:
            found = client.search(experiment_id, f"tags.run_key = '{state.key}'")
            if found:
                run_id = found[0].run_id
            else:
                run_id = client.create_run(
                    experiment_id, start_ms=state.start_ms, name=spec.setup, tags=tags
                )
            add_params(client, run_id, params_of(spec.config, batches))
            return run_id

        return self._call(start)

    def log(self, run_id: str, points: Sequence[Point], tags: Mapping[str, str]) -> None:
        """Add points and set tags, in one call."""
        self._call(lambda client, _: client.log(run_id, points, tags))

    def finish(self, state: State, folder: Path) -> None:
        """Log final figures, tags and artifacts, and end the run whatever fails before that.

        The status is that of `record.json`; without one the run is KILLED. May be repeated.
        """
        run_id = state.run_id
        assert run_id is not None
        status = "killed"
        try:
            record = RunRecord.read(folder)
            if record is not None:
                status = record.status
                self._call(lambda client, _: log_record(client, state, record))
            self._call(lambda client, _: log_status(client, run_id, status))
            self._call(lambda client, _: upload_all(client, run_id, folder))
        finally:
            ended = TERMINAL.get(status, "FAILED")
            self._call(lambda client, _: client.end(run_id, ended, ended_ms(folder)))

    def take_finished(self, job_id: str, folder: Path) -> str | None:
        """Fetch record and journal of the newest run of this job that ended ok into `folder`.

        Returns its run id, or None where there is none.
        """
        condition = f"tags.job_id = '{job_id}' and attributes.status = 'FINISHED'"

        def take(client: Client, experiment_id: str) -> str | None:
            for run in client.search(experiment_id, condition):
                client.download(run, folder)
                if RunRecord.read(folder) is not None:
                    return run.run_id
            return None

        return self._call(take)

    def tag(self, run_id: str | None, tags: Mapping[str, str]) -> bool:
        """Set tags of a run, for example its quality after a comparison; whether that worked."""
        return self._tried(run_id, lambda client, known: client.log(known, (), tags))

    def attach(self, run_id: str | None, paths: Sequence[Path]) -> bool:
        """Upload files, or what is in folders, to the artifacts of a run; whether that worked."""

        def upload(client: Client, known: str) -> None:
            for path in paths:
                client.upload(known, path)

        return self._tried(run_id, upload)

    # --- runs of sweeps ---

    def start_parent(self, *, sweep_id: str, name: str, tags: Mapping[str, str]) -> str | None:
        """Run id of a new parent run of a sweep."""
        marks = {"status": "running", "sweep_id": sweep_id, "sweep_parent": "true"}
        return self._call(
            lambda client, experiment_id: client.create_run(
                experiment_id,
                start_ms=now_ms(),
                name=name,
                tags={**marks, **process_tags(), **tags},
            )
        )

    def finish_parent(
        self,
        run_id: str | None,
        *,
        status: str,
        tags: Mapping[str, str] | None = None,
        artifacts: Sequence[Path] = (),
    ) -> bool:
        """Attach files and tags to a sweep's parent and end it; whether all of it worked.

        Raises nothing: the results of the jobs do not depend on it.
        """
        ended = TERMINAL.get(status, "FAILED")
        done = [
            self.attach(run_id, artifacts),
            self.tag(run_id, {"status": status, **(tags or {})}),
            self._tried(run_id, lambda client, known: client.end(known, ended, now_ms())),
        ]
        return all(done)

    # --- calls ---

    def _tried(self, run_id: str | None, work: Callable[[Client, str], None]) -> bool:
        if run_id is None:
            return False
        try:
            self._call(lambda client, _: work(client, run_id))
        except Exception:
            return False
        return True

    def _call(self, work: Callable[[Client, str], Result]) -> Result:
        """`work(client, experiment_id)`, tried again while another launcher locks the database."""
        probe_server(self.uri, CONNECT_S)
        for pause in PAUSES_S:
            try:
                return work(*self._opened())
            except Exception as error:
                if "is locked" not in str(error):
                    raise
            time.sleep(pause * (0.5 + random.random()))
        return work(*self._opened())

    def _opened(self) -> tuple[Client, str]:
        if self._found is None:
            client, experiment_id, _ = self._open()
            return client, experiment_id
        return self._found
