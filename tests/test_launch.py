"""Tests of runner/launch.py that need no worker; whole commands are in test_cli.py."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from runner.__main__ import main
from runner.compose import command_of
from runner.door import parser
from runner.launch import Session, bare_record, claim, run_job
from runner.tracking import Off


def session_of(launch: Path) -> Session:
    return Session(launch=launch, command=["x"], store=Off().open(launch), out=io.StringIO())


def planned(launch: Path) -> Any:
    (plan,) = command_of(parser().parse_args(["hydra.run.dir=runs/a", "seed=3"]), launch).jobs
    return plan


def test_a_folder_that_cannot_be_made_is_the_job_s_error_and_nobody_s_traceback(
    tmp_path: Path,
) -> None:
    plan = planned(tmp_path)
    (tmp_path / "runs").write_text("")  # since the command was checked
    result = run_job(plan, session_of(tmp_path))
    assert (result.status, result.message) == ("error", f"{tmp_path}/runs/a: Not a directory")


def test_a_record_that_cannot_be_written_is_still_told(tmp_path: Path) -> None:
    plan, session = planned(tmp_path), session_of(tmp_path)
    folder = tmp_path / plan.folder
    claim(folder, plan, session)
    (folder / "record.json").mkdir()
    record = bare_record(plan, session, folder, -9)
    assert record.status == "killed" and record.config["seed"] == 3
    assert record.message == (
        "the worker ended by SIGKILL; its record cannot be written: Is a directory"
    )


def test_an_interrupt_before_the_first_job_is_one_line_and_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("runner.running.run", interrupted)
    monkeypatch.setattr("runner.compose.command_of", lambda *_: None)
    assert main(["seed=3"]) == 130
    assert capsys.readouterr().err == "interrupted while no job ran\n"
