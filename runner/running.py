"""A checked command, run: signals, the first worker, Hydra, the exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from runner.compose import Command
from runner.config import build
from runner.launch import Result, Session, run_job, start_worker
from runner.sweeps import run_sweep


def run(command: Command, launch: Path, words: list[str]) -> int:
    """Run the jobs of a checked command."""
    first = command.jobs[0].config
    inline = first["process"] == "inline"
    session = Session(
        launch=launch,
        command=words,
        store=build(first["tracking"], key="tracking", allow=first["allow"]).open(launch),
        out=sys.stdout,
        axes=command.axes,
        jobs=len(command.jobs),
        spare=None if inline else start_worker(launch),
    )
    try:
        for note in session.store.check():
            print(f"tracking: {note}")
        return _run_tracked(command, session)
    finally:
        if session.spare is not None:
            session.spare.kill()
            session.spare.wait()


def _run_tracked(command: Command, session: Session) -> int:
    handlers = {n: signal.signal(n, session.interrupt) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        if command.multirun:
            run_sweep(command, session, partial(_run_hydra, command, session))
        else:
            _run_hydra(command, session)
        return exit_code(session.results, session)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _run_hydra(command: Command, session: Session) -> None:
    """Let Hydra run the jobs; every planned job has a result in the session afterwards."""
    task = partial(_task, command, session)
    run = command.hydra.multirun if command.multirun else command.hydra.run
    try:
        run(config_name=command.config_name, task_function=task, overrides=command.overrides)
    except Exception as error:
        # For example a YAML that was edited while the sweep ran: Hydra reads it for every job.
        missing = len(command.jobs) - len(session.results)
        print(f"error: {missing} jobs were not run: {error}", file=sys.stderr)


def _task(command: Command, session: Session, config: Any) -> str:
    """Hydra's task function: raises nothing, returns the status."""
    from hydra.core.hydra_config import HydraConfig

    number = int(HydraConfig.get().job.num) if command.multirun else 0
    os.chdir(session.launch)
    result = run_job(command.jobs[number], session)
    session.results.append(result)
    return result.status


def exit_code(results: Sequence[Result], session: Session) -> int:
    """The command's exit code, see `runner.__main__`."""
    if session.interrupted is not None:
        return 128 + session.interrupted
    if [result.status for result in results] == ["unsupported"] and session.jobs == 1:
        return 2
    complete = len(results) == session.jobs and not session.comparison_failed
    return 0 if complete and all(result.status == "ok" for result in results) else 1
