"""Tests for runner/forwarding: names, curves, addresses, processes and the follower, no MLflow."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.contracts import Counts, UserError
from runner.forwarding.address import alone_in, probe, probe_server, resolve_uri, within
from runner.forwarding.client import Run
from runner.forwarding.curves import Curves
from runner.forwarding.follower import NICENESS, PACE_S, PAUSE_S, SHARE, Follower, pause_after
from runner.forwarding.forwarder import CALL_LIMIT, Forwarder
from runner.forwarding.names import flatten, params_of, safe_name, safe_value, value_text
from runner.forwarding.process import identity, is_gone
from runner.forwarding.runs import is_timed
from runner.forwarding.state import RunSpec, State
from runner.forwarding.store import Store
from runner.records import PHASES, EvaluationRecord, RunRecord, UpdateRecord, dumps

SPEC = RunSpec(
    setup="precision=bf16",
    workload_id="w1",
    setup_id="s1",
    config={"precision": {"format": "bf16"}},
    global_batch=8,
    micro_batch=2,
)
SIXTY_FOURTH = 1 / 64
some = settings(deadline=None, max_examples=200)


def update(attempt: int, **changes: Any) -> UpdateRecord:
    """An update of 1/2 s with a loss that is its own number, so that a mean would show."""
    plain = UpdateRecord(
        update=attempt,
        attempt=attempt,
        applied=True,
        skipped_reason=None,
        loss=float(attempt),
        grad_norm=1.5,
        lr=0.25,
        loss_scale=None,
        tokens=Counts(useful=10, nonpad=12, slots=16),
        examples=4,
        time=dict.fromkeys(PHASES, 1 / 16) | {"forward": 3 / 16},
        total=0.5,
        host={"data": 0.0, "transfer": 0.0},
        memory=None,
    )
    return replace(plain, **changes)


def write_journal(folder: Path, lines: Sequence[UpdateRecord | EvaluationRecord]) -> None:
    text = "".join(dumps(line.to_json()) + "\n" for line in lines)
    with (folder / "journal.jsonl").open("a", encoding="utf-8") as file:
        file.write(text)


def write_record(folder: Path, status: str = "ok", **changes: Any) -> None:
    plain: dict[str, Any] = {
        "status": status,
        "message": "",
        "command": ["python", "-m", "runner"],
        "workload_id": "w1",
        "setup_id": "s1",
        "config": {"precision": {"format": "bf16"}},
        "summary": {"train_loss": 2.0, "step_s_median": 0.5},
    }
    RunRecord(**(plain | changes)).write(folder)


def sent(curves: Curves, lines: Sequence[UpdateRecord | EvaluationRecord]) -> dict[str, list[Any]]:
    """Curve name to (step, value) pairs of everything that is sent, the end included."""
    points = [point for line in lines for point in curves.take(line)] + curves.last()
    found: dict[str, list[Any]] = {}
    for point in points:
        found.setdefault(point.name, []).append((point.step, point.value))
    return found


@dataclass
class Memory:
    """A client that keeps everything in memory and fails as it is told.

    failing: names of calls that raise, with the error and how often (-1 for ever). busy_s:
    processor time of each call.
    """

    failing: dict[str, tuple[Exception, int]] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    niceness: set[int] = field(default_factory=set)
    busy_s: float = 0.0
    hold: threading.Event | None = None

    def _called(self, name: str) -> None:
        self.calls.append(name)
        end = time.thread_time() + self.busy_s
        while time.thread_time() < end:
            pass
        if self.hold is not None:
            self.hold.wait(30)
        error, left = self.failing.get(name, (None, 0))
        if error is not None and left != 0:
            self.failing[name] = (error, left - 1)
            raise error

    def experiment(self, name: str, location: str | None) -> tuple[str, str, bool]:
        return "1", location or "file:///nowhere", False

    def prove_writable(self, experiment_id: str) -> None:
        self._called("prove_writable")

    def search(self, experiment_id: str, condition: str) -> list[Run]:
        self._called("search")
        key = re.findall(r"run_key = '(\w+)'", condition)
        return [
            self.run(name)
            for name, run in self.runs.items()
            if not key or run["tags"].get("run_key") == key[0]
        ]

    def create_run(
        self, experiment_id: str, *, start_ms: int, name: str, tags: Mapping[str, str]
    ) -> str:
        run_id = f"run{len(self.runs)}"
        self.runs[run_id] = {
            "name": name,
            "status": "RUNNING",
            "tags": dict(tags),
            "params": {},
            "points": [],
            "files": [],
        }
        self._called("create_run")
        return run_id

    def run(self, run_id: str) -> Run:
        found = self.runs[run_id]
        return Run(
            run_id=run_id,
            name=found["name"],
            status=found["status"],
            tags=dict(found["tags"]),
            params=dict(found["params"]),
            artifacts="",
        )

    def log(self, run_id: str, points: Sequence[Any], tags: Mapping[str, str]) -> None:
        self.niceness.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        self._called("log")
        self.batches.append(len(points))
        self.runs[run_id]["points"] += points
        self.runs[run_id]["tags"] |= tags

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        self._called("log_params")
        self.runs[run_id]["params"] |= params

    def delete_tag(self, run_id: str, key: str) -> None:
        del self.runs[run_id]["tags"][key]

    def upload(self, run_id: str, path: Path) -> None:
        self._called("upload")
        self.runs[run_id]["files"].append(path.name)

    def end(self, run_id: str, status: str, ended_ms: int) -> None:
        self._called("end")
        self.runs[run_id]["status"] = status


def store_of(client: Memory, uri: str = "memory") -> Store:
    return Store(uri=uri, experiment="runner", connect=lambda _: client)


def wait_for(condition: Any, seconds: float = 5.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "did not happen in time"
        time.sleep(0.01)


# --- names (case C59) ---


def decoded(name: str) -> str:
    """The inverse of the documented mapping, written independently of it."""
    parts = ["" if part == "::" else part for part in name.split("/")]
    return "/".join(re.sub(r":([0-9a-f]+):", lambda m: chr(int(m[1], 16)), part) for part in parts)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loss/train", "loss/train"),
        ("acc@1", "acc:40:1"),
        ("lr[0]", "lr:5b:0:5d:"),
        ("t(s)", "t:28:s:29:"),
        ("a,b", "a:2c:b"),
        ("a=b", "a:3d:b"),
        ("50%", "50:25:"),
        ("a//b", "a/::/b"),
        ("/a", "::/a"),
        ("a/", "a/::"),
        ("a/../b", "a/:2e::2e:/b"),
        ("..0", ":2e:.0"),
        ("./a", ":2e:/a"),
        ("a:b", "a:3a:b"),
        (" a", ":20:a"),
        ("é", "é"),
        ("漢", "漢"),
        ("", "::"),
    ],
)
def test_a_refused_character_is_written_with_its_code_point(name: str, expected: str) -> None:
    assert safe_name(name) == expected


@some
@given(st.text(alphabet=st.sampled_from("ab:/.@% 2e0\ńé"), max_size=30) | st.text(max_size=40))
def test_a_mapped_name_can_be_mapped_back_so_no_two_names_merge(name: str) -> None:
    mapped = safe_name(name)
    if len(mapped) < 250:
        assert decoded(mapped) == name


@some
@given(st.text(alphabet=st.sampled_from("ab:/.@% 2e0\n"), max_size=30) | st.text(max_size=300))
def test_a_mapped_name_is_one_that_mlflow_takes(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    mapped = safe_name(name)
    _validate_metric_name(mapped)
    assert len(mapped) <= 250


def test_every_short_name_of_special_characters_is_taken_and_comes_back() -> None:
    from mlflow.utils.validation import _validate_metric_name

    names = ["".join(t) for n in range(5) for t in itertools.product("a.:/ @", repeat=n)]
    for name in names:
        _validate_metric_name(safe_name(name))
    assert [decoded(safe_name(name)) for name in names] == names


def test_two_names_of_251_characters_that_differ_at_the_end_stay_different() -> None:
    one, two = safe_name("k" * 250 + "a"), safe_name("k" * 250 + "b")
    assert one != two
    assert len(one) == len(two) == 250
    assert safe_name("k" * 250) == "k" * 250


# --- values (case C56) ---


def test_a_value_of_6000_characters_is_kept_and_one_more_is_cut_with_a_mark() -> None:
    assert safe_value("x" * 6000) == "x" * 6000
    cut = safe_value("x" * 6001)
    assert len(cut) == 6000
    assert "cut; 6001 characters, sha256 " in cut


def test_two_long_values_that_differ_in_the_last_character_stay_different() -> None:
    assert safe_value("x" * 6999 + "a") != safe_value("x" * 6999 + "b")


def test_a_config_is_flattened_to_dotted_keys_and_no_two_keys_merge() -> None:
    config = {"a": {"b": 1}, "a.b": 2, "a:2e:b": 3, "c": [1, {"d": None}], "e": {}}
    assert dict(flatten(config)) == {
        "a.b": "1",
        "a:2e:b": "2",
        "a:3a:2e:3a:b": "3",
        "c": '[1,{"d":null}]',
        "e": "{}",
    }


def test_a_word_that_reads_as_another_value_is_quoted() -> None:
    assert [value_text(v) for v in (None, "null", True, "true", 1, "1", "bf16", 1e-05)] == [
        "null",
        '"null"',
        "true",
        '"true"',
        "1",
        '"1"',
        "bf16",
        "1e-05",
    ]


def test_batch_sizes_stand_beside_the_config_among_the_parameters() -> None:
    assert params_of({"lr": 0.1}, {"global_batch": 8, "micro_batch": 2}) == {
        "lr": "0.1",
        "global_batch": "8",
        "micro_batch": "2",
    }


# --- curves (cases C12, C17, C57) ---


def test_every_point_is_the_value_of_its_own_update_and_never_a_mean() -> None:
    lines = [update(n, loss=loss) for n, loss in ((1, 2.0), (2, 4.0), (3, 3.0))]
    found = sent(Curves(start_ms=0, emulated=False), lines)
    assert found["loss/train"] == [(1, 2.0), (2, 4.0), (3, 3.0)]


def test_an_update_is_shown_under_exactly_the_names_of_the_contract() -> None:
    line = update(1, loss_scale=1024.0, memory={"allocated": 3 << 30, "reserved": 4 << 30})
    found = sent(Curves(start_ms=0, emulated=False), [line])
    assert found == {
        "loss/train": [(1, 1.0)],
        "optim/lr": [(1, 0.25)],
        "optim/grad_norm": [(1, 1.5)],
        "optim/loss_scale": [(1, 1024.0)],
        "optim/skipped": [(1, 0.0)],
        "memory/peak_allocated_bytes": [(1, 3221225472.0)],
        "memory/peak_reserved_bytes": [(1, 4294967296.0)],
        "time/step_s": [(1, 0.5)],
        "time/data_s": [(1, 0.0625)],
        "time/transfer_s": [(1, 0.0625)],
        "time/forward_s": [(1, 0.1875)],
        "time/backward_s": [(1, 0.0625)],
        "time/optimizer_s": [(1, 0.0625)],
        "time/other_s": [(1, 0.0625)],
        "tokens/useful_per_s": [(1, 20.0)],
        "tokens/nonpad_per_s": [(1, 24.0)],
        "tokens/slots_per_s": [(1, 32.0)],
    }


def test_what_is_unknown_has_no_point() -> None:
    found = sent(Curves(start_ms=0, emulated=False), [update(1, loss=None, grad_norm=None)])
    assert not {"loss/train", "optim/grad_norm", "optim/loss_scale"} & set(found)
    assert not any(name.startswith("memory/") for name in found)


def test_an_emulated_run_has_no_times_and_no_rates() -> None:
    line = update(1, memory={"allocated": 5, "reserved": 6})
    found = sent(Curves(start_ms=0, emulated=True), [line])
    assert set(found) == {
        "loss/train",
        "optim/lr",
        "optim/grad_norm",
        "optim/skipped",
        "memory/peak_allocated_bytes",
        "memory/peak_reserved_bytes",
    }


def test_a_skipped_attempt_has_a_step_of_its_own() -> None:
    skipped = update(3, update=2, applied=False, skipped_reason="nonfinite_gradient")
    lines = [update(1), update(2), skipped, update(4, update=3)]
    found = sent(Curves(start_ms=0, emulated=False), lines)
    assert found["optim/skipped"] == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 0.0)]
    assert found["loss/train"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


def test_an_evaluation_stands_at_the_last_attempt_before_it() -> None:
    lines: list[UpdateRecord | EvaluationRecord] = [
        EvaluationRecord(update=0, eval_loss=9.0, eval_tokens=5),
        update(1),
        update(2, update=1, applied=False, skipped_reason="nonfinite_gradient"),
        EvaluationRecord(update=1, eval_loss=4.0, eval_tokens=5),
    ]
    assert sent(Curves(start_ms=0, emulated=False), lines)["loss/eval"] == [(0, 9.0), (2, 4.0)]


def test_a_value_that_is_not_finite_is_nan_beside_a_point_that_says_which() -> None:
    losses = {1: 3.5, 2: math.nan, 3: math.inf, 4: -math.inf}
    curves = Curves(start_ms=0, emulated=False)
    found = sent(curves, [update(n, loss=loss) for n, loss in losses.items()])
    assert found["loss/train"][0] == (1, 3.5)
    assert [step for step, value in found["loss/train"] if math.isnan(value)] == [2, 3, 4]
    assert found["nonfinite/loss/train"] == [(2, 1.0), (3, 2.0), (4, 3.0)]
    assert curves.tags() == {"nonfinite_first_step": "2", "last_finite_loss": "3.5"}


def test_a_run_that_stays_finite_has_no_tag_about_it() -> None:
    curves = Curves(start_ms=0, emulated=False)
    sent(curves, [update(1), update(2, grad_norm=math.inf)])
    assert curves.tags() == {}


def quick(attempt: int, **changes: Any) -> UpdateRecord:
    return update(attempt, total=SIXTY_FOURTH, **changes)


def test_fast_updates_are_thinned_to_five_a_second_with_first_and_last() -> None:
    # 13/64 s is the first multiple of 1/64 s that is at least 0.2 s.
    found = sent(Curves(start_ms=0, emulated=False), [quick(n) for n in range(1, 65)])
    assert found["loss/train"] == [(n, float(n)) for n in (1, 14, 27, 40, 53, 64)]


def test_thinning_keeps_what_was_skipped_not_finite_or_evaluated() -> None:
    lines: list[UpdateRecord | EvaluationRecord] = [quick(n) for n in range(1, 11)]
    lines[2] = quick(3, applied=False, skipped_reason="nothing_valid", loss=None)
    lines[4] = quick(5, loss=math.nan)
    lines[6] = quick(7, grad_norm=math.inf)
    lines[7] = quick(8, marks=("evaluation",))
    lines.insert(8, EvaluationRecord(update=8, eval_loss=7.0, eval_tokens=5))
    found = sent(Curves(start_ms=0, emulated=False), lines)
    assert [step for step, _ in found["optim/lr"]] == [1, 3, 5, 7, 8, 10]
    assert found["loss/eval"] == [(8, 7.0)]


def test_warm_up_updates_stay_in_the_time_curve() -> None:
    found = sent(Curves(start_ms=0, emulated=False), [update(1, marks=("warmup",)), update(2)])
    assert found["time/step_s"] == [(1, 0.5), (2, 0.5)]


def test_a_timestamp_is_the_start_plus_the_step_time_so_far() -> None:
    curves = Curves(start_ms=1000, emulated=False)
    assert [p.timestamp for p in curves.take(update(1))][:1] == [1500]
    assert [p.timestamp for p in curves.take(update(2))][:1] == [2000]


def test_a_timestamp_of_an_emulated_run_holds_no_time() -> None:
    curves = Curves(start_ms=1000, emulated=True)
    assert [p.timestamp for line in (update(1), update(2)) for p in curves.take(line)[:1]] == [
        1001,
        1002,
    ]


def test_figures_from_a_clock_are_told_by_their_name() -> None:
    timed = ["step_s_median", "step_s_p95", "useful_tokens_per_s", "mfu"]
    others = ["train_loss", "eval_loss", "peak_allocated_bytes", "updates_skipped"]
    assert [is_timed(name) for name in timed] == [True] * 4
    assert [is_timed(name) for name in others] == [False] * 4


# --- addresses (case C60) ---


@pytest.mark.parametrize(
    ("given_uri", "resolved"),
    [
        (None, "sqlite:////launch/here/mlflow.db"),
        ("sqlite:///runs.db", "sqlite:////launch/here/runs.db"),
        ("sqlite:////abs/runs.db", "sqlite:////abs/runs.db"),
        ("sqlite:///runs.db?timeout=5", "sqlite:////launch/here/runs.db?timeout=5"),
        ("http://localhost:5000", "http://localhost:5000"),
        ("postgresql+psycopg2://u@h/db", "postgresql+psycopg2://u@h/db"),
    ],
)
def test_a_relative_file_counts_from_the_launch_folder(
    given_uri: str | None, resolved: str
) -> None:
    assert resolve_uri(given_uri, Path("/launch/here")) == resolved


@pytest.mark.parametrize(
    "uri", ["./mlruns", "mlruns", "/tmp/mlruns", "file:///tmp/mlruns", "", "sqlite://", "sqlite:"]
)
def test_a_folder_or_a_store_without_a_file_is_refused_with_a_remedy(uri: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve_uri(uri, Path("/launch"))
    (fault,) = caught.value.faults
    assert fault.key == "tracking.uri"
    assert repr(uri) in fault.given
    assert fault.next_step == "type tracking.uri=sqlite:///mlflow.db"


@pytest.mark.parametrize("folder", ["/50%41", "/what?"])
def test_a_path_that_the_store_would_read_otherwise_is_refused(folder: str) -> None:
    with pytest.raises(UserError, match="question mark or a per cent sign"):
        resolve_uri(None, Path(folder))


def test_a_folder_that_does_not_exist_fails_the_probe() -> None:
    with pytest.raises(Exception, match="unable to open database file"):
        probe("sqlite:////no/such/folder/mlflow.db", 1.0)


def test_a_file_that_is_no_database_fails_the_probe(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a database, only some longer text\n" * 40)
    with pytest.raises(Exception, match="not a database"):
        probe(f"sqlite:///{tmp_path}/notes.txt", 1.0)


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_dead_server_is_reported_at_once_by_its_address() -> None:
    port = closed_port()
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=f"127.0.0.1:{port} does not answer"):
        probe_server(f"http://127.0.0.1:{port}", 5.0)
    assert time.monotonic() - began < 2


def test_a_proxy_is_probed_in_place_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        port = proxy.getsockname()[1]
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        probe_server("http://tracking.invalid:5000", 2.0)
        assert proxy.accept()[0].fileno() > 0


def test_work_that_takes_too_long_is_left_behind() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        within(0.05, lambda: time.sleep(3))
    assert time.monotonic() - began < 1


def test_two_threads_are_not_alone_in_a_folder_at_once(tmp_path: Path) -> None:
    order: list[str] = []

    def second() -> None:
        with alone_in(tmp_path):
            order.append("second")

    with alone_in(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert list(tmp_path.iterdir()) == []


def test_work_in_time_gives_its_result_or_its_error() -> None:
    assert within(5, lambda: None) is None
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 / 0)


# --- processes (case C61) ---


def test_a_process_is_known_while_it_lives_and_gone_once_it_was_reaped() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        recorded = identity(child.pid)
        assert not is_gone(recorded)
    assert is_gone(recorded)
    assert not is_gone(identity())


def test_another_process_with_the_same_number_does_not_count() -> None:
    boot, space, pid, start = identity().split(" ")
    assert is_gone(f"{boot} {space} {pid} {int(start) - 1}")


def test_a_restart_of_the_machine_ends_every_process() -> None:
    _, *rest = identity().split(" ")
    assert is_gone(" ".join(["another-boot", *rest]))


def test_what_cannot_be_seen_or_read_is_not_taken_for_gone() -> None:
    boot, _, pid, start = identity().split(" ")
    assert not is_gone(f"{boot} pid:[1] {pid} {int(start) - 1}")
    assert not is_gone("")


# --- following ---


def follow(client: Memory, folder: Path, spec: RunSpec = SPEC) -> Follower:
    return store_of(client).follow(folder, spec)


def points_of(client: Memory, name: str, run_id: str = "run0") -> list[tuple[int, float]]:
    return [(p.step, p.value) for p in client.runs[run_id]["points"] if p.name == name]


def test_a_followed_run_ends_with_all_points_figures_tags_and_files(tmp_path: Path) -> None:
    client = Memory()
    follower = follow(client, tmp_path)
    write_journal(tmp_path, [update(1), update(2)])
    wait_for(lambda: client.runs and points_of(client, "loss/train"))
    write_journal(tmp_path, [update(3)])
    write_record(tmp_path, memory={"largest_live_object": "logits"})
    assert follower.close(5.0)
    run = client.runs["run0"]
    assert run["status"] == "FINISHED"
    assert points_of(client, "loss/train") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert points_of(client, "summary/train_loss") == [(0, 2.0)]
    assert run["files"] == ["record.json", "journal.jsonl"]
    assert run["tags"]["status"] == "ok"
    assert run["tags"]["quality"] == "unchecked"
    assert run["tags"]["largest_live_object"] == "logits"
    assert run["params"]["precision.format"] == "bf16"
    assert run["params"]["micro_batch"] == "2"
    assert json.loads((tmp_path / "tracking.json").read_text())["complete"] is True


@pytest.mark.parametrize(
    ("status", "ended", "quality"),
    [
        ("ok", "FINISHED", "unchecked"),
        ("diverged", "FAILED", "diverged"),
        ("oom", "FAILED", "error"),
        ("error", "FAILED", "error"),
        ("killed", "KILLED", "error"),
    ],
)
def test_each_status_ends_the_run_as_the_contract_says(
    tmp_path: Path, status: str, ended: str, quality: str
) -> None:
    client = Memory()
    write_record(tmp_path, status)
    assert follow(client, tmp_path).close(5.0)
    run = client.runs["run0"]
    assert (run["status"], run["tags"]["status"]) == (ended, status)
    assert run["tags"]["quality"] == quality


def test_a_run_without_a_record_is_killed(tmp_path: Path) -> None:
    client = Memory()
    write_journal(tmp_path, [update(1)])
    assert follow(client, tmp_path).close(5.0)
    assert client.runs["run0"]["status"] == "KILLED"
    assert client.runs["run0"]["tags"]["status"] == "killed"
    assert points_of(client, "loss/train") == [(1, 1.0)]


def test_an_emulated_run_has_no_figures_from_a_clock(tmp_path: Path) -> None:
    client = Memory()
    write_journal(tmp_path, [update(1)])
    write_record(tmp_path, summary={"train_loss": 2.0, "step_s_p95": 1.0, "mfu": 0.5})
    assert follow(client, tmp_path, replace(SPEC, emulated=True)).close(5.0)
    names = {p.name for p in client.runs["run0"]["points"]}
    assert "summary/train_loss" in names
    assert not any(re.search("time/|per_s|step_s|mfu", name) for name in names)


@pytest.mark.parametrize("call", ["upload", "log", "log_params"])
def test_a_run_is_ended_even_when_everything_before_that_fails(tmp_path: Path, call: str) -> None:
    client = Memory()
    follower = follow(client, tmp_path)
    wait_for(lambda: follower.run_id)
    client.failing[call] = (OSError("the disk is full"), -1)
    write_journal(tmp_path, [update(1)])
    write_record(tmp_path, config={"more": 1})
    assert not follower.close(0.5)
    assert client.runs["run0"]["status"] == "FINISHED"
    state = json.loads((tmp_path / "tracking.json").read_text())
    assert state["problem"] == "OSError: the disk is full"
    assert state["complete"] is False


def test_a_journal_that_cannot_be_read_does_not_leave_the_run_running(tmp_path: Path) -> None:
    client = Memory()
    write_record(tmp_path)
    write_journal(tmp_path, [update(1)])
    follower = follow(client, tmp_path)
    wait_for(lambda: client.batches)
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write("not json\n")
    assert not follower.close(0.5)
    assert client.runs["run0"]["status"] == "FINISHED"
    assert points_of(client, "loss/train") == [(1, 1.0)]


def test_a_store_that_fails_for_a_while_loses_and_repeats_nothing(tmp_path: Path) -> None:
    client = Memory(failing={"log": (OSError("gone"), 2)})
    write_journal(tmp_path, [update(1), update(2)])
    write_record(tmp_path)
    follower = follow(client, tmp_path)
    wait_for(lambda: follower.problem == "OSError: gone")
    assert follower.close(10.0)
    assert points_of(client, "loss/train") == [(1, 1.0), (2, 2.0)]


def test_a_run_that_was_created_without_an_answer_is_not_created_again(tmp_path: Path) -> None:
    client = Memory(failing={"create_run": (TimeoutError("no answer"), 1)})
    write_record(tmp_path)
    follower = follow(client, tmp_path)
    assert follower.close(10.0)
    assert list(client.runs) == ["run0"]
    assert client.runs["run0"]["status"] == "FINISHED"


def test_a_store_that_hangs_holds_nobody_up_and_the_state_says_so(tmp_path: Path) -> None:
    client = Memory(hold=threading.Event())
    write_record(tmp_path)
    follower = follow(client, tmp_path)
    wait_for(lambda: client.calls)
    began = time.monotonic()
    assert not follower.close(0.3)
    assert time.monotonic() - began < 1
    state = json.loads((tmp_path / "tracking.json").read_text())
    assert (state["complete"], state["run_id"]) == (False, None)
    assert "did not answer within 0.3 s" in state["problem"]
    assert client.hold is not None
    client.hold.set()


def test_a_store_that_never_answers_calls_is_tried_with_growing_pauses(tmp_path: Path) -> None:
    client = Memory(failing={"search": (OSError("gone"), -1)})
    follower = follow(client, tmp_path)
    time.sleep(2.5)
    # Attempts at 0, 1 and 3 s.
    assert client.calls.count("search") == 2
    assert not follower.close(0.1)
    assert json.loads((tmp_path / "tracking.json").read_text())["run_id"] is None


def test_one_call_never_carries_more_than_the_store_takes(tmp_path: Path) -> None:
    client = Memory()
    write_journal(tmp_path, [update(n) for n in range(1, 301)])
    write_record(tmp_path)
    assert follow(client, tmp_path).close(10.0)
    assert max(client.batches) <= CALL_LIMIT
    assert points_of(client, "loss/train") == [(n, float(n)) for n in range(1, 301)]


def test_calls_are_a_second_apart_while_a_run_is_followed(tmp_path: Path) -> None:
    client = Memory()
    follower = follow(client, tmp_path)
    for attempt in range(1, 16):
        write_journal(tmp_path, [update(attempt)])
        time.sleep(0.1)
    assert client.calls.count("log") <= 2
    assert follower.close(5.0)
    assert len(points_of(client, "loss/train")) == 15


def test_calls_that_take_processor_time_are_further_apart(tmp_path: Path) -> None:
    """Two calls of the store, 10 ms in all, are followed by a pause of 2 s."""
    client = Memory(busy_s=0.005)
    write_journal(tmp_path, [update(1)])
    follower = follow(client, tmp_path)
    wait_for(lambda: client.calls.count("log") == 1)
    write_journal(tmp_path, [update(2)])
    time.sleep(1.5)  # a second would be enough if calls cost nothing
    assert client.calls.count("log") == 1
    assert follower.close(5.0)
    assert len(points_of(client, "loss/train")) == 2
    assert pause_after(0.0) == PACE_S
    assert pause_after(0.4 * SHARE * PAUSE_S) == pytest.approx(0.4 * PAUSE_S)
    assert pause_after(60.0) == PAUSE_S


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority on Linux only")
def test_only_the_following_thread_has_a_low_priority(tmp_path: Path) -> None:
    client = Memory()
    before = os.getpriority(os.PRIO_PROCESS, 0)
    write_journal(tmp_path, [update(1)])
    assert follow(client, tmp_path).close(5.0)
    assert client.niceness == {NICENESS}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_database_that_is_locked_is_tried_again() -> None:
    client = Memory(failing={"log": (RuntimeError("database is locked"), 2)})
    store = store_of(client)
    run_id = store.start_parent(sweep_id="s", name="sweep", tags={})
    assert store.tag(run_id, {"quality": "passed"})
    assert client.runs["run0"]["tags"]["quality"] == "passed"
    assert client.calls.count("log") == 3


def test_a_parent_run_is_ended_even_when_its_report_cannot_be_uploaded(tmp_path: Path) -> None:
    client = Memory(failing={"upload": (OSError("full"), -1)})
    store = store_of(client)
    run_id = store.start_parent(sweep_id="s", name="sweep", tags={})
    report = tmp_path / "report.html"
    report.write_text("<p>")
    assert not store.finish_parent(run_id, status="error", artifacts=[report])
    assert client.runs["run0"]["status"] == "FAILED"


def test_a_parent_that_was_never_created_is_reported_and_raises_nothing() -> None:
    assert not store_of(Memory()).finish_parent(None, status="ok")


# --- forwarding what is missing (case C65) ---


def test_forwarding_goes_on_behind_what_arrived_with_the_same_thinning(tmp_path: Path) -> None:
    lines = [quick(n) for n in range(1, 65)]
    write_journal(tmp_path, lines[:20])
    client = Memory()
    store = store_of(client)
    first = Forwarder(store, tmp_path, State(spec=SPEC, uri="memory", experiment="runner"))
    assert first.advance()
    write_journal(tmp_path, lines[20:])
    second = Forwarder(store, tmp_path, first.state)
    assert second.advance()
    second.finish()
    assert points_of(client, "loss/train") == [(n, float(n)) for n in (1, 14, 27, 40, 53, 64)]


def test_a_journal_that_is_sent_twice_gives_the_same_points(tmp_path: Path) -> None:
    write_journal(tmp_path, [quick(n) for n in range(1, 65)])
    client = Memory()
    state = State(spec=SPEC, uri="memory", experiment="runner")
    for _ in range(2):
        forwarder = Forwarder(store_of(client), tmp_path, state)
        assert forwarder.advance()
    points = client.runs["run0"]["points"]
    assert len(points) == 2 * len(set(points)) > 0


def test_a_state_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    state = State(spec=SPEC, uri="sqlite:////a.db", experiment="e", run_id="r", offset=7)
    state.write(tmp_path)
    assert State.read(tmp_path) == state
    assert State.read(tmp_path / "elsewhere") is None


def test_a_state_of_a_later_version_is_refused(tmp_path: Path) -> None:
    replace(State(spec=SPEC, uri="u", experiment="e"), schema_version=2).write(tmp_path)
    with pytest.raises(ValueError, match="later version, 2"):
        State.read(tmp_path)


def test_a_run_needs_a_name() -> None:
    with pytest.raises(ValueError, match="setup: given ''"):
        replace(SPEC, setup="")
