"""Tests of runner/measure/allocator.py, and of what is done with what it reads.

A fake stands in for CUDA's counters, which belong to the process as the real ones do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner import environment, loop, worker
from runner.compose import command_of
from runner.contracts import MicroBatch
from runner.door import parser
from runner.journal import Journal
from runner.loop import Loop
from runner.measure import allocator as module
from runner.measure.allocator import (
    SNAPSHOT,
    SUMMARY,
    CudaAllocator,
    Peaks,
    Reading,
    allocated,
    exceeded,
    keep_snapshot,
)
from runner.measure.clock import HostClock
from runner.optimizer import Sgd
from runner.outcome.memory import beside_account, memory_figures, memory_of
from runner.outcome.run import Run
from runner.records import RunRecord, UpdateRecord, read_journal, updates_of
from runner.running import run
from runner.step import Outcome, Phases, Training
from tests.support import examples, padded, tiny_gpt, training_of
from tests.test_accounting import update
from tests.test_loop import evaluation_of
from tests.test_same_setup import JOB

GPU = torch.device("cuda", 0)


class Counters:
    """A process's counters: what is held now, and the most since the last reset."""

    def __init__(self) -> None:
        self.models: list[weakref.ref[Any]] = []
        self.most = 0
        self.retries = 0
        self.resets = 0

    @property
    def now(self) -> int:
        living = [model() for model in self.models]
        return sum(p.nbytes for m in living if m is not None for p in m.parameters())

    def touch(self, more: int) -> None:
        """Something is allocated and freed again."""
        self.most = max(self.most, self.now + more)

    def reset(self) -> None:
        self.resets += 1
        self.most = self.now

    def read(self) -> Reading:
        most = max(self.most, self.now)
        return Reading(self.now, most, 2 * most, most // 4, self.retries, 0)


# --- reading ----------------------------------------------------------------------------------

STATS = {
    "allocated_bytes": {"all": {"current": 10, "peak": 50, "allocated": 900, "freed": 890}},
    "reserved_bytes": {"all": {"current": 70, "peak": 80, "allocated": 80, "freed": 10}},
    "inactive_split_bytes": {"all": {"current": 3, "peak": 9, "allocated": 99, "freed": 96}},
    "requested_bytes": {"all": {"current": 9, "peak": 44, "allocated": 800, "freed": 791}},
    "num_alloc_retries": 2,
    "num_ooms": 1,
}
"""The nested form of the counters that torch documents for `torch.cuda.memory_stats`."""


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("native", Reading(10, 50, 80, 9, 2, 1, 44)),
        ("cudaMallocAsync", Reading(10, 50, 80, None, None, None)),
    ],
)
def test_the_peaks_are_read_in_one_call_and_what_a_backend_does_not_count_is_unknown(
    backend: str, expected: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(
        torch.cuda, "memory_stats_as_nested_dict", lambda device: calls.append(device) or STATS
    )
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    counters = CudaAllocator(GPU)
    assert counters.read() == expected
    counters.reset()
    assert calls == [GPU, "reset"]


def scripted(*readings: Reading) -> Any:
    left = list(readings)
    return SimpleNamespace(read=lambda: left.pop(0), reset=lambda: None)


def test_an_update_s_retries_are_those_since_the_update_before() -> None:
    start = Reading(0, 0, 0, 0, 5, 2)
    peaks = Peaks(scripted(start, Reading(1, 8, 9, 3, 5, 2), Reading(1, 7, 9, 4, 8, 3)), None)
    assert peaks.end() == {
        "allocated": 8, "reserved": 9, "inactive_split": 3, "retries": 0, "ooms": 0
    }  # fmt: skip
    assert peaks.end() == {
        "allocated": 7, "reserved": 9, "inactive_split": 4, "retries": 3, "ooms": 1
    }  # fmt: skip


def test_what_is_not_counted_is_absent_and_not_zero() -> None:
    peaks = Peaks(scripted(Reading(0, 0, 0), Reading(1, 8, 9)), 100)
    assert peaks.end() == {"allocated": 8, "reserved": 9}


@pytest.mark.parametrize(("peak", "over"), [(900, None), (1030, None), (1031, 31), (1500, 500)])
def test_a_peak_more_than_three_percent_over_the_account_is_noted_with_its_excess(
    peak: int, over: int | None
) -> None:
    def end(account: int | None, *, copied: bool = False) -> int | None:
        peaks = Peaks(scripted(Reading(0, 0, 0), Reading(0, peak, 2000)), account)
        return peaks.end(copied=copied).get("over_account")

    assert end(1000) == over
    assert end(None) is None
    assert end(1000, copied=True) is None  # copies of the weights for a look are in it


# --- over a run -------------------------------------------------------------------------------


def seen(number: int, *marks: str, **memory: int) -> UpdateRecord:
    return replace(update(number), memory=memory, marks=marks)


RUN = [
    seen(1, allocated=600, reserved=1000, inactive_split=50, retries=1, ooms=0),
    seen(2, allocated=800, reserved=900, inactive_split=90, requested=770, retries=0, ooms=0),
    seen(3, "numerics", allocated=990, reserved=1200, inactive_split=99, retries=2, ooms=0),
]


def test_fragmentation_is_reserved_less_allocated_in_the_update_with_the_peak() -> None:
    found = allocated(RUN)
    assert found is not None
    assert found.peak_allocated_bytes == 800
    assert found.peak_reserved_bytes == 1000
    assert found.unfilled_bytes == 900 - 800
    assert found.unfilled_share == pytest.approx(100 / 900)
    assert found.peak_inactive_split_bytes == 90
    assert found.slack_bytes == 800 - 770
    assert (found.retries, found.ooms) == (3, 0)  # a retry cost time in a marked update as well


def test_without_an_allocator_there_is_nothing_and_without_a_count_no_count() -> None:
    assert allocated([update(1)]) is None
    found = allocated([seen(1, allocated=6, reserved=8)])
    assert found is not None
    assert (found.peak_inactive_split_bytes, found.retries, found.ooms) == (None, None, None)
    assert found.slack_bytes is None


def test_updates_over_the_account_are_counted_with_the_largest_excess() -> None:
    within = seen(1, allocated=1000, reserved=1)
    over = [seen(n, allocated=1000 + more, reserved=1, over_account=more)
            for n, more in ((2, 40), (3, 250))]  # fmt: skip
    looked = seen(4, "numerics", allocated=3000, reserved=1)
    found = exceeded([within, *over, looked], 1000)
    assert found is not None
    assert (found.updates, found.of, found.explained) == (2, 3, True)
    assert (found.largest_bytes, found.largest_share) == (250, 0.25)
    every = exceeded([*over, looked], 1000)
    assert every is not None and not every.explained
    none = exceeded([within], 1000)
    assert none is not None and none.explained
    assert (none.updates, none.largest_bytes) == (0, None)
    assert exceeded([update(1)], 1000) is None


def test_the_record_and_the_summary_say_what_the_account_does_not_explain(tmp_path: Path) -> None:
    known = Run(folder=tmp_path, ticket={"config": {"compile": "off"}})
    known.account = SimpleNamespace(peak_bytes=1000)  # type: ignore[assignment]
    known.loop = SimpleNamespace(records=[  # type: ignore[assignment]
        seen(1, allocated=1500, reserved=2000, inactive_split=10, retries=2, ooms=0,
             over_account=500)
    ])  # fmt: skip
    known.in_use["before"] = {"allocated_bytes": 0}
    found = beside_account(known)
    assert found["account_exceeded"] == {
        "updates": 1, "of": 1, "largest_bytes": 500, "largest_share": 0.5, "explained": False,
        "allowed": 0.03,
    }  # fmt: skip
    assert found["allocator"]["unfilled_bytes"] == 500
    assert found["device"] == {"before": {"allocated_bytes": 0}}
    known.device = GPU
    figures = memory_figures(known)
    assert figures["account_exceeded_updates"] == 1
    assert figures["allocator_retries"] == 2
    assert figures["unfilled_bytes"] == 500


def test_a_compiled_run_says_why_it_has_no_account(tmp_path: Path) -> None:
    known = Run(folder=tmp_path, ticket={"config": {"compile": "default"}})
    known.job = SimpleNamespace()  # type: ignore[assignment]
    found = memory_of(known)
    assert list(found) == ["not_accounted"]
    assert "compiled code has no memory account" in found["not_accounted"]
    known.ticket = {"config": {"compile": "off"}}
    assert memory_of(known) == {}


# --- in the loop ------------------------------------------------------------------------------


def looped(counters: Counters, sizes: Sequence[int], account: int | None, folder: Path) -> Loop:
    """Updates during which so many bytes are allocated at most; evaluations allocate 10**6."""
    folder.mkdir()
    left = iter(sizes)

    def draws() -> Any:
        while True:
            counters.touch(next(left))
            yield padded(examples(9, 12), 2)

    evaluation = evaluation_of(examples(5, 9))
    evaluated = evaluation.run

    def evaluate(*given: Any) -> Any:
        counters.touch(10**6)
        return evaluated(*given)

    object.__setattr__(evaluation, "run", evaluate)
    made = Loop(
        training=training_of(tiny_gpt(), optimizer=Sgd(lr=0.01)),
        draws=draws(),
        clock=HostClock(),
        journal=Journal(folder / "journal.jsonl"),
        evaluation=evaluation,
        updates=len(sizes),
        warmup=0,
        eval_every=1,
        stop=lambda: False,
        peaks=Peaks(counters, account),
    )
    made.run()
    made.journal.close()
    return made


def test_each_update_has_its_own_peak_whatever_came_before_and_only_those_over_are_named(
    tmp_path: Path,
) -> None:
    counters = Counters()
    made = looped(counters, [5000, 9000, 4000, 9270], 9000, tmp_path / "run")
    lines = updates_of(read_journal(tmp_path / "run" / "journal.jsonl"))
    assert [line.memory["allocated"] for line in lines] == [  # type: ignore[index]
        5000, 9000, 4000, 9270
    ]  # fmt: skip
    assert counters.resets == 4
    assert exceeded(made.records, 9000).updates == 0  # type: ignore[union-attr]
    made = looped(counters, [5000, 9000], 8000, tmp_path / "next")
    lines = updates_of(read_journal(tmp_path / "next" / "journal.jsonl"))
    assert [line.memory.get("over_account") for line in lines] == [  # type: ignore[union-attr]
        None, 1000
    ]  # fmt: skip
    # an evaluation marks an update; its memory does not: its time is good
    assert [line.marks for line in lines] == [("evaluation",), ()]


def test_c33_a_small_job_does_not_inherit_the_peak_of_a_large_one_in_its_process(
    tmp_path: Path, corpora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = Counters()
    settled, measured_update = worker.settled, loop.measured_update

    def noted(*given: Any) -> Any:
        job = settled(*given)
        counters.models.append(weakref.ref(job.training.model))
        return job

    def touched(training: Training, draw: Callable[[], Any], clock: Phases) -> Outcome:
        micros: Sequence[MicroBatch] = draw()
        counters.touch(1000 * max(micro.counts.slots for micro in micros))
        return measured_update(training, lambda: micros, clock)

    monkeypatch.setattr(worker, "allocator_of", lambda device: counters)
    monkeypatch.setattr(worker, "memory_in_use", lambda device, now: {"allocated_bytes": now})
    monkeypatch.setattr(worker, "settled", noted)
    monkeypatch.setattr(loop, "measured_update", touched)
    monkeypatch.chdir(tmp_path)
    done: list[Path] = []
    peaks: list[int] = []
    for accum in (8, 1, 8):  # micro-batches of 1, of 8, and of 1 example again
        words = [f"cache='{corpora}'", *JOB, f"accum={accum}", "updates=2", "warmup=0"]
        assert run(command_of(parser().parse_args(words), tmp_path), tmp_path, words) == 0
        (folder,) = {path.parent for path in tmp_path.glob("runs/*/*/record.json")} - set(done)
        done.append(folder)
        record = RunRecord.read(folder)
        assert record is not None
        assert record.memory["device"]["before"]["allocated_bytes"] == 0
        lines = updates_of(read_journal(folder / "journal.jsonl"))
        peaks.append(max(line.memory["allocated"] for line in lines))  # type: ignore[index]
        assert record.memory["allocator"]["peak_allocated_bytes"] == peaks[-1]
    alone, large, after = peaks
    assert alone == after < large


# --- the device, and when memory runs out -----------------------------------------------------


def test_the_memory_of_other_processes_is_told_apart() -> None:
    assert environment.shared_out({7: 100, 9: 30, 3: 5}, own=7) == {
        "own_bytes": 100, "others_bytes": 35, "others": {"3": 5, "9": 30}
    }  # fmt: skip
    assert environment.shared_out({7: 100}, own=7) == {
        "own_bytes": 100, "others_bytes": 0, "others": {}
    }  # fmt: skip
    unknown = environment.shared_out({7: None, 9: None}, own=7)
    assert unknown == {"own_bytes": None, "others_bytes": None, "others": {"9": None}}
    # numbers of the host seen from a container: nobody can say whose they are
    assert environment.shared_out({4711: 100}, own=7) == {}


def test_the_device_s_view_stands_beside_the_allocator_s(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20)
    monkeypatch.setattr(environment, "device_id", lambda device: "GPU-1")
    monkeypatch.setattr(environment.os, "getpid", lambda: 7)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda identity: identity)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: SimpleNamespace(used=40))
    monkeypatch.setattr(
        pynvml,
        "nvmlDeviceGetComputeRunningProcesses",
        lambda handle: [SimpleNamespace(pid=p, usedGpuMemory=m) for p, m in ((7, 25), (8, 15))],
    )
    driver = {"allocated_bytes": 12, "reserved_bytes": 20, "free_bytes": 60, "total_bytes": 100}
    assert environment.memory_in_use(GPU, 12) == {
        **driver, "nvml_used_bytes": 40, "own_bytes": 25, "others_bytes": 15, "others": {"8": 15}
    }  # fmt: skip

    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    found = environment.memory_in_use(GPU, 12)
    assert set(found) == {*driver, "nvml_error"}


