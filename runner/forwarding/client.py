"""The few calls that runs need of a tracking store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from runner.forwarding.curves import Point


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as the store knows it. artifacts: the address of what it left behind."""

    run_id: str
    name: str
    status: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    artifacts: str


class Client(Protocol):
    """The calls that a store offers; each may raise anything."""

    def experiment(self, name: str, location: str | None) -> tuple[str, str, bool]:
        """Id and artifact location of the experiment, and whether it had been deleted.

        It is created, with `location` for its artifacts, or restored where need be.
        """

    def prove_writable(self, experiment_id: str) -> None:
        """Write something that creates no run."""

    def search(self, experiment_id: str, condition: str) -> list[Run]:
        """Every run that meets the condition, newest first."""

    def create_run(
        self, experiment_id: str, *, start_ms: int, name: str, tags: Mapping[str, str]
    ) -> str:
        """Run id of a new run."""

    def run(self, run_id: str) -> Run:
        """One run."""

    def log(self, run_id: str, points: Sequence[Point], tags: Mapping[str, str]) -> None:
        """Add points and set tags, in one call."""

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Add parameters."""

    def delete_tag(self, run_id: str, key: str) -> None:
        """Remove a tag that is there."""

    def download(self, run: Run, folder: Path) -> None:
        """Fetch record and journal, where they are, into `folder`."""

    def upload(self, run_id: str, path: Path) -> None:
        """Put a file, or everything in a folder, at the top of the artifacts."""

    def end(self, run_id: str, status: str, ended_ms: int) -> None:
        """Set the final status."""
