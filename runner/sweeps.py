"""A sweep as a whole: its parent run, the comparison at its end, the list of what failed."""

from __future__ import annotations

import json
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from runner.compare import compare_sweep, qualities
from runner.comparison.results import Comparison
from runner.compose import Command
from runner.contracts import Fault, UserError
from runner.launch import Result, Session
from runner.records import write_atomically


def run_sweep(command: Command, session: Session, run_jobs: Callable[[], None]) -> None:
    """Run the jobs between the opening and the closing of the sweep's parent run.

    The parent is closed whatever happens; what the jobs came to is in `session.results`.
    """
    folder = command.folder
    session.sweep_id = f"{folder.parent.name}_{folder.name}"
    words = " ".join(f"{key}={','.join(values)}" for key, values in command.axes.items())
    session.parent = _open_parent(session, f"sweep {words}".strip())
    artifacts: list[Path] = []
    try:
        run_jobs()
        artifacts = _compare(command, session)
    finally:
        print("\n".join(sweep_lines(session.results, len(command.jobs))), file=session.out)
        _close_parent(session, folder, artifacts)


def _open_parent(session: Session, name: str) -> str | None:
    """The sweep's parent run; a store that fails here stops the command before any job."""
    tags = {"setup": name, "command": shlex.join(session.command)}
    try:
        parent: str | None = session.store.start_parent(
            sweep_id=session.sweep_id, name=name, tags=tags
        )
    except Exception as error:
        raise UserError(
            Fault(
                key="tracking.uri",
                given=f"a store that does not take the sweep's parent run ({error})",
                allowed="a store that can be written to",
                next_step="check the store, or type tracking=off",
            )
        ) from error
    return parent


def _compare(command: Command, session: Session) -> list[Path]:
    """Print the comparison, write its files, tag every run with its quality; the files.

    A comparison that fails is an error of the sweep, shown with its traceback: it does not undo
    what the jobs left behind, and `runner.compare` can be called again.
    """
    from runner.report import lines

    try:
        found = compare_sweep(session.results, launch=session.launch, axes=command.axes)
        print("\n".join(lines(found)), file=session.out, flush=True)
        written = _written(found, session, command.folder)
    except Exception:
        session.comparison_failed = True
        traceback.print_exc()
        print("the comparison failed; the runs are kept: python -m runner.compare", file=sys.stderr)
        return []
    known = {result.run_id for result in session.results if result.run_id}
    for run_id, quality in qualities(found).items():
        if run_id in known:
            session.store.tag(run_id, {"quality": quality})
    return written


def _written(found: Comparison, session: Session, folder: Path) -> list[Path]:
    """The files of the comparison; where they cannot be written, it was at least shown."""
    from runner.report import write

    try:
        return write(found, folder)
    except OSError as error:
        session.comparison_failed = True
        print(
            f"the comparison above cannot be written to {folder}: {error.strerror or error}; "
            "again, once there is room: python -m runner.compare",
            file=sys.stderr,
        )
        return []


def _close_parent(session: Session, folder: Path, artifacts: Sequence[Path]) -> None:
    listing = folder / "jobs.json"
    jobs = [
        {
            "setup": result.plan.setup,
            "overrides": list(result.plan.overrides),
            "seed": result.plan.config["seed"],
            "status": result.status,
            "message": result.message,
            "folder": str(result.plan.folder),
            "run_id": result.run_id,
        }
        for result in session.results
    ]
    axes = {key: list(values) for key, values in session.axes.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(listing, json.dumps({"axes": axes, "jobs": jobs}, indent=1))
        artifacts = [listing, *artifacts]
    except OSError as error:
        session.comparison_failed = True
        print(f"{listing} cannot be written: {error.strerror or error}", file=sys.stderr)
    note = "\n".join(f"- {line}" for line in sweep_lines(session.results, session.jobs))
    done = session.store.finish_parent(
        session.parent,
        status=sweep_status(session),
        tags={"mlflow.note.content": note},
        artifacts=artifacts,
    )
    if not done:
        print("tracking: the sweep's parent run could not be closed", file=sys.stderr)


def sweep_lines(results: Sequence[Result], jobs: int) -> list[str]:
    """Counts, then every job that did not end ok with its overrides and reason."""
    good = sum(result.status == "ok" for result in results)
    lines = [f"sweep: {good} of {jobs} jobs ok"]
    for result in results:
        if result.status != "ok":
            overrides = " ".join(result.plan.overrides)
            lines.append(f"{result.status}: {overrides} — {result.message}")
    return lines


def sweep_status(session: Session) -> str:
    """The parent's status: killed if interrupted, ok if every job and the comparison are, else
    error."""
    if session.interrupted is not None:
        return "killed"
    good = len(session.results) == session.jobs and not session.comparison_failed
    return "ok" if good and all(r.status == "ok" for r in session.results) else "error"
