"""`python -m runner`: compose and check every job, run them, report, exit.

Exit codes: 0 all jobs ok; 1 a job ended otherwise; 2 the command is wrong and nothing was started
or written, or the single job cannot run on this device; 130 or 143 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from runner.compose import Command, command_of
from runner.config import build
from runner.contracts import Fault, UserError
from runner.door import CONFIG, parser, start_hydra
from runner.launch import Result, Session, run_job, start_worker
from runner.sweeps import run_sweep
from runner.terminal import print_faults

INSPECTIONS = ("help", "hydra_help", "cfg", "info", "shell_completion")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (without the program's name); returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_intermixed_args(words)
    launch = Path.cwd()
    try:
        refuse_shadowed_models()
        if any(getattr(args, name) for name in INSPECTIONS):
            return inspect(args)
        command = command_of(args, launch)
        return run(command, launch, ["python", "-m", "runner", *words])
    except UserError as error:
        print_faults(sys.stderr, error.faults, "nothing was started or written")
        return 2


def refuse_shadowed_models() -> None:
    """Raise UserError when `models` comes from elsewhere than beside this package."""
    import models

    found = Path(str(models.__file__ or next(iter(models.__path__)))).resolve()
    here = Path(__file__).resolve().parent.parent
    if here not in found.parents:
        raise UserError(
            Fault(
                key="models",
                given=str(found),
                allowed=f"the package beside runner, in {here}",
                next_step="start the command in another folder, or rename that one",
            )
        )


def inspect(args: Namespace) -> int:
    """Hydra's own answers: --help, --cfg, --info, --hydra-help, --shell-completion."""
    hydra = start_hydra(args)
    name = args.config_name or CONFIG
    if args.help:
        hydra.app_help(config_name=name, args_parser=parser(), args=args)
    elif args.hydra_help:
        hydra.hydra_help(config_name=name, args_parser=parser(), args=args)
    elif args.cfg:
        hydra.show_cfg(
            config_name=name,
            overrides=args.overrides,
            cfg_type=args.cfg,
            package=args.package,
            resolve=args.resolve,
        )
    elif args.info:
        hydra.show_info(args.info, config_name=name, overrides=args.overrides)
    else:
        hydra.shell_completion(config_name=name, overrides=args.overrides)
    return 0


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
    """The command's exit code, see the module."""
    if session.interrupted is not None:
        return 128 + session.interrupted
    if [result.status for result in results] == ["unsupported"] and session.jobs == 1:
        return 2
    complete = len(results) == session.jobs and not session.comparison_failed
    return 0 if complete and all(result.status == "ok" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
