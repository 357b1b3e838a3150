"""Tests of runner/locking.py: jobs on one device never overlap."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid

import pytest

from runner.locking import exclusive, lock_path

HOLD = """
import sys, time
from runner.locking import exclusive
with exclusive(sys.argv[1], waiting=lambda: print("waiting", flush=True), stop=lambda: False):
    print("in", time.monotonic(), flush=True)
    time.sleep(float(sys.argv[2]))
    print("out", time.monotonic(), flush=True)
"""


@pytest.fixture
def device() -> str:
    return f"GPU-{uuid.uuid4()}"


def holder(device: str, seconds: float) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", HOLD, device, str(seconds)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def test_three_processes_on_one_device_take_turns(device: str) -> None:
    started = [holder(device, 0.4) for _ in range(3)]
    outputs = [process.communicate(timeout=30)[0].split() for process in started]
    spans = sorted(
        (float(words[words.index("in") + 1]), float(words[words.index("out") + 1]))
        for words in outputs
    )
    assert spans[0][1] <= spans[1][0]
    assert spans[1][1] <= spans[2][0]
    assert sum("waiting" in words for words in outputs) == 2


def test_devices_do_not_wait_for_each_other(device: str) -> None:
    first = holder(device, 5)
    assert first.stdout is not None
    first.stdout.readline()
    begin = time.monotonic()
    with exclusive(f"{device}-other", waiting=pytest.fail, stop=lambda: False) as held:
        assert held
    assert time.monotonic() - begin < 1
    first.kill()
    first.wait()


def test_a_killed_holder_leaves_no_lock(device: str) -> None:
    first = holder(device, 60)
    assert first.stdout is not None
    first.stdout.readline()
    first.kill()
    first.wait()
    with exclusive(device, waiting=pytest.fail, stop=lambda: False) as held:
        assert held


def test_waiting_can_be_given_up(device: str) -> None:
    noted: list[str] = []
    with (
        exclusive(device, waiting=pytest.fail, stop=lambda: False),
        exclusive(device, waiting=lambda: noted.append("waits"), stop=lambda: True) as held,
    ):
        assert not held
    assert noted == ["waits"]


def test_a_cpu_locks_nothing() -> None:
    with exclusive(None, waiting=pytest.fail, stop=lambda: False) as held:
        assert held
    assert lock_path("GPU-1/2:x").name == "fullstep-GPU-1_2_x.lock"
