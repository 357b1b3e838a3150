"""The clock of an update: marks on the device's own timeline that partition it into phases.

An interval runs from one mark to the next and belongs to the phase entered at its start, so the
phases of an update sum to its total by construction, and the totals of consecutive updates sum
to the time of the loop. On CUDA the marks are events on the compute stream: nothing waits, and an
interval is exposed time, since what overlaps on other streams or on the host does not lengthen
it. On a CPU, where the arithmetic is synchronous, they are readings of `perf_counter`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

from runner.records import PHASES

HOST_PHASES = ("data", "transfer")


@dataclass(kw_only=True)
class Interval:
    """The marks of one update: phase entered, host time and, on CUDA, event of each mark."""

    phases: list[str] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one closed update.

    total: from its start to the start of the next. exposed: by phase; they sum to total.
    host: seconds the host spent in `data` and `transfer`, exposed or not.
    """

    total: float
    exposed: dict[str, float]
    host: dict[str, float]


def spent(phases: list[str], stamps: list[float], wanted: tuple[str, ...]) -> dict[str, float]:
    """Seconds by phase between consecutive stamps; `stamps` has one more entry than `phases`."""
    found = dict.fromkeys(wanted, 0.0)
    for phase, begin, end in zip(phases, stamps, stamps[1:], strict=False):
        if phase in found:
            found[phase] += end - begin
    return found


class HostClock:
    """Marks by `perf_counter`, for devices that compute synchronously."""

    def __init__(self) -> None:
        self.open: Interval | None = None

    def enter(self, phase: str) -> None:
        """From now on time belongs to `phase`."""
        assert self.open is not None
        self.open.phases.append(phase)
        self.open.host.append(perf_counter())

    def start(self, phase: str = "data") -> Interval | None:
        """Start an update in `phase`; close and return the one before."""
        now = perf_counter()
        closed = self.open
        if closed is not None:
            closed.host.append(now)
        self.open = Interval(phases=[phase], host=[now])
        return closed

    def stop(self) -> Interval | None:
        """Close the last update without starting another."""
        closed = self.start()
        self.open = None
        return closed

    def times(self, closed: Interval) -> Times:
        """Seconds of a closed update."""
        exposed = spent(closed.phases, closed.host, PHASES)
        return Times(
            total=closed.host[-1] - closed.host[0],
            exposed=exposed,
            host={phase: exposed[phase] for phase in HOST_PHASES},
        )


class CudaClock(HostClock):
    """Marks by events on the current stream, beside the host's readings."""

    def __init__(self) -> None:
        super().__init__()
        self.spare: list[torch.cuda.Event] = []

    def _event(self) -> torch.cuda.Event:
        event = self.spare.pop() if self.spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def enter(self, phase: str) -> None:
        """From now on time on the compute stream belongs to `phase`."""
        super().enter(phase)
        assert self.open is not None
        self.open.events.append(self._event())

    def start(self, phase: str = "data") -> Interval | None:
        """Start an update; the closing mark of the one before is the same event."""
        closed = super().start(phase)
        event = self._event()
        if closed is not None:
            closed.events.append(event)
        assert self.open is not None
        self.open.events.append(event)
        return closed

    def times(self, closed: Interval) -> Times:
        """Seconds of a closed update; waits until its last event has completed."""
        events = closed.events
        events[-1].synchronize()
        stamps = [0.0]
        for begin, end in pairwise(events):
            stamps.append(stamps[-1] + begin.elapsed_time(end) / 1e3)
        self.spare.extend(events[:-1])
        return Times(
            total=stamps[-1],
            exposed=spent(closed.phases, stamps, PHASES),
            host=spent(closed.phases, closed.host, HOST_PHASES),
        )


def clock_for(device: torch.device) -> HostClock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else HostClock()


def marks_per_update(micro_batches: int) -> int:
    """Marks of one update: the boundary, data, clearing, transfer, forward and backward of each
    micro-batch, the parameters' update, and the loop's own rest."""
    return 5 + 3 * micro_batches


def mark_cost(device: torch.device, marks: int = 200) -> float:
    """Median seconds that one mark costs the host, measured now on a clock of its own."""
    clock = clock_for(device)
    costs = []
    clock.start()
    for _ in range(marks):
        begin = perf_counter()
        clock.enter("other")
        costs.append(perf_counter() - begin)
    clock.stop()
    return sorted(costs)[marks // 2]
