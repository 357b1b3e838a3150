"""Runs in MLflow and back; the only module that knows MLflow.

Only `MlflowClient` is used, with the address handed in: an active run, MLFLOW_RUN_ID and
MLFLOW_TRACKING_URI of the surrounding process neither matter nor change. MLflow takes more than
a second to import, so that waits until a store is used.
"""

from __future__ import annotations

import io
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from runner.forwarding.address import resolve_uri
from runner.forwarding.client import Run
from runner.forwarding.curves import Point
from runner.forwarding.names import safe_name, safe_value, shortened
from runner.forwarding.store import Store
from runner.forwarding.untracked import NoStore
from runner.records import JOURNAL, RECORD

TAG_LIMIT = 5000
NAME_LIMIT = 250
CHARACTERS_PER_CALL = 100_000
"""A server takes a request of 1 MB; a character can become six bytes of it. (MLflow's client
minds the limits on numbers of parameters and tags itself.)"""


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

    def open(self, launch: Path) -> Store:
        """The store, not yet touched. Raises UserError for an address that is refused.

        launch: the folder that relative sqlite addresses count from.
        """
        uri = resolve_uri(self.uri, launch.absolute())
        return Store(uri=uri, experiment=self.experiment, connect=MlflowCalls)


@dataclass(frozen=True, kw_only=True)
class Off:
    """No tracking (conf/tracking/off.yaml): the same calls, and nothing happens."""

    def open(self, launch: Path) -> NoStore:
        """A store that takes everything and keeps nothing."""
        return NoStore()


def _run_of(found: Any) -> Run:
    return Run(
        run_id=found.info.run_id,
        name=found.info.run_name or "",
        status=found.info.status,
        tags=found.data.tags,
        params=found.data.params,
        artifacts=found.info.artifact_uri,
    )


class MlflowCalls:
    """The calls of `runner.forwarding.store.Client` on an MLflow store, and those to read back."""

    def __init__(self, uri: str) -> None:
        from mlflow.tracking.client import MlflowClient

        # MLflow prints tracebacks of errors that it also raises, and each step of new tables.
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._client: Any = MlflowClient(tracking_uri=uri, registry_uri=uri)

    def experiment(self, name: str, location: str | None) -> tuple[str, str, bool]:
        """Id, artifact location, and whether it was restored; created where need be."""
        calls = self._client
        found = calls.get_experiment_by_name(name)
        if found is None:
            self._unless_done(name, lambda: calls.create_experiment(name, location))
        elif found.lifecycle_stage != "active":
            self._unless_done(name, lambda: calls.restore_experiment(found.experiment_id))
        now = calls.get_experiment_by_name(name)
        restored = found is not None and found.lifecycle_stage != "active"
        return now.experiment_id, now.artifact_location, restored

    def _unless_done(self, name: str, work: Callable[[], object]) -> None:
        """Do `work`; its failure is none if another launcher did the same in between."""
        try:
            work()
        except Exception:
            found = self._client.get_experiment_by_name(name)
            if found is None or found.lifecycle_stage != "active":
                raise

    def find_experiment(self, name: str) -> str | None:
        """Id of an experiment that is there and not deleted."""
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found and found.lifecycle_stage == "active" else None

    def prove_writable(self, experiment_id: str) -> None:
        """Set a tag of the experiment."""
        self._client.set_experiment_tag(experiment_id, "written_by", "fullstep")

    def search(self, experiment_id: str, condition: str) -> list[Run]:
        """Every run that meets the condition, newest first."""
        return [_run_of(found) for found in self._pages(experiment_id, condition)]

    def _pages(self, experiment_id: str, condition: str) -> Iterator[Any]:
        token = None
        while True:
            page = self._client.search_runs(
                [experiment_id], condition, max_results=1000, page_token=token
            )
            yield from page
            token = page.token
            if not token:
                return

    def create_run(
        self, experiment_id: str, *, start_ms: int, name: str, tags: Mapping[str, str]
    ) -> str:
        """Run id of a new run."""
        cut = {key: safe_value(text, TAG_LIMIT) for key, text in tags.items()}
        run = self._client.create_run(
            experiment_id,
            start_time=start_ms,
            tags={"mlflow.source.name": "runner", **cut},
            run_name=shortened(name, NAME_LIMIT),
        )
        return str(run.info.run_id)

    def run(self, run_id: str) -> Run:
        """One run."""
        return _run_of(self._client.get_run(run_id))

    def log(self, run_id: str, points: Sequence[Point], tags: Mapping[str, str]) -> None:
        """Add points and set tags, in one call."""
        from mlflow.entities import Metric, RunTag

        metrics = [Metric(safe_name(p.name), p.value, p.timestamp, p.step) for p in points]
        cut = [RunTag(key, safe_value(text, TAG_LIMIT)) for key, text in tags.items()]
        self._client.log_batch(run_id, metrics=metrics, tags=cut)

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Add parameters, in as many calls as it takes."""
        from mlflow.entities import Param

        for batch in batches_of(params):
            self._client.log_batch(run_id, params=[Param(key, text) for key, text in batch])

    def delete_tag(self, run_id: str, key: str) -> None:
        """Remove a tag that is there."""
        self._client.delete_tag(run_id, key)

    def upload(self, run_id: str, path: Path) -> None:
        """Put a file, or everything in a folder, at the top of the artifacts."""
        if not path.is_dir():
            self._client.log_artifact(run_id, str(path))
        elif any(path.iterdir()):
            self._client.log_artifacts(run_id, str(path))

    def end(self, run_id: str, status: str, ended_ms: int) -> None:
        """Set the final status."""
        self._client.set_terminated(run_id, status, ended_ms)

    def download(self, run: Run, folder: Path) -> None:
        """Fetch record and journal, where they are, into `folder`.

        Files of this machine are copied: MLflow's own download starts a thread pool for each.
        """
        here = _local_folder(run.artifacts)
        if here is not None:
            for path in (here / RECORD, here / JOURNAL):
                if path.exists():
                    shutil.copyfile(path, folder / path.name)
            return
        present = {artifact.path for artifact in self._client.list_artifacts(run.run_id)}
        with redirect_stderr(io.StringIO()):  # it draws a progress bar for each file
            for name in {RECORD, JOURNAL} & present:
                self._client.download_artifacts(run.run_id, name, str(folder))

    def history(self, run_id: str, name: str) -> dict[int, float]:
        """The value of a metric at each step; where a step has several, the latest."""
        found = self._client.get_metric_history(run_id, safe_name(name))
        return {m.step: m.value for m in sorted(found, key=lambda m: (m.step, m.timestamp))}


def _local_folder(uri: str) -> Path | None:
    """The folder that an artifact address names on this machine, or None for any other."""
    parts = urlsplit(uri)
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
        return None
    return Path(url2pathname(parts.path) if parts.scheme else uri)


def batches_of(params: Mapping[str, str]) -> Iterator[list[tuple[str, str]]]:
    """The parameters, in order, in batches that a server takes."""
    batch: list[tuple[str, str]] = []
    size = 0
    for key, text in params.items():
        if batch and size + len(key) + len(text) > CHARACTERS_PER_CALL:
            yield batch
            batch, size = [], 0
        batch.append((key, text))
        size += len(key) + len(text)
    if batch:
        yield batch
