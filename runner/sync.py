"""`python -m runner.sync RUN_DIR... [uri=URI] [experiment=NAME]`: forwards what is missing.

What a launcher could not send to the tracking store, because the store was gone or the launcher
was killed, is sent from the run folder. Repeating it changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from runner.contracts import Fault, UserError
from runner.forwarding.forwarder import Forwarder
from runner.forwarding.process import identity, is_gone
from runner.forwarding.state import STATE, State
from runner.forwarding.store import Store
from runner.records import JOURNAL, RunRecord, Unreadable, read_journal
from runner.tracking import Mlflow

USAGE = "python -m runner.sync RUN_DIR... [uri=URI] [experiment=NAME]"
OPTIONS = ("uri", "experiment")


def parse(arguments: Sequence[str]) -> tuple[list[Path], dict[str, str]]:
    """Run folders and options; an option is `key=value`, split on the first `=`.

    An argument that names an existing folder is a folder, whatever it holds.
    """
    folders: list[Path] = []
    options: dict[str, str] = {}
    for argument in arguments:
        key, mark, value = argument.partition("=")
        if mark and not Path(argument).is_dir():
            if key not in OPTIONS:
                raise UserError(_fault(key, argument, "uri=..., experiment=...", USAGE))
            options[key] = value
        else:
            folders.append(Path(argument))
    if not folders:
        raise UserError(_fault("RUN_DIR", "nothing", "folders of runs", USAGE))
    return folders, options


def _fault(key: str, given: object, allowed: str, next_step: str) -> Fault:
    return Fault(key=key, given=str(given), allowed=allowed, next_step=next_step)


def read_state(folder: Path) -> State:
    """The state of a run folder that may be forwarded. Raises UserError for any other."""
    try:
        state = State.read(folder) if folder.is_dir() else None
        read_journal(folder / JOURNAL)
        RunRecord.read(folder)
    except Unreadable as error:
        allowed = "a run's own folder with its files as they were written"
        raise UserError(
            _fault("RUN_DIR", error, allowed, "restore the file; nothing was sent of this run")
        ) from error
    if state is None:
        fault = _fault(
            "RUN_DIR", folder, f"a run's own folder, with {STATE} in it", "list the run folders"
        )
        raise UserError(fault)
    if not state.finished and state.process != identity() and not is_gone(state.process):
        fault = _fault(
            "RUN_DIR",
            f"{folder}, which is still being forwarded",
            "a run whose launcher has ended",
            "wait for the launcher",
        )
        raise UserError(fault)
    return state


def target(state: State, options: dict[str, str], launch: Path) -> tuple[Store, State]:
    """The store to forward to, and the state with which to do it.

    Another store or experiment than before gets the whole run, under no parent of its own.
    """
    part = Mlflow(
        uri=options.get("uri", state.uri), experiment=options.get("experiment", state.experiment)
    )
    store = part.open(launch)
    state = replace(state, process=identity())
    if (store.uri, store.experiment) != (state.uri, state.experiment):
        state = replace(
            state,
            uri=store.uri,
            experiment=store.experiment,
            run_id=None,
            offset=0,
            finished=False,
            problem=None,
            spec=replace(state.spec, parent=None),
        )
    return store, state


def forward(store: Store, folder: Path, state: State) -> State:
    """Send everything that is missing and end the run; the state after it, as written."""
    forwarder = Forwarder(store, folder, state)
    try:
        while not forwarder.advance():
            pass
        forwarder.finish()
        forwarder.note(None)
    except Exception as error:
        forwarder.note(error)
    finally:
        forwarder.state.write(folder)
    return forwarder.state


def sync(folder: Path, options: dict[str, str], launch: Path) -> str:
    """Forward one run folder; what was done, in words. Raises UserError."""
    store, state = target(read_state(folder), options, launch)
    if state.complete:
        return f"{folder}: complete in {state.uri} as run {state.run_id}"
    store.check()
    state = forward(store, folder, state)
    if not state.complete:
        fault = _fault(
            "tracking.uri", f"{state.uri} ({state.problem})", "a store that answers", USAGE
        )
        raise UserError(fault)
    return f"{folder}: forwarded to {state.uri} as run {state.run_id}"


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 all complete, 1 something is still missing, 2 the command is wrong."""
    try:
        folders, options = parse(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    failed = 0
    for folder in folders:
        try:
            print(sync(folder, options, Path.cwd()))
        except UserError as error:
            print(error, file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