def test_the_allocator_s_state_is_kept_once_when_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter(["at the failure", "later"])
    monkeypatch.setattr(torch.cuda, "memory_summary", lambda device: f"table of {device}")
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda name: Path(name).write_text(next(states))
    )
    keep_snapshot(torch.device("cpu"), tmp_path / "artifacts")
    assert not (tmp_path / "artifacts").exists()
    for _ in range(2):
        keep_snapshot(GPU, tmp_path / "artifacts")
    assert (tmp_path / "artifacts" / SNAPSHOT).read_text() == "at the failure"
    assert (tmp_path / "artifacts" / SUMMARY).read_text() == "table of cuda:0"


def test_memory_that_runs_out_in_any_part_of_a_job_keeps_the_state_and_ends_as_oom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Path] = []

    def work(run: Run, stop: Any) -> None:
        run.device = GPU
        raise torch.OutOfMemoryError("planted")

    def keep(device: torch.device, folder: Path) -> None:
        kept.append(folder)
        raise OSError("no space for the snapshot")

    monkeypatch.setattr(worker, "_work", work)
    monkeypatch.setattr(worker, "keep_snapshot", keep)
    known = Run(folder=tmp_path, ticket={})
    status, message = worker._guarded(known, lambda: False)
    assert (status, message) == ("oom", "OutOfMemoryError: planted")
    assert kept == [tmp_path / "artifacts"]


def test_a_cpu_has_no_counters() -> None:
    assert module.allocator_of(torch.device("cpu")) is None
