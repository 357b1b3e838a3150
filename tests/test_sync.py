"""Tests for runner/sync.py: what is missing is forwarded once, however often it is asked for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_forwarding import SPEC, closed_port, update, write_journal, write_record
from test_tracking import client_of, finished, raw_history, run_folder, store

from runner.contracts import UserError
from runner.forwarding.process import identity
from runner.forwarding.state import State
from runner.forwarding.store import Store
from runner.sync import main, parse, read_state
from runner.tracking import Mlflow

__all__ = ["store"]  # a fixture


def gone() -> str:
    """The identity of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        return identity(child.pid)


def left_behind(folder: Path, store: Store, **changes: Any) -> State:
    """What a launcher wrote that never reached the store."""
    write_journal(folder, [update(1), update(2)])
    state = State(spec=SPEC, uri=store.uri, experiment="runner", process=gone())
    state = replace(state, **changes)
    state.write(folder)
    return state


def runs_in(store: Store) -> list[Any]:
    experiment = client_of(store).get_experiment_by_name("runner")
    return list(client_of(store).search_runs([experiment.experiment_id]))


# --- the command line ---


def test_an_option_is_split_on_its_first_equals_sign(tmp_path: Path) -> None:
    folders, options = parse([str(tmp_path), "uri=sqlite:///a=b.db", "experiment=x"])
    assert folders == [tmp_path]
    assert options == {"uri": "sqlite:///a=b.db", "experiment": "x"}


def test_a_folder_with_an_equals_sign_in_its_name_is_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "precision=bf16"
    folder.mkdir()
    assert parse([str(folder)]) == ([folder], {})


@pytest.mark.parametrize("arguments", [[], ["url=http://h"]])
def test_a_wrong_command_exits_with_2_and_says_how_it_is_written(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "python -m runner.sync RUN_DIR... [uri=URI]" in capsys.readouterr().err


def test_a_folder_that_was_never_tracked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tracking\.json in it"):
        read_state(tmp_path)


def test_a_run_that_is_still_followed_is_refused(tmp_path: Path, store: Store) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        left_behind(tmp_path, store, process=identity(child.pid))
        with pytest.raises(UserError, match="still being forwarded"):
            read_state(tmp_path)


@pytest.mark.parametrize("name", ["tracking.json", "journal.jsonl", "record.json"])
def test_a_damaged_run_folder_is_refused_by_file_and_nothing_is_sent(
    name: str, store: Store, launch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(launch)
    left_behind(folder, store)
    write_record(folder)
    (folder / name).write_text('{"update": 1, "lo\n')
    assert main([str(folder)]) == 1
    assert f"RUN_DIR: given {folder}/{name}: " in capsys.readouterr().err
    assert client_of(store).get_experiment_by_name("runner") is None


# --- forwarding ---


def test_a_run_that_could_never_be_created_is_created_by_sync(store: Store, launch: Path) -> None:
    folder = run_folder(launch)
    state = left_behind(folder, store)
    write_record(folder)
    assert main([str(folder)]) == 0
    (run,) = runs_in(store)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "precision=bf16")
    assert run.info.start_time == state.start_ms
    assert run.data.tags["run_key"] == state.key
    assert raw_history(store, run.info.run_id, "loss/train") == [(1, 1.0), (2, 2.0)]


def test_sync_of_a_complete_run_does_nothing(
    store: Store, launch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(launch)
    write_journal(folder, [update(1)])
    write_record(folder)
    run_id = finished(store, folder)
    before = (folder / "tracking.json").read_bytes()
    assert main([str(folder)]) == 0
    assert f"complete in {store.uri} as run {run_id}" in capsys.readouterr().out
    assert (folder / "tracking.json").read_bytes() == before


def test_everything_sent_again_leaves_one_value_per_step(store: Store, launch: Path) -> None:
    folder = run_folder(launch)
    write_journal(folder, [update(n, loss=float("nan") if n == 3 else n) for n in range(1, 8)])
    write_record(folder)
    run_id = finished(store, folder)
    client_of(store).set_tag(run_id, "quality", "passed")
    state = State.read(folder)
    assert state is not None
    replace(state, offset=0, finished=False).write(folder)
    assert main([str(folder)]) == 0
    (run,) = runs_in(store)
    for name in run.data.metrics:
        steps = [step for step, _ in raw_history(store, run_id, name)]
        assert len(steps) == len(set(steps)), name
    assert [step for step, _ in raw_history(store, run_id, "loss/train")] == [1, 2, 3, 4, 5, 6, 7]
    assert run.data.tags["quality"] == "passed"


def test_a_run_that_a_later_start_ended_gets_its_true_status(store: Store, launch: Path) -> None:
    folder = run_folder(launch)
    state = left_behind(folder, store)
    run_id = store.start_run(state)
    client_of(store).set_tag(run_id, "process", state.process)
    assert len(store.check()) == 1
    write_record(folder)
    replace(state, run_id=run_id).write(folder)
    assert main([str(folder)]) == 0
    (run,) = runs_in(store)
    assert (run.info.run_id, run.info.status) == (run_id, "FINISHED")
    assert run.data.tags["status"] == "ok"
    assert "ended_by" not in run.data.tags


def test_a_run_whose_launcher_died_without_a_record_is_killed(store: Store, launch: Path) -> None:
    folder = run_folder(launch)
    left_behind(folder, store)
    assert main([str(folder)]) == 0
    (run,) = runs_in(store)
    assert (run.info.status, run.data.tags["status"]) == ("KILLED", "killed")


def test_another_store_gets_the_whole_run_under_no_parent(
    store: Store, launch: Path, template: Path
) -> None:
    folder = run_folder(launch)
    write_journal(folder, [update(1), update(2)])
    write_record(folder)
    parent = store.start_parent(sweep_id="s", name="sweep", tags={})
    first = finished(store, folder, replace(SPEC, parent=parent, sweep_id="s"))
    shutil.copy(template, launch / "other.db")
    uri = f"sqlite:///{launch}/other.db"
    assert main([str(folder), f"uri={uri}"]) == 0
    other = Mlflow(uri=uri).open(launch)
    (run,) = runs_in(other)
    assert run.info.run_id != first
    assert raw_history(other, run.info.run_id, "loss/train") == [(1, 1.0), (2, 2.0)]
    assert "mlflow.parentRunId" not in run.data.tags
    assert run.data.tags["sweep_id"] == "s"
    assert json.loads((folder / "tracking.json").read_text())["uri"] == uri


def test_a_store_that_is_still_gone_exits_with_1_and_keeps_what_is_known(
    launch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(launch)
    gone_store = Mlflow(uri=f"http://127.0.0.1:{closed_port()}").open(launch)
    left_behind(folder, gone_store)
    before = (folder / "tracking.json").read_bytes()
    assert main([str(folder)]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert (folder / "tracking.json").read_bytes() == before


def test_one_folder_that_fails_does_not_keep_the_others_back(store: Store, launch: Path) -> None:
    folder = run_folder(launch)
    left_behind(folder, store)
    assert main([str(launch / "absent"), str(folder)]) == 1
    assert len(runs_in(store)) == 1
