"""The thread that forwards a run folder while its worker runs."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from runner.forwarding.forwarder import Forwarder, Sink
from runner.forwarding.state import RunSpec, State

PACE_S = 1.0
"""Least seconds between two calls."""
SHARE = 0.005
"""Of one processor, what calls may take, up to pauses of PAUSE_S: calls that take a little over
0.01 of one lengthen a job's steps by half of that (`scripts/benchmark.py`, two processors)."""
PAUSE_S = 5.0
SAVE_S = 10.0
"""Seconds between two writings of the state; what is sent twice after a kill changes nothing."""
BACKOFF_LIMIT_S = 30.0
NICENESS = 15


def lower_priority() -> None:
    """Give the calling thread the leftovers of the processor (Linux, where threads have one)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def pause_after(cpu_s: float) -> float:
    """Seconds to wait after a call that took so much processor time."""
    return min(max(PACE_S, cpu_s / SHARE), PAUSE_S)


class Follower:
    """Forwards a run folder in a thread while its worker runs; raises nothing after it began.

    A store that is slow or gone is tried again, with pauses up to BACKOFF_LIMIT_S; what is still
    missing at the end is left to `runner.sync`, and `tracking.json` says so.
    """

    def __init__(self, store: Sink, folder: Path, spec: RunSpec) -> None:
        state = State(spec=spec, uri=store.uri, experiment=store.experiment)
        self._forwarder = Forwarder(store, folder, state)
        self._folder = folder
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True, name="tracking")
        self._save(state)
        self._thread.start()

    @property
    def run_id(self) -> str | None:
        """Run id in the store; None until the store has created the run."""
        return self._forwarder.state.run_id

    @property
    def problem(self) -> str | None:
        """The error of the last attempt; None when it went well."""
        return self._forwarder.state.problem

    def close(self, timeout: float) -> bool:
        """Send the rest and end the run, within `timeout` seconds; whether everything arrived.

        The run's status is that of `record.json`; without one it is KILLED.
        """
        self._deadline = time.monotonic() + timeout
        self._closing.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            problem = f"TimeoutError: the store did not answer within {timeout:g} s"
            self._save(replace(self._forwarder.state, problem=problem))
            return False
        return self._forwarder.state.complete

    def _run(self) -> None:
        lower_priority()
        saved_at = -SAVE_S
        delay = 0.0
        while not self._closing.wait(delay):
            delay = self._attempt(delay)
            if time.monotonic() - saved_at > SAVE_S:
                self._save(self._forwarder.state)
                saved_at = time.monotonic()
        self._conclude()
        self._save(self._forwarder.state)

    def _attempt(self, delay: float) -> float:
        """One call; the seconds to wait before the next one."""
        begin = time.thread_time()
        try:
            self._forwarder.advance()
        except Exception as error:
            self._forwarder.note(error)
            return min(max(2 * delay, PACE_S), BACKOFF_LIMIT_S)
        self._forwarder.note(None)
        return pause_after(time.thread_time() - begin)

    def _conclude(self) -> None:
        """Drain and finish, again until it works or too little time is left; finish in any case."""
        pause = 0.1
        while not self._ended():
            if time.monotonic() + pause > self._deadline:
                with contextlib.suppress(Exception):
                    self._forwarder.finish()
                return
            time.sleep(pause)
            pause *= 2

    def _ended(self) -> bool:
        try:
            while not self._forwarder.advance():
                if time.monotonic() > self._deadline:
                    raise TimeoutError("closed before all points were sent")
            self._forwarder.finish()
        except Exception as error:
            self._forwarder.note(error)
            return False
        self._forwarder.note(None)
        return True

    def _save(self, state: State) -> None:
        with self._writing, contextlib.suppress(OSError):
            state.write(self._folder)
