"""Whole commands in fresh processes: what a user types, and everything it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking.client import MlflowClient

from runner.records import PHASES, RunRecord, read_journal, updates_of

pytestmark = pytest.mark.slow

TINY = (
    "data=pydocs",
    "seq_len=32",
    "batch=8",
    "updates=4",
    "warmup=1",
    "eval.examples=8",
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.positions=32",
    "plan.predict=false",
    "numerics.probe=false",
)
LONG = (*TINY, "updates=100000")


def command(corpora: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "runner", f"cache='{corpora}'", *words]


def run(
    launch: Path, corpora: Path, *words: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """One finished command."""
    return subprocess.run(
        command(corpora, *words),
        cwd=launch,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def client_of(launch: Path) -> Any:
    return MlflowClient(tracking_uri=f"sqlite:///{launch}/mlflow.db")


def stored(launch: Path) -> list[Any]:
    """Every run in the launch folder's store, oldest first."""
    client = client_of(launch)
    experiment = client.get_experiment_by_name("runner")
    if experiment is None:
        return []
    runs = client.search_runs([experiment.experiment_id])
    return sorted(runs, key=lambda r: (r.info.start_time, r.info.run_id))


def parent_and_children(launch: Path) -> tuple[Any, list[Any]]:
    runs = stored(launch)
    parents = [r for r in runs if "mlflow.parentRunId" not in r.data.tags]
    (parent,) = parents
    children = [r for r in runs if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    return parent, children


def folders(launch: Path) -> list[Path]:
    """Every run folder, in the order of their jobs."""
    return sorted(path.parent for path in launch.rglob("job.yaml"))


def record_of(folder: Path) -> RunRecord:
    record = RunRecord.read(folder)
    assert record is not None
    return record


# --- one job ----------------------------------------------------------------------------------

CURVES = {"loss/train", "loss/eval", "time/step_s", *(f"time/{phase}_s" for phase in PHASES)}
CURVES |= {f"tokens/{kind}_per_s" for kind in ("useful", "nonpad", "slots")}
CURVES |= {"optim/lr", "optim/grad_norm", "optim/skipped"}
VALUES = {"summary/step_s_median", "summary/step_s_p95", "summary/peak_allocated_bytes"}
VALUES |= {f"summary/{kind}_tokens_per_s" for kind in ("useful", "nonpad", "slots")}
VALUES |= {"summary/eval_loss", "summary/train_loss"}
VALUES |= {f"summary/updates_{what}" for what in ("attempted", "applied", "skipped")}
TAGS = {"status", "quality", "workload_id", "setup_id", "setup", "emulated"}
TAGS |= {"largest_live_object"}


def test_one_job_leaves_a_record_a_journal_and_a_run_that_agree(
    launch: Path, corpora: Path
) -> None:
    done = run(launch, corpora, *TINY, "precision=bf16", "accum=4")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = folders(launch)
    record = record_of(folder)
    updates = updates_of(read_journal(folder / "journal.jsonl"))
    assert [u.update for u in updates] == [1, 2, 3, 4]
    (found,) = stored(launch)
    assert found.info.status == "FINISHED"
    assert found.info.run_name == found.data.tags["setup"]
    assert set(found.data.metrics) == CURVES | VALUES
    assert set(found.data.tags) >= TAGS
    assert found.data.params["global_batch"] == "8"
    assert found.data.params["micro_batch"] == "2"
    assert found.data.params["precision.dtype"] == "bfloat16"
    client = client_of(launch)
    curve = {m.step: m.value for m in client.get_metric_history(found.info.run_id, "loss/train")}
    # Points are thinned to five a second, each the exact value of one update; ends are kept.
    assert curve.items() <= {u.attempt: u.loss for u in updates}.items()
    assert {1, 4} <= curve.keys()
    names = {artifact.path for artifact in client.list_artifacts(found.info.run_id)}
    assert names >= {"record.json", "journal.jsonl", "config.yaml"}
    for name, value in record.summary.items():
        assert found.data.metrics[f"summary/{name}"] == pytest.approx(value)
    steps = record.evidence["sum_of_steps_s"]["value"]
    assert steps == pytest.approx(record.evidence["loop_wall_s"]["value"], rel=0.01)
    assert record.evidence["tensors_without_gradient"]["value"] == []
    assert record.evidence["controls"]["value"]["cuda.matmul.fp32_precision"] == "ieee"
    assert record.workload_id == found.data.tags["workload_id"]


def test_a_missing_device_is_refused_by_name_and_leaves_no_run(launch: Path, corpora: Path) -> None:
    done = run(launch, corpora, *TINY, "device=cuda")
    assert done.returncode == 2
    assert "no CUDA device" in done.stdout
    assert stored(launch) == []


@pytest.mark.long
def test_an_inline_job_says_so_and_gives_the_same_losses(launch: Path, corpora: Path) -> None:
    done = run(launch, corpora, "-m", *TINY, "process=fresh,inline")
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = folders(launch)
    curves = [
        [u.loss for u in updates_of(read_journal(f / "journal.jsonl"))] for f in (first, second)
    ]
    assert curves[0] == curves[1]
    processes = [record_of(f).environment["process"] for f in (first, second)]
    assert processes == ["fresh", "inline"]


def test_tracking_off_still_trains(launch: Path, corpora: Path) -> None:
    assert run(launch, corpora, *TINY, "tracking=off").returncode == 0
    assert record_of(folders(launch)[0]).status == "ok"
    assert stored(launch) == []


def test_a_models_folder_in_the_launch_folder_is_refused(launch: Path, corpora: Path) -> None:
    (launch / "models").mkdir()
    (launch / "models" / "__init__.py").write_text("")
    done = run(launch, corpora, *TINY)
    assert done.returncode == 2
    assert f"models: given {launch}/models" in done.stderr
    assert folders(launch) == []


def test_relative_paths_count_from_the_launch_folder_even_with_chdir(
    launch: Path, corpora: Path
) -> None:
    words = (*TINY, "tracking.uri='sqlite:///sub/store.db'")
    (launch / "sub").mkdir()
    (launch / "mlflow.db").rename(launch / "sub" / "store.db")
    assert run(launch, corpora, *words, "hydra.job.chdir=true").returncode == 0
    stores = [path.relative_to(launch) for path in launch.rglob("*.db")]
    assert stores == [Path("sub/store.db")]
    client = MlflowClient(tracking_uri=f"sqlite:///{launch}/sub/store.db")
    experiment = client.get_experiment_by_name("runner")
    assert len(client.search_runs([experiment.experiment_id])) == 1


def test_an_outer_run_of_the_environment_is_not_touched(launch: Path, corpora: Path) -> None:
    client = client_of(launch)
    outer = client.create_run(client.create_experiment("outer"))
    env = {"MLFLOW_RUN_ID": outer.info.run_id, "MLFLOW_TRACKING_URI": f"sqlite:///{launch}/x.db"}
    assert run(launch, corpora, *TINY, env=env).returncode == 0
    assert client.get_run(outer.info.run_id).data.metrics == {}
    assert [r.info.status for r in stored(launch)] == ["FINISHED"]
    assert not (launch / "x.db").exists()


# --- mistakes ---------------------------------------------------------------------------------


def test_a_sweep_with_one_mistake_starts_and_writes_nothing(tmp_path: Path, corpora: Path) -> None:
    done = run(tmp_path, corpora, "-m", "precision=fp32,fp16", "accum=1,3", "batch=16")
    assert done.returncode == 2
    assert done.stderr.count("accum:") == 1
    assert "(in 2 of 4 jobs)" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_refused_store_stops_the_command_before_anything_runs(
    tmp_path: Path, corpora: Path
) -> None:
    done = run(tmp_path, corpora, *TINY, "tracking.uri=./mlruns")
    assert done.returncode == 2
    assert "tracking.uri" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_of_two_commands_in_one_folder_the_second_is_refused(launch: Path, corpora: Path) -> None:
    words = (*TINY, "hydra.run.dir=fixed", "tracking=off")
    assert run(launch, corpora, *words).returncode == 0
    before = (launch / "fixed" / "record.json").read_bytes()
    done = run(launch, corpora, *words)
    assert done.returncode == 2
    assert "hydra.run.dir" in done.stderr
    assert (launch / "fixed" / "record.json").read_bytes() == before


# --- sweeps -----------------------------------------------------------------------------------


def test_a_sweep_has_a_parent_and_children_and_accumulation_keeps_the_curve(
    launch: Path, corpora: Path
) -> None:
    done = run(launch, corpora, "-m", *TINY, "precision=fp32,bf16", "accum=1,4", "seed=0")
    assert done.returncode == 0, done.stdout + done.stderr
    parent, children = parent_and_children(launch)
    assert parent.info.status == "FINISHED"
    assert len(children) == 4
    names = {f"precision={p} accum={a}" for p in ("fp32", "bf16") for a in (1, 4)}
    assert {" ".join(r.data.tags["setup"].split()[:2]) for r in children} == names
    assert len({r.data.tags["sweep_id"] for r in [parent, *children]}) == 1
    assert len({r.data.tags["workload_id"] for r in children}) == 1
    assert len({r.data.tags["setup_id"] for r in children}) == 4
    curves = {}
    for folder in folders(launch):
        config = record_of(folder).config
        losses = [u.loss for u in updates_of(read_journal(folder / "journal.jsonl"))]
        curves[config["precision"].get("dtype", "fp32"), config["accum"]] = losses
    assert curves["fp32", 1] == pytest.approx(curves["fp32", 4], abs=1e-4)
    assert curves["bfloat16", 1] != curves["fp32", 1]


USER_MODULE = '''
from dataclasses import dataclass
from runner.memory.loss import Full

@dataclass(frozen=True, kw_only=True)
class Failing(Full):
    """Raises at its n-th training loss; 0 never."""
    at: int = 0

    def loss_sum(self, hidden, head_weight, targets, weights):
        if hidden.requires_grad:
            object.__setattr__(self, "calls", getattr(self, "calls", 0) + 1)
            if self.calls == self.at:
                raise RuntimeError(f"planted at {self.at}")
        return super().loss_sum(hidden, head_weight, targets, weights)

@dataclass(frozen=True, kw_only=True)
class Deaf(Full):
    """A loss that no gradient leaves."""

    def loss_sum(self, hidden, head_weight, targets, weights):
        return super().loss_sum(hidden.detach(), head_weight, targets, weights)
'''


@pytest.fixture
def own_parts(launch: Path) -> tuple[str, ...]:
    """A user's package with loss levers, and the words that make it known."""
    (launch / "mine.py").write_text(USER_MODULE)
    options = launch / "own" / "memory" / "loss"
    options.mkdir(parents=True)
    (options / "failing.yaml").write_text("_target_: mine.Failing\nat: 0\n")
    (options / "deaf.yaml").write_text("_target_: mine.Deaf\n")
    return (f"--config-dir={launch / 'own'}", "allow=[mine]")


def test_a_failing_job_stops_no_other_and_every_failure_is_listed(
    launch: Path, corpora: Path, own_parts: tuple[str, ...]
) -> None:
    expected = ["FAILED", "FINISHED", "FAILED"]
    words = (*own_parts, *TINY, "memory/loss=failing", "memory.loss.at=6,0,6", "seed=1")
    done = run(launch, corpora, "-m", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    parent, children = parent_and_children(launch)
    assert parent.info.status == "FAILED"
    assert [r.info.status for r in children] == expected
    assert len({r.data.params["memory.loss.at"] for r in children}) == 2
    failed = expected.count("FAILED")
    assert sum(line.startswith("error: ") for line in done.stdout.splitlines()) == failed
    assert parent.data.tags["mlflow.note.content"].count("planted at 6") == failed
    assert "Traceback" not in done.stderr
    for folder, status in zip(folders(launch), expected, strict=True):
        log = (folder / "worker.log").read_text()
        assert ("RuntimeError: planted at 6" in log) == (status == "FAILED")
        assert (record_of(folder).status == "error") == (status == "FAILED")


def test_a_run_that_would_train_nothing_is_an_error_without_a_rate(
    launch: Path, corpora: Path, own_parts: tuple[str, ...]
) -> None:
    done = run(launch, corpora, *own_parts, *TINY, "memory/loss=deaf")
    assert done.returncode == 1
    record = record_of(folders(launch)[0])
    assert record.status == "error"
    assert "no gradient reaches" in record.message
    assert not any("tokens_per_s" in name for name in record.summary)
    assert [r.info.status for r in stored(launch)] == ["FAILED"]


def test_an_unsupported_job_of_a_sweep_is_listed_on_the_parent_only(
    launch: Path, corpora: Path
) -> None:
    done = run(launch, corpora, "-m", *TINY, "device=cpu,cuda")
    assert done.returncode == 1
    parent, children = parent_and_children(launch)
    assert [r.info.status for r in children] == ["FINISHED"]
    assert "unsupported" in parent.data.tags["mlflow.note.content"]
    assert "device=cuda" in parent.data.tags["mlflow.note.content"]


# --- kills ------------------------------------------------------------------------------------


def wait_for_updates(launch: Path, count: int, folder: int = 0) -> Path:
    """The run folder once its journal holds `count` updates."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        found = folders(launch)
        if len(found) > folder:
            journal = found[folder] / "journal.jsonl"
            if len(updates_of(read_journal(journal))) >= count:
                return found[folder]
        time.sleep(0.05)
    raise AssertionError("the job did not get that far")


def worker_of(process: subprocess.Popen[str]) -> int:
    """Process number of the one worker of a launching process."""
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    (worker,) = text.split()
    return int(worker)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interrupted_job_is_killed_with_what_it_had(
    launch: Path, corpora: Path, number: signal.Signals, code: int
) -> None:
    process = subprocess.Popen(command(corpora, *LONG), cwd=launch, text=True)
    folder = wait_for_updates(launch, 3)
    process.send_signal(number)
    assert process.wait(30) == code
    record = record_of(folder)
    assert record.status == "killed"
    (found,) = stored(launch)
    assert found.info.status == "KILLED"
    assert found.info.end_time is not None
    steps = client_of(launch).get_metric_history(found.info.run_id, "loss/train")
    assert min(m.step for m in steps) == 1
    assert max(m.step for m in steps) == record.summary["updates_attempted"]


def test_a_worker_killed_from_outside_is_listed_and_the_others_finish(
    launch: Path, corpora: Path
) -> None:
    words = (*LONG, "updates=150", "accum=1,2,4")
    process = subprocess.Popen(
        command(corpora, "-m", *words), cwd=launch, text=True, stdout=subprocess.PIPE
    )
    wait_for_updates(launch, 3, folder=1)
    os.kill(worker_of(process), signal.SIGKILL)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    parent, children = parent_and_children(launch)
    assert [r.info.status for r in children] == ["FINISHED", "KILLED", "FINISHED"]
    assert parent.info.status == "FAILED"
    assert "killed: " in out
    assert "accum=2" in parent.data.tags["mlflow.note.content"]
    assert record_of(folders(launch)[1]).summary["updates_applied"] >= 3


def test_a_killed_launcher_takes_its_worker_along_and_the_next_start_ends_its_run(
    launch: Path, corpora: Path
) -> None:
    process = subprocess.Popen(command(corpora, *LONG), cwd=launch, text=True)
    wait_for_updates(launch, 3)
    worker = worker_of(process)
    limit = time.monotonic() + 30
    while not stored(launch) and time.monotonic() < limit:
        time.sleep(0.2)
    process.kill()
    process.wait()
    limit = time.monotonic() + 30
    while Path(f"/proc/{worker}/cwd").exists() and time.monotonic() < limit:
        time.sleep(0.1)
    assert not Path(f"/proc/{worker}/cwd").exists()
    assert [r.info.status for r in stored(launch)] == ["RUNNING"]
    done = run(launch, corpora, *TINY)  # also shows that a run after a kill is unaffected
    assert done.returncode == 0
    assert "tracking: ended the run" in done.stdout
    assert [r.info.status for r in stored(launch)] == ["KILLED", "FINISHED"]


def test_finished_jobs_are_not_repeated_and_new_seeds_extend_the_comparison(
    launch: Path, corpora: Path
) -> None:
    words = ("-m", *TINY, "skip_finished=true")
    assert run(launch, corpora, *words, "seed=0").returncode == 0
    done = run(launch, corpora, *words, "seed=0,1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("finished before as run") == 1
    jobs = [r for r in stored(launch) if "sweep_parent" not in r.data.tags]
    assert sorted(r.data.params["seed"] for r in jobs) == ["0", "1"]
    newest = max(launch.glob("runs/*/*/comparison.json"), key=lambda path: path.stat().st_mtime)
    (setup,) = json.loads(newest.read_text())["setups"]
    assert len(setup["runs"]) == 2
