"""Tests of runner/sweeps.py that need no worker; whole sweeps are in test_cli.py."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from runner.compose import command_of
from runner.door import parser
from runner.launch import Result, Session
from runner.sweeps import run_sweep, sweep_status
from runner.tracking import Off


def test_a_sweep_whose_folder_cannot_be_written_is_told_and_ends_as_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-m", "accum=1,2", "hydra.sweep.dir=full/a"]
    command = command_of(parser().parse_args(words), tmp_path)
    session = Session(
        launch=tmp_path,
        command=words,
        store=Off().open(tmp_path),
        out=io.StringIO(),
        axes=command.axes,
        jobs=2,
    )
    (tmp_path / "full").write_text("")  # as a full disk: no folder can be made there

    def run_jobs() -> None:
        session.results += [Result(plan=p, status="error", message="no") for p in command.jobs]

    run_sweep(command, session, run_jobs)
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert f"comparison above cannot be written to {tmp_path}/full/a: Not a directory" in error
    assert f"{tmp_path}/full/a/jobs.json cannot be written: Not a directory" in error
    assert "sweep: 0 of 2 jobs ok" in session.out.getvalue()  # type: ignore[attr-defined]
    assert sweep_status(session) == "error"
