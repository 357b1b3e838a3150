"""Follows the journal of a run folder and forwards it to a tracking store.

The launching process does this in a thread of low priority, `runner.sync` afterwards for what
could not be sent. What a store offers is the protocol `Store`; which store it is, is not known
here. How far the forwarding came is kept in `tracking.json` of the run folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from runner.curves import Curves, Point
from runner.process import identity
from runner.records import JOURNAL, RunRecord, follow_journal, write_atomically

STATE = "tracking.json"
CALL_LIMIT = 1000
"""Metrics that one call takes."""
_FULL = CALL_LIMIT - 50
"""Points after which no further line is taken; one line gives fewer than 50."""
PACE_S = 1.0
SAVE_S = 10.0
BACKOFF_LIMIT_S = 30.0
NICENESS = 15


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What the store is told about a run when it starts.

    setup: swept keys with their values, then other differences from the defaults; never empty.
        Also the run's name.
    parent: run id of the sweep's parent run, or None.
    config: resolved, nested. global_batch, micro_batch: examples.
    emulated: whether times describe an emulation and are therefore not logged.
    """

    setup: str
    workload_id: str
    setup_id: str
    config: Mapping[str, Any]
    global_batch: int
    micro_batch: int
    emulated: bool = False
    sweep_id: str | None = None
    parent: str | None = None

    def __post_init__(self) -> None:
        if not self.setup:
            raise ValueError("setup: given ''; allowed: a description that is not empty")


