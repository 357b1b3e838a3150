"""One job from its plan to its end: worker started, journal followed, result told.

The launching process never imports torch (but for `process=inline`) and holds no device. Nothing
here raises for what happens to a job: a status comes back, so that a sweep goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf

from runner.checks import job_id, setup_id
from runner.compose import Plan
from runner.forwarding.state import RunSpec
from runner.records import JOURNAL, RunRecord, write_atomically
from runner.states import JOB, place_of, read_state, read_ticket
from runner.terminal import Progress

POLL_S = 0.05
STOP_S = 20.0
"""Seconds a worker has to write its record after it was asked to stop."""
TRACKING_S = 30.0
"""Seconds that tracking may take after a job's end; the rest is left to runner.sync."""
KILLS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a job ended. `run_id`: in the tracking store, or None."""

    plan: Plan
    status: str
    message: str
    record: RunRecord | None = None
    run_id: str | None = None


@dataclass(kw_only=True, eq=False)
class Session:
    """What the jobs of one command share.

    store: an open tracking store. parent, sweep_id: of the sweep, or None. interrupted: the
    signal that asked to stop, once one did. spare: a worker that was started ahead. axes: swept
    keys with their values, as typed.
    """

    launch: Path
    command: Sequence[str]
    store: Any
    out: IO[str]
    parent: str | None = None
    sweep_id: str | None = None
    axes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    jobs: int = 1
    interrupted: int | None = None
    comparison_failed: bool = False
    spare: subprocess.Popen[str] | None = None
    results: list[Result] = field(default_factory=list)

    def interrupt(self, number: int, frame: Any) -> None:
        """Signal handler: no further job starts, the running one is asked to stop."""
        self.interrupted = number

    def take_worker(self) -> subprocess.Popen[str]:
        """The worker started ahead, or a new one."""
        worker, self.spare = self.spare, None
        return worker or start_worker(self.launch)


def start_worker(launch: Path) -> subprocess.Popen[str]:
    """A worker that imports what it needs and waits for a folder on its standard input.

    It leads a process group of its own, so that Ctrl-C reaches only the launching process, which
    then asks it to stop.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "runner.worker"],
        stdin=subprocess.PIPE,
        cwd=launch,
        text=True,
        start_new_session=True,
    )


def run_job(plan: Plan, session: Session) -> Result:
    """Run one job to its end, in its folder; never raises for what a job does."""
    if session.interrupted is not None:
        return Result(plan=plan, status="killed", message="not started: interrupted before")
    folder = session.launch / plan.folder
    try:
        claim(folder, plan, session)
    except FileExistsError:
        return Result(plan=plan, status="error", message=f"{folder} already holds a run")
    except OSError as error:
        return Result(plan=plan, status="error", message=f"{folder}: {error.strerror or error}")
    earlier = finished_earlier(plan, session, folder)
    if earlier is not None:
        return earlier
    progress = Progress(session.out, plan=plan, jobs=session.jobs, folder=folder)
    tracked = Tracked(plan, session, folder)
    if plan.config["process"] == "inline":
        code = run_inline(folder, lambda: session.interrupted is not None, tracked)
    else:
        code = run_fresh(session, folder, tracked, progress)
    record = RunRecord.read(folder) or bare_record(plan, session, folder, code)
    complete = tracked.close(record)
    progress.close(record)
    if not complete:
        where = os.path.relpath(folder, session.launch)
        progress.say(f"tracking is incomplete; send the rest with: python -m runner.sync {where}")
    return Result(
        plan=plan,
        status=record.status,
        message=record.message,
        record=record,
        run_id=tracked.run_id,
    )


def finished_earlier(plan: Plan, session: Session, folder: Path) -> Result | None:
    """The result of an identical job that ended ok before, if it is asked for and there is one."""
    if not plan.config["skip_finished"]:
        return None
    run_id = session.store.take_finished(job_id(plan.config, session.launch), folder)
    if run_id is None:
        return None
    words = (
        f"{plan.setup} seed={plan.config['seed']}: finished before as run {run_id}; not repeated"
    )
    print(words, file=session.out, flush=True)
    record = RunRecord.read(folder)
    assert record is not None
    return Result(
        plan=plan,
        status=record.status,
        message=f"finished before as run {run_id}",
        record=record,
        run_id=run_id,
    )


def claim(folder: Path, plan: Plan, session: Session) -> None:
    """Make the folder this job's own. Raises FileExistsError when another job has it."""
    folder.mkdir(parents=True, exist_ok=True)
    ticket = {
        "command": list(session.command),
        "overrides": list(plan.overrides),
        "setup": plan.setup,
        "swept": dict(plan.swept),
        "axes": {key: list(values) for key, values in session.axes.items()},
        "launch": str(session.launch),
        "sweep_id": session.sweep_id,
        "config": dict(plan.config),
    }
    with (folder / JOB).open("x", encoding="utf-8") as file:
        file.write(OmegaConf.to_yaml(OmegaConf.create(ticket)))
    text = OmegaConf.to_yaml(OmegaConf.create(dict(plan.config)))
    write_atomically(folder / "config.yaml", text)


