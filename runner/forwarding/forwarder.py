"""Forwards the journal of one run folder to a store, a call at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from runner.forwarding.curves import Curves, Point
from runner.forwarding.state import State
from runner.records import JOURNAL, follow_journal

CALL_LIMIT = 1000
"""Metrics that one call takes."""
_FULL = CALL_LIMIT - 50
"""Points after which no further line is taken; one line gives fewer than 50."""


class Sink(Protocol):
    """What forwarding needs of a store; every call may raise and may be repeated."""

    uri: str
    experiment: str

    def start_run(self, state: State) -> str:
        """The run id of `state.key`; the run is created unless it exists."""

    def log(self, run_id: str, points: Sequence[Point], tags: Mapping[str, str]) -> None:
        """Add points and set tags, in one call."""

    def finish(self, state: State, folder: Path) -> None:
        """Log final figures and artifacts, and end the run, whatever fails before that."""


class Forwarder:
    """Forwards one run folder, a call at a time; not thread-safe."""

    def __init__(self, store: Sink, folder: Path, state: State) -> None:
        self._store = store
        self._folder = folder
        self._curves = Curves(start_ms=state.start_ms, emulated=state.spec.emulated)
        self._pending: list[Point] = []
        self._tags: dict[str, str] = {}
        self._read = 0
        self.state = state
        if state.offset:
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

    def finish(self) -> None:
        """Send the last update, if it was thinned out, and end the run even if that fails."""
        try:
            self._pending += self._curves.last()
            self._send()
        finally:
            if self.state.run_id is not None:
                self._store.finish(self.state, self._folder)
                self.state = replace(self.state, finished=True)

    def note(self, problem: BaseException | None) -> None:
        """Keep the last error, or that there is none, in the state."""
        text = None if problem is None else f"{type(problem).__name__}: {problem}"[:2000]
        self.state = replace(self.state, problem=text)
