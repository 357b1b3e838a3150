"""What stands for a store and its followers when tracking is off: the same calls, no effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from runner.forwarding.state import RunSpec


class NoFollower:
    """Stands for a Follower."""

    run_id: str | None = None
    problem: str | None = None

    def close(self, timeout: float) -> bool:
        """True: nothing is left to send."""
        return True


class NoStore:
    """Stands for a Store; every call has succeeded, and there is no run."""

    def check(self) -> Sequence[str]:
        """Nothing to check, nothing to say."""
        return ()

    def take_finished(self, job_id: str, folder: Path) -> str | None:
        """None: nothing was kept."""
        return None

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

    def tag(self, run_id: str | None, tags: Mapping[str, str]) -> bool:
        """True: nothing is left to do."""
        return True

    def attach(self, run_id: str | None, paths: Sequence[Path]) -> bool:
        """True: nothing is left to do."""
        return True
