"""What is forwarded and how far it came; `tracking.json` of a run folder."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.forwarding.process import identity
from runner.records import MISREAD, Unreadable, write_atomically

STATE = "tracking.json"
SCHEMA_VERSION = 1
"""1: first version."""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What the store is told about a run when it starts.

    setup: swept keys with their values, then other differences from the defaults; never empty.
        Also the run's name.
    parent: run id of the sweep's parent run, or None.
    config: resolved, nested, of plain containers and scalars. global_batch, micro_batch: examples.
    job_id: digest of everything that makes two jobs the same job, seed included.
    emulated: whether times describe an emulation and are therefore not logged.
    """

    setup: str
    workload_id: str
    setup_id: str
    config: Mapping[str, Any]
    global_batch: int
    micro_batch: int | None
    emulated: bool = False
    sweep_id: str | None = None
    parent: str | None = None
    job_id: str = ""

    def __post_init__(self) -> None:
        if not self.setup:
            raise ValueError("setup: given ''; allowed: a description that is not empty")


@dataclass(frozen=True, kw_only=True)
class State:
    """How far the forwarding of a run folder came; `tracking.json`.

    key: name of this run that is known before the store has created it.
    offset: bytes of the journal whose points have all arrived.
    finished: whether the store has the final figures, artifacts and status.
    process: identity of the process that forwards, see runner.forwarding.process.
    problem: the last error, in words.
    """

    spec: RunSpec
    uri: str
    experiment: str
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    start_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    run_id: str | None = None
    offset: int = 0
    finished: bool = False
    process: str = field(default_factory=identity)
    problem: str | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def complete(self) -> bool:
        """Whether everything arrived."""
        return self.finished and self.problem is None

    def write(self, folder: Path) -> None:
        """Write `tracking.json`, atomically."""
        content = {**asdict(self), "complete": self.complete}
        write_atomically(folder / STATE, json.dumps(content, indent=1, default=str))

    @classmethod
    def read(cls, folder: Path) -> State | None:
        """The state of a run folder, or None where nothing was forwarded.

        Raises Unreadable for a damaged one, and for a state of a later version.
        """
        path = folder / STATE
        if not path.exists():
            return None
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["schema_version"] <= SCHEMA_VERSION:
                del data["complete"]
                return cls(**{**data, "spec": RunSpec(**data["spec"])})
        except MISREAD as error:
            raise Unreadable(path, error) from error
        raise Unreadable(path, f"it is of a later version, {data['schema_version']}")
