"""What the launching process does beside the runner's worker, in the worker's own turns only."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from runner.checks import setup_id
from runner.compose import Plan
from runner.forwarding.follower import lower_priority, pause_after
from runner.forwarding.forwarder import Forwarder
from runner.forwarding.state import RunSpec, State
from runner.terminal import Progress
from runner.tracking import Mlflow

LONGEST_S = 0.1
"""Seconds between two calls of one turn; a longer pause is somebody else's turn."""


class Launching:
    """Called again and again while the runner's worker trains: shows its progress and forwards
    its journal to an MLflow store as often as for every job, by the time of these turns alone.

    A job's follower does it in a thread of low priority. So does this, but waits for the thread,
    so that it burdens the runner's turns and nobody else's.
    """

    def __init__(
        self, progress: Progress, forwarder: Forwarder, updates: int, low: Executor
    ) -> None:
        self._progress = progress
        self._forwarder = forwarder
        self._state = {"state": "started", "updates": updates}
        self._low = low
        self._last = time.monotonic()
        self._since = 0.0
        self._pause = 0.0
        self.calls = 0

    def __call__(self) -> None:
        """Show, and forward when it is time."""
        self._progress.show(self._state)
        now = time.monotonic()
        self._since += min(now - self._last, LONGEST_S)
        if self._since >= self._pause:
            self._since = 0.0
            self._pause = pause_after(self._low.submit(self._advance).result())
            self.calls += 1
        self._last = time.monotonic()

    def _advance(self) -> float:
        """One call of the follower; the processor time that it took, in seconds."""
        begin = time.thread_time()
        self._forwarder.advance()
        return time.thread_time() - begin


@contextmanager
def launched(plan: Plan, folder: Path) -> Iterator[Launching]:
    """The launching process' part for a contestant's folder; the rest is forwarded at the end.

    The run is created in the store before anything is timed. Raises what the store raises.
    """
    spec = RunSpec(
        setup=plan.setup,
        workload_id="benchmark",
        setup_id=setup_id(plan.config),
        config=plan.config,
        global_batch=plan.config["batch"],
        micro_batch=plan.config["batch"] // plan.config["accum"],
    )
    store = Mlflow().open(folder)
    state = State(spec=spec, uri=store.uri, experiment=store.experiment)
    forwarder = Forwarder(store, folder, state)
    forwarder.advance()
    with Path(os.devnull).open("w", encoding="utf-8") as out:
        progress = Progress(out, plan=plan, jobs=1, folder=folder)
        with ThreadPoolExecutor(1, initializer=lower_priority) as low:
            yield Launching(progress, forwarder, plan.config["updates"], low)
    while not forwarder.advance():
        pass
    forwarder.finish()
