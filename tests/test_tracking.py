"""Tests for runner/tracking.py against real MLflow stores."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow.tracking.client import MlflowClient
from test_forwarding import SPEC, closed_port, update, wait_for, write_journal, write_record

from runner.contracts import UserError
from runner.forwarding.curves import Point
from runner.forwarding.store import Store
from runner.readback import read_curve, read_runs
from runner.records import EvaluationRecord
from runner.tracking import Mlflow, MlflowCalls, Off, batches_of

pytestmark = pytest.mark.xdist_group("tracking")


@pytest.fixture
def store(launch: Path) -> Store:
    return Mlflow().open(launch)


def client_of(store: Store) -> Any:
    return MlflowClient(tracking_uri=store.uri)


def raw_history(store: Store, run_id: str | None, name: str) -> list[tuple[int, float]]:
    """Every stored value of a metric, repetitions included."""
    return sorted((m.step, m.value) for m in client_of(store).get_metric_history(run_id, name))


def run_folder(launch: Path, name: str = "run") -> Path:
    folder = launch / name
    folder.mkdir()
    return folder


def finished(store: Store, folder: Path, spec: Any = SPEC) -> str:
    """The run id of a folder that was forwarded completely."""
    follower = store.follow(folder, spec)
    assert follower.close(30), follower.problem
    assert follower.run_id is not None
    return follower.run_id


# --- parts and start (case C60) ---


def test_the_options_of_the_tracking_group_build_these_parts() -> None:
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    folder = Path(__file__).parents[1] / "conf" / "tracking"
    built = {path.stem: instantiate(OmegaConf.load(path)) for path in folder.glob("*.yaml")}
    assert built == {"mlflow": Mlflow(uri=None, experiment="runner"), "off": Off()}


def test_the_parts_and_the_store_are_made_without_mlflow_and_torch() -> None:
    program = (
        "import sys; from pathlib import Path; import runner.sync, runner.readback\n"
        "from runner.tracking import Mlflow; Mlflow().open(Path('.'))\n"
        "print(sorted({'mlflow', 'torch', 'pandas', 'sqlalchemy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_an_empty_experiment_name_is_refused() -> None:
    with pytest.raises(ValueError, match="experiment: given ' '; allowed: a name"):
        Mlflow(experiment=" ")


def test_a_store_checks_out_and_check_creates_no_run(store: Store, launch: Path) -> None:
    assert store.check() == []
    client = client_of(store)
    experiment = client.get_experiment_by_name("runner")
    assert experiment.artifact_location == f"file://{launch}/mlartifacts/runner"
    assert client.search_runs([experiment.experiment_id]) == []


def test_a_deleted_experiment_is_restored_and_that_is_said(store: Store) -> None:
    store.check()
    client = client_of(store)
    experiment_id = client.get_experiment_by_name("runner").experiment_id
    client.delete_experiment(experiment_id)
    assert Store(uri=store.uri, experiment="runner", connect=MlflowCalls).check() == [
        "restored the deleted experiment runner"
    ]
    assert client.get_experiment(experiment_id).lifecycle_stage == "active"


def test_a_path_that_cannot_be_written_is_a_user_error_with_a_remedy() -> None:
    store = Mlflow(uri="sqlite:////proc/mlflow.db").open(Path("/"))
    with pytest.raises(UserError) as caught:
        store.check()
    (fault,) = caught.value.faults
    assert fault.key == "tracking.uri"
    assert fault.given == "sqlite:////proc/mlflow.db (unable to open database file)"
    assert "tracking=off" in fault.next_step


def test_a_database_of_another_mlflow_is_refused_before_any_work(
    store: Store, launch: Path
) -> None:
    with sqlite3.connect(launch / "mlflow.db") as database:
        database.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
    database.close()
    with pytest.raises(UserError, match=r"schema|revision"):
        store.check()


def test_an_experiment_whose_artifacts_need_a_server_is_refused(store: Store) -> None:
    client_of(store).create_experiment("runner", artifact_location="mlflow-artifacts:/1")
    with pytest.raises(UserError, match="its artifacts are kept by a server"):
        store.check()


def test_a_dead_server_is_a_user_error_within_seconds(tmp_path: Path) -> None:
    port = closed_port()
    began = time.monotonic()
    with pytest.raises(UserError, match=f"127.0.0.1:{port} does not answer"):
        Mlflow(uri=f"http://127.0.0.1:{port}").open(tmp_path).check()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("name", ["with space", "ha#sh=1,[2]", "ünï漢"])
def test_a_launch_folder_may_have_any_usual_name(template: Path, tmp_path: Path, name: str) -> None:
    launch = tmp_path / name
    launch.mkdir()
    shutil.copy(template, launch / "mlflow.db")
    store = Mlflow(experiment="a b/c%").open(launch)
    store.check()
    folder = run_folder(launch)
    write_record(folder)
    run_id = finished(store, folder)
    (run,) = read_runs(Mlflow(experiment="a b/c%"), launch)
    assert run.run.run_id == run_id
    assert run.record is not None
    assert list((launch / "mlartifacts").rglob("record.json"))


def test_tracking_off_takes_the_same_calls_and_writes_nothing(tmp_path: Path) -> None:
    store = Off().open(tmp_path)
    assert list(store.check()) == []
    parent = store.start_parent(sweep_id="s", name="n", tags={})
    follower = store.follow(tmp_path, SPEC)
    assert follower.close(1.0)
    assert follower.run_id is None
    assert store.tag(None, {"quality": "passed"})
    assert store.attach(None, [tmp_path])
    assert store.finish_parent(parent, status="ok")
    assert list(tmp_path.iterdir()) == []


def test_both_kinds_of_store_offer_the_same_calls() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    # What the forwarding itself calls is not for the launcher.
    assert public(Store) - public(type(Off().open(Path()))) == {"start_run", "log", "finish"}


# --- one run (cases C12, C17, C57, C61) ---


def test_a_run_is_stored_with_its_curves_figures_tags_parameters_and_files(
    store: Store, launch: Path
) -> None:
    folder = run_folder(launch)
    (folder / "config.yaml").write_text("precision: bf16\n")
    (folder / "artifacts" / "plots").mkdir(parents=True)
    (folder / "artifacts" / "plots" / "loss.svg").write_text("<svg/>")
    parent = store.start_parent(sweep_id="s7", name="sweep", tags={"quality": "x"})
    spec = replace(SPEC, sweep_id="s7", parent=parent)
    write_journal(folder, [update(1, loss=2.0), update(2, loss=4.0), update(3, loss=3.0)])
    write_journal_end = EvaluationRecord(update=3, eval_loss=2.5, eval_tokens=9)
    write_journal(folder, [write_journal_end])
    write_record(folder, summary={"train_loss": 3.25, "updates_applied": 3})
    run_id = finished(store, folder, spec)
    client = client_of(store)
    run = client.get_run(run_id)
    assert run.info.run_name == "precision=bf16"
    assert run.info.status == "FINISHED"
    assert run.info.end_time == int((folder / "record.json").stat().st_mtime * 1000)
    assert raw_history(store, run_id, "loss/train") == [(1, 2.0), (2, 4.0), (3, 3.0)]
    assert raw_history(store, run_id, "loss/eval") == [(3, 2.5)]
    assert raw_history(store, run_id, "tokens/useful_per_s") == [(1, 20.0), (2, 20.0), (3, 20.0)]
    assert run.data.metrics["summary/train_loss"] == 3.25
    assert run.data.metrics["summary/updates_applied"] == 3
    expected = {
        "status": "ok",
        "quality": "unchecked",
        "setup": "precision=bf16",
        "workload_id": "w1",
        "setup_id": "s1",
        "sweep_id": "s7",
        "emulated": "false",
        "mlflow.parentRunId": parent,
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
    }
    assert expected.items() <= run.data.tags.items()
    assert run.data.params == {
        "precision.format": "bf16",
        "global_batch": "8",
        "micro_batch": "2",
    }
    names = {item.path for item in client.list_artifacts(run_id)}
    assert names == {"record.json", "journal.jsonl", "config.yaml", "plots"}


def test_a_run_is_running_with_its_first_points_while_its_job_runs(
    store: Store, launch: Path
) -> None:
    folder = run_folder(launch)
    follower = store.follow(folder, SPEC)
    write_journal(folder, [update(1)])
    wait_for(lambda: follower.run_id, 20)
    run = client_of(store).get_run(follower.run_id)
    assert (run.info.status, run.data.tags["status"]) == ("RUNNING", "running")
    wait_for(lambda: raw_history(store, follower.run_id, "loss/train") == [(1, 1.0)], 20)
    write_record(folder, "killed", message="SIGTERM")
    assert follower.close(20)
    assert client_of(store).get_run(follower.run_id).info.status == "KILLED"


def test_nan_and_infinity_are_read_back_and_never_shown_as_a_number(
    store: Store, launch: Path
) -> None:
    folder = run_folder(launch)
    losses = [3.5, math.nan, math.inf, -math.inf, 3.0]
    write_journal(folder, [update(n, loss=loss) for n, loss in enumerate(losses, 1)])
    write_record(folder, "diverged")
    run_id = finished(store, folder)
    curve = read_curve(store.uri, run_id, "loss/train")
    assert [step for step, _ in curve] == [1, 2, 3, 4, 5]
    values = [value for _, value in curve]
    assert values[0] == 3.5 and math.isnan(values[1]) and values[2:] == [math.inf, -math.inf, 3.0]
    stored = [value for _, value in raw_history(store, run_id, "loss/train")]
    assert max(abs(value) for value in stored if not math.isnan(value)) == 3.5
    run = client_of(store).get_run(run_id)
    assert run.info.status == "FAILED"
    assert run.data.tags["status"] == run.data.tags["quality"] == "diverged"
    assert run.data.tags["nonfinite_first_step"] == "2"
    assert run.data.tags["last_finite_loss"] == "3.5"


# --- parameters and names (cases C56, C59) ---


def params_in(store: Store, launch: Path, config: dict[str, Any], name: str) -> dict[str, str]:
    folder = run_folder(launch, name)
    write_record(folder, config=config)
    found = client_of(store).get_run(finished(store, folder, replace(SPEC, config=config)))
    return dict(found.data.params)


def test_long_values_long_keys_and_many_parameters_are_stored(store: Store, launch: Path) -> None:
    many = {f"p{n}": n for n in range(250)}
    one = params_in(store, launch, {"text": "x" * 6999 + "a", "k" * 251: 1, **many}, "one")
    two = params_in(store, launch, {"text": "x" * 6999 + "b", "k" * 251: 1, **many}, "two")
    assert len(one) == 250 + 2 + 2
    assert one["p249"] == "249"
    assert one["text"] != two["text"]
    assert "(cut; 7000 characters, sha256 " in one["text"]


def test_parameters_are_sent_in_batches_of_at_most_100_000_characters() -> None:
    params = {f"{n:03}": "x" * 5997 for n in range(40)}
    batches = list(batches_of(params))
    # 16 * (3 + 5997) = 96,000; a 17th would make it 102,000.
    assert [len(batch) for batch in batches] == [16, 16, 8]
    assert {key: text for batch in batches for key, text in batch} == params


def test_a_parameter_that_changed_keeps_its_first_value_and_the_new_one_is_a_tag(
    store: Store, launch: Path
) -> None:
    folder = run_folder(launch)
    write_record(folder, config={"updates": 20, "lr": 1.0})
    run_id = finished(store, folder, replace(SPEC, config={"updates": 10, "lr": 1}))
    data = client_of(store).get_run(run_id).data
    assert (data.params["updates"], data.params["lr"]) == ("10", "1")
    assert (data.tags["changed.updates"], data.tags["changed.lr"]) == ("20", "1.0")


def test_names_that_the_store_refuses_are_stored_and_none_merge(store: Store, launch: Path) -> None:
    names = ["acc@1", "lr[0]", "t(s)", "a,b", "a=b", "50%", "a//b", "a/b", "/a", "a", "é", "漢"]
    names += ["loss", "loss/total", "Loss", "a.b", "a:40:b", "a@b", "k" * 251, "k" * 250 + "j"]
    found = params_in(store, launch, {name: number for number, name in enumerate(names)}, "run")
    assert len(found) == len(names) + 2
    calls = MlflowCalls(store.uri)
    (run,) = read_runs(Mlflow(), launch)
    points = [Point(name=f"m{n}", value=i, step=0, timestamp=0) for i, n in enumerate(names)]
    calls.log(run.run.run_id, points, {})
    assert [calls.history(run.run.run_id, f"m{n}") for n in names] == [
        {0: float(i)} for i in range(len(names))
    ]


# --- one run apart from others (case C63) ---


@pytest.fixture
def outer(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A user's own active run in the same store, and MLflow's own variables set."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////nowhere/else.db")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(store.uri)
    with mlflow.start_run() as run:
        monkeypatch.setenv("MLFLOW_RUN_ID", run.info.run_id)
        yield run
    mlflow.set_tracking_uri(before)


def test_an_active_run_and_the_run_id_of_the_environment_stay_untouched(
    store: Store, launch: Path, outer: Any
) -> None:
    ids = []
    for name, status in (("a", "ok"), ("b", "error"), ("c", "ok")):
        folder = run_folder(launch, name)
        write_journal(folder, [update(1)])
        write_record(folder, status, config={"name": name})
        ids.append(finished(store, folder, replace(SPEC, config={"name": name})))
    client = client_of(store)
    found = [client.get_run(run_id) for run_id in ids]
    assert len({*ids, outer.info.run_id}) == 4
    assert [run.info.status for run in found] == ["FINISHED", "FAILED", "FINISHED"]
    assert [run.data.params["name"] for run in found] == ["a", "b", "c"]
    active = mlflow.active_run()
    assert active is not None and active.info.run_id == outer.info.run_id
    untouched = client.get_run(outer.info.run_id)
    assert untouched.info.status == "RUNNING"
    assert (untouched.data.metrics, untouched.data.params) == ({}, {})


# --- killed launchers and several launchers (case C61) ---

LAUNCHER = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from test_forwarding import SPEC, update, write_journal
    from runner.tracking import Mlflow
    launch = Path(sys.argv[1])
    store = Mlflow().open(launch)
    store.start_parent(sweep_id="s", name="sweep", tags={{}})
    (launch / "killed").mkdir()
    write_journal(launch / "killed", [update(n) for n in (1, 2, 3)])
    follower = store.follow(launch / "killed", SPEC)
    while follower._forwarder.state.offset == 0:
        time.sleep(0.01)
    print("followed", flush=True)
    time.sleep(60)
"""


