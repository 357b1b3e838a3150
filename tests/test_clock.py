"""Tests of runner/measure/clock.py; the CUDA clock is tested against a fake of torch's events."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest
import torch

from runner.measure import clock as clock_module
from runner.measure.clock import CudaClock, HostClock, mark_cost, marks_per_update, spent
from runner.step import measured_update
from tests.support import examples, padded, tiny_gpt, training_of


def test_an_interval_belongs_to_the_phase_entered_at_its_start() -> None:
    phases = ["data", "forward", "backward", "forward"]
    found = spent(phases, [0.0, 1.0, 3.0, 6.0, 10.0], ("data", "forward", "backward", "other"))
    assert found == {"data": 1.0, "forward": 2.0 + 4.0, "backward": 3.0, "other": 0.0}


def test_the_end_of_one_update_is_the_start_of_the_next() -> None:
    clock = HostClock()
    assert clock.start() is None
    first = clock.start()
    second = clock.stop()
    assert first is not None
    assert second is not None
    assert first.host[-1] == second.host[0]


def test_host_times_of_data_and_transfer_stand_beside() -> None:
    clock = HostClock()
    clock.start("data")
    time.sleep(0.01)
    clock.enter("forward")
    closed = clock.stop()
    assert closed is not None
    times = clock.times(closed)
    assert times.host["data"] == times.exposed["data"] >= 0.01
    assert set(times.host) == {"data", "transfer"}


@dataclass
class Stream:
    """A device whose time the test sets; events complete when it says so."""

    now: float = 0.0
    made: int = 0
    waits: int = 0


@dataclass
class Event:
    stream: Stream
    at: float = field(default=0.0)

    def record(self) -> None:
        self.at = self.stream.now

    def synchronize(self) -> None:
        self.stream.waits += 1

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


def test_device_time_is_taken_from_events_and_waits_only_when_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Stream()

    def make(enable_timing: bool) -> Event:
        stream.made += 1
        return Event(stream)

    monkeypatch.setattr(clock_module.torch.cuda, "Event", make)
    clock = CudaClock()
    totals = []
    closed = clock.start("data")
    for _ in range(5):
        stream.now += 1.0
        clock.enter("forward")
        stream.now += 2.0
        clock.enter("backward")
        stream.now += 4.0
        closed = clock.start("data")
        assert closed is not None
        times = clock.times(closed)
        assert times.exposed["data"] == 1.0
        assert times.exposed["forward"] == 2.0
        assert times.exposed["backward"] == 4.0
        totals.append(times.total)
    assert totals == [7.0] * 5
    assert stream.waits == 5
    assert stream.made < 10  # events are used again


@pytest.mark.timing
def test_a_mark_costs_microseconds() -> None:
    assert 0 < mark_cost(torch.device("cpu")) < 1e-4


def test_the_marks_of_an_update_are_as_many_as_are_stated() -> None:
    """Each stands for one reading of the time, the one that ends the update before included."""
    training, micros, clock = training_of(tiny_gpt()), padded(examples(5, 6, 7), 1), HostClock()
    clock.start("other")
    measured_update(training, lambda: micros, clock)
    closed = clock.stop()
    assert closed is not None and len(closed.phases) == marks_per_update(len(micros)) == 14