class Tracked:
    """The job's run in the tracking store, opened when the worker has started for real."""

    def __init__(self, plan: Plan, session: Session, folder: Path) -> None:
        self._plan = plan
        self._session = session
        self._folder = folder
        self._job_id = job_id(plan.config, session.launch)
        self._follower: Any = None

    @property
    def run_id(self) -> str | None:
        """Run id in the store, once there is one."""
        return self._follower.run_id if self._follower else None

    def open(self, workload_id: str, *, emulated: bool, accum: int | None = None) -> None:
        """Open the run and follow the journal; once. accum: what the worker found for `auto`."""
        if self._follower is not None:
            return
        config = {**self._plan.config, **({} if accum is None else {"accum": accum})}
        known = isinstance(config["accum"], int)
        spec = RunSpec(
            setup=self._plan.setup,
            workload_id=workload_id,
            setup_id=setup_id(config),
            config=config,
            global_batch=config["batch"],
            micro_batch=config["batch"] // config["accum"] if known else None,
            sweep_id=self._session.sweep_id,
            parent=self._session.parent,
            job_id=self._job_id,
            emulated=emulated,
        )
        self._follower = self._session.store.follow(self._folder, spec)

    def close(self, record: RunRecord) -> bool:
        """Send the rest; whether everything arrived. An unsupported job has no run of its own."""
        if record.status == "unsupported" and self._follower is None:
            return True
        emulated = record.environment.get("emulated", False)
        accum = record.config["accum"]
        self.open(
            record.workload_id or "unknown",
            emulated=emulated,
            accum=accum if isinstance(accum, int) else None,
        )
        return bool(self._follower.close(TRACKING_S))


def run_inline(folder: Path, stop: Callable[[], bool], tracked: Tracked) -> int:
    """Run the worker's code in this process, for a debugger."""
    from runner.worker import run_folder

    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_S):
            state = read_state(folder)
            if state.get("state") == "started":
                tracked.open(
                    state["workload_id"], emulated=state["emulated"], accum=state.get("accum")
                )
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        run_folder(folder, stop)
    finally:
        done.set()
        watcher.join()
    return 0


def run_fresh(session: Session, folder: Path, tracked: Tracked, progress: Progress) -> int:
    """Hand the folder to a fresh worker and follow it; the worker's exit code."""
    worker = session.take_worker()
    asked = None
    try:
        assert worker.stdin is not None
        worker.stdin.write(f"{folder}\n")
        worker.stdin.close()
        while worker.poll() is None:
            state = read_state(folder)
            if state.get("state") == "started":
                tracked.open(
                    state["workload_id"], emulated=state["emulated"], accum=state.get("accum")
                )
            progress.show(state)
            if session.interrupted is not None:
                asked = asked or ask_to_stop(worker)
                if time.monotonic() > asked + STOP_S:
                    worker.kill()
            time.sleep(POLL_S)
    except BrokenPipeError:
        worker.wait()
    finally:
        if worker.poll() is None:
            worker.kill()
            worker.wait()
    return int(worker.returncode)


def ask_to_stop(worker: subprocess.Popen[str]) -> float:
    """Send SIGTERM; the moment it was sent."""
    worker.terminate()
    return time.monotonic()


def bare_record(plan: Plan, session: Session, folder: Path, code: int) -> RunRecord:
    """The record of a worker that could not write its own; it is written to the folder, where
    that can be done."""
    number = -code if code < 0 else 0
    killed = number in KILLS
    name = signal.Signals(number).name if number else f"exit code {code}"
    message = f"the worker ended by {name}"
    if not killed:
        message += f"; last output: {last_output(folder)}"
    record = RunRecord(
        status="killed" if killed else "error",
        message=message,
        command=list(session.command),
        workload_id=read_state(folder).get("workload_id"),
        setup_id=setup_id(plan.config),
        config=plan.config,
        summary=partial_summary(folder),
        environment={"emulated": bool(read_state(folder).get("emulated"))},
        job=place_of(read_ticket(folder)),
    )
    try:
        record.write(folder)
    except OSError as error:
        unwritten = f"; its record cannot be written: {error.strerror or error}"
        return replace(record, message=record.message + unwritten)
    return record


def partial_summary(folder: Path) -> Mapping[str, float]:
    """What the journal of a run that was cut short still tells."""
    from runner import accounting
    from runner.records import finite, read_journal, updates_of

    updates = updates_of(read_journal(folder / JOURNAL))
    if not updates:
        return {}
    figures = accounting.summary(updates)
    return {name: value for name, value in figures.items() if finite(value) is not None}


def last_output(folder: Path) -> str:
    """The last line that the worker wrote."""
    log = folder / "worker.log"
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    written = [line for line in lines if line.strip()]
    return written[-1] if written else "none"