@dataclass(frozen=True, kw_only=True)
class State:
    """How far the forwarding of a run folder came; `tracking.json`.

    key: name of this run that is known before the store has created it.
    offset: bytes of the journal whose points have all arrived.
    finished: whether the store has the final figures, artifacts and status.
    process: identity of the process that forwards, see runner.process.
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
    schema_version: int = 1

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
        """The state of a run folder, or None where nothing was forwarded."""
        path = folder / STATE
        if not path.exists():
            return None
        data = json.loads(path.read_text(encoding="utf-8"))
        del data["complete"]
        return cls(**{**data, "spec": RunSpec(**data["spec"])})


class Store(Protocol):
    """What forwarding needs of a store; every call may raise and may be repeated."""

    uri: str
    experiment: str

    def start_run(self, state: State) -> str:
        """The run id of `state.key`; the run is created unless it exists."""

    def log(self, run_id: str, points: Sequence[Point], tags: Mapping[str, str]) -> None:
        """Add points and set tags, in one call."""

    def finish(self, state: State, folder: Path, record: RunRecord | None) -> None:
        """Log final figures and artifacts, and end the run, whatever fails before that."""


class Forwarder:
    """Forwards one run folder, a call at a time; not thread-safe."""

    def __init__(self, store: Store, folder: Path, state: State) -> None:
        self._store = store
        self._folder = folder
        self._curves = Curves(start_ms=state.start_ms, emulated=state.spec.emulated)
        self._pending: list[Point] = []
        self._tags: dict[str, str] = {}
        self._read = 0
        self.state = state
        self._replay()

    def _replay(self) -> None:
        """Take the lines that have arrived already, so that thinning and times go on from there."""
        for line, offset in follow_journal(self._folder / JOURNAL, 0):
            if offset > self.state.offset:
                return
            self._curves.take(line)
            self._read = offset

    def advance(self) -> bool:
        """Create the run if need be and make one call; whether the journal's end was reached.

        Raises what the store raises; the same points are sent again by the next call then.
        """
        if self.state.run_id is None:
            self.state = replace(self.state, run_id=self._store.start_run(self.state))
        at_end = self._collect()
        self._send()
        return at_end

    def _collect(self) -> bool:
        for line, offset in follow_journal(self._folder / JOURNAL, self._read):
            if len(self._pending) > _FULL:
                return False
            self._pending += self._curves.take(line)
            self._read = offset
        return True

    def _send(self) -> None:
        tags = self._curves.tags()
        if self.state.run_id is None:
            raise RuntimeError("the run could not be created in the store")
        if self._pending or tags != self._tags:
            self._store.log(self.state.run_id, self._pending, tags)
            self._pending, self._tags = [], tags
        self.state = replace(self.state, offset=self._read)

    def finish(self, record: RunRecord | None) -> None:
        """Send the last update, if it was thinned out, and end the run even if that fails."""
        try:
            self._pending += self._curves.last()
            self._send()
        finally:
            if self.state.run_id is not None:
                self._store.finish(self.state, self._folder, record)
                self.state = replace(self.state, finished=True)

    def note(self, problem: BaseException | None) -> None:
        """Keep the last error, or that there is none, in the state."""
        text = None if problem is None else f"{type(problem).__name__}: {problem}"[:2000]
        self.state = replace(self.state, problem=text)


def lower_priority() -> None:
    """Give the calling thread the leftovers of the processor (Linux, where threads have one)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class Follower:
    """Forwards a run folder in a thread while its worker runs; raises nothing after it began.

    A store that is slow or gone is tried again, with pauses up to BACKOFF_LIMIT_S; what is still
    missing at the end is left to `runner.sync`, and `tracking.json` says so.
    """

    def __init__(self, store: Store, folder: Path, spec: RunSpec) -> None:
        state = State(spec=spec, uri=store.uri, experiment=store.experiment)
        self._forwarder = Forwarder(store, folder, state)
        self._folder = folder
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._record: RunRecord | None = None
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True, name="tracking")
        self._save()
        self._thread.start()

    @property
    def run_id(self) -> str | None:
        """Run id in the store; None until the store has created the run."""
        return self._forwarder.state.run_id

    @property
    def problem(self) -> str | None:
        """The error of the last attempt; None when it went well."""
        return self._forwarder.state.problem

    def close(self, timeout: float, record: RunRecord | None = None) -> bool:
        """Send the rest and end the run, within `timeout` seconds; whether everything arrived.

        `record` is `record.json` of the folder unless given; with neither, the run is KILLED.
        """
        self._record = record
        self._deadline = time.monotonic() + timeout
        self._closing.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._forwarder.note(TimeoutError(f"the store did not answer within {timeout:g} s"))
            self._save()
            return False
        return self._forwarder.state.complete

    def _run(self) -> None:
        lower_priority()
        saved_at = -SAVE_S
        delay = 0.0
        while not self._closing.wait(delay):
            delay = self._attempt(delay)
            if time.monotonic() - saved_at > SAVE_S:
                self._save()
                saved_at = time.monotonic()
        self._conclude()
        self._save()

    def _attempt(self, delay: float) -> float:
        """One call; the seconds to wait before the next one."""
        try:
            self._forwarder.advance()
        except Exception as error:
            self._forwarder.note(error)
            return min(max(2 * delay, PACE_S), BACKOFF_LIMIT_S)
        self._forwarder.note(None)
        return PACE_S

    def _conclude(self) -> None:
        """Drain and finish, again until it works or too little time is left; finish in any case."""
        pause = 0.1
        while not self._ended():
            if time.monotonic() + pause > self._deadline:
                with contextlib.suppress(Exception):
                    self._forwarder.finish(self._last_record())
                return
            time.sleep(pause)
            pause *= 2

    def _ended(self) -> bool:
        try:
            while not self._forwarder.advance():
                if time.monotonic() > self._deadline:
                    raise TimeoutError("closed before all points were sent")
            self._forwarder.finish(self._last_record())
        except Exception as error:
            self._forwarder.note(error)
            return False
        self._forwarder.note(None)
        return True

    def _last_record(self) -> RunRecord | None:
        return self._record or RunRecord.read(self._folder)

    def _save(self) -> None:
        with self._writing, contextlib.suppress(OSError):
            self._forwarder.state.write(self._folder)