def test_runs_of_a_launcher_that_was_killed_are_ended_by_the_next_start(
    store: Store, launch: Path
) -> None:
    mine = store.start_parent(sweep_id="mine", name="mine", tags={})
    program = textwrap.dedent(LAUNCHER.format(tests=str(Path(__file__).parent)))
    command = [sys.executable, "-c", program, str(launch)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "followed\n"
        assert store.check() == []
        launcher.send_signal(signal.SIGKILL)
    notes = store.check()
    assert len(notes) == 2
    assert all("whose launcher was killed" in note for note in notes)
    client = client_of(store)
    runs = {run.info.run_name: run for run in client.search_runs(["1"])}
    assert {name: run.info.status for name, run in runs.items()} == {
        "mine": "RUNNING",
        "sweep": "KILLED",
        "precision=bf16": "KILLED",
    }
    run = runs["precision=bf16"]
    assert run.data.tags["status"] == "killed"
    assert run.data.tags["ended_by"] == "a later start"
    assert run.info.end_time is not None
    assert raw_history(store, run.info.run_id, "loss/train") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert store.finish_parent(mine, status="ok")
    assert client.get_run(mine).info.status == "FINISHED"


@pytest.mark.slow
def test_two_launchers_may_create_the_same_store_at_once(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from runner.tracking import Mlflow\n"
        "store = Mlflow().open(Path(sys.argv[1])); print(list(store.check()))\n"
        "for n in range(20):\n"
        "    store.finish_parent(store.start_parent(sweep_id='s', name='p', tags={}), status='ok')"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [child.communicate(timeout=120)[0] for child in both] == ["[]\n", "[]\n"]
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    assert [run.info.status for run in client.search_runs(["1"])] == ["FINISHED"] * 40


# --- reading back ---


def test_the_runs_of_a_sweep_are_read_back_from_the_store_alone(store: Store, launch: Path) -> None:
    for sweep, name in (("old", "a"), ("new", "b"), ("new", "c")):
        folder = run_folder(launch, name)
        write_journal(folder, [update(1), update(2, loss=math.inf)])
        write_record(folder, summary={"eval_loss": 1.5}, message=name)
        finished(store, folder, replace(SPEC, sweep_id=sweep, parent=None))
        shutil.rmtree(folder)
    store.start_parent(sweep_id="new", name="sweep", tags={})
    runs = read_runs(Mlflow(), launch, sweep="latest")
    assert [run.record.message for run in runs if run.record] == ["b", "c"]
    assert [line.loss for line in runs[0].journal] == [1.0, math.inf]  # type: ignore[union-attr]
    assert len(read_runs(Mlflow(), launch)) == 3
    with pytest.raises(UserError, match="allowed: latest, new, old"):
        read_runs(Mlflow(), launch, sweep="nev")


def test_a_run_that_still_runs_is_read_back_without_a_record(store: Store, launch: Path) -> None:
    folder = run_folder(launch)
    follower = store.follow(folder, SPEC)
    wait_for(lambda: follower.run_id, 20)
    (run,) = read_runs(Mlflow(), launch)
    assert (run.record, list(run.journal)) == (None, [])
    follower.close(20)


def test_reading_creates_no_store_and_no_experiment(tmp_path: Path, template: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        read_runs(Mlflow(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    shutil.copy(template, tmp_path / "mlflow.db")
    with pytest.raises(UserError, match=r"tracking\.experiment: given absent"):
        read_runs(Mlflow(experiment="absent"), tmp_path)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    assert [found.name for found in client.search_experiments()] == ["Default"]


# --- a real server ---


@pytest.fixture(scope="module")
def server(
    template: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(template, folder / "mlflow.db")
    port = closed_port()
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, start_new_session=True
        )
    try:
        with_answer = f"http://127.0.0.1:{port}"
        wait_for(lambda: answers(port), 120)
        yield with_answer, process
    finally:
        os.killpg(process.pid, signal.SIGCONT)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_a_server_that_stops_answering_costs_nothing_and_is_made_up_for_by_sync(
    server: tuple[str, subprocess.Popen[bytes]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from runner.sync import main

    uri, process = server
    store = Mlflow(uri=uri).open(tmp_path)
    store.check()
    folder = run_folder(tmp_path)
    config = {f"k{n}": "é" * 6000 for n in range(120)}
    follower = store.follow(folder, replace(SPEC, config=config))
    write_journal(folder, [update(n) for n in range(1, 4)])
    wait_for(lambda: follower._forwarder.state.offset, 30)
    os.killpg(process.pid, signal.SIGSTOP)
    write_journal(folder, [update(n, loss=n + 0.5) for n in range(4, 8)])
    write_record(folder)
    began = time.monotonic()
    assert not follower.close(3)
    assert time.monotonic() - began < 4
    assert json.loads((folder / "tracking.json").read_text())["complete"] is False
    began = time.monotonic()
    with pytest.raises(UserError, match="no answer within 10 s"):
        Mlflow(uri=uri).open(tmp_path).check()
    assert time.monotonic() - began < 15
    os.killpg(process.pid, signal.SIGCONT)
    assert main([str(folder)]) == 0, capsys.readouterr().err
    assert main([str(folder)]) == 0
    assert "complete in" in capsys.readouterr().out
    expected = [(1, 1.0), (2, 2.0), (3, 3.0), *((n, n + 0.5) for n in range(4, 8))]
    assert raw_history(store, follower.run_id, "loss/train") == expected
    (run,) = read_runs(Mlflow(uri=uri), tmp_path)
    assert (run.run.status, run.run.run_id) == ("FINISHED", follower.run_id)
    assert run.record is not None and len(run.journal) == 7
    assert {key: run.run.params[key] for key in config} == config
