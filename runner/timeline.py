"""What a timeline of two updates shows, from spans alone. Pure: no torch, no files.

Times are seconds. A span is work of the device: a kernel or copy on CUDA, an operator on a CPU
(which is its own device).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOP = 10


@dataclass(frozen=True, kw_only=True)
class Span:
    """Work called `name` from `start` to `end`."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Operation:
    """All calls of one operator: device seconds, FLOPs of products, bytes of operands."""

    name: str
    seconds: float
    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """FLOPs per byte of operands and results."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Derived from the device work of some updates.

    seconds: from the start of the first update to the end of the last. busy_share: share of it
    with device work. idle_before_first_s, tail_s: mean per update, before its first and after its
    last device work. gap_share: share of the time between first and last work without any.
    top: the operations with most time. memory_bound_share, compute_bound_share: share of device
    time in operations below and above the ridge of the device; None when its peaks are unknown.
    """

    updates: int
    seconds: float
    busy_share: float
    idle_before_first_s: float
    gap_share: float
    tail_s: float
    top: Sequence[Mapping[str, Any]]
    memory_bound_share: float | None
    compute_bound_share: float | None


def covered(spans: Iterable[Span]) -> float:
    """Seconds covered by at least one span."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda s: s.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total


def within(spans: Iterable[Span], whole: Span) -> list[Span]:
    """Spans that start inside `whole`, cut at its end."""
    return [
        Span(name=s.name, start=s.start, end=min(s.end, whole.end))
        for s in spans
        if whole.start <= s.start < whole.end
    ]


def timeline(
    *,
    updates: Sequence[Span],
    work: Sequence[Span],
    operations: Sequence[Operation],
    ridge: float | None,
) -> Timeline:
    """The figures of a timeline.

    updates: one span per update. work: device work. operations: by operator, for the top list and
    the bounds. ridge: peak FLOP/s over peak bytes/s of the device, FLOPs per byte, or None.
    """
    total = sum(update.seconds for update in updates)
    inside = [within(work, update) for update in updates]
    firsts, lasts, reach = 0.0, 0.0, 0.0
    for update, spans in zip(updates, inside, strict=True):
        begin = min((s.start for s in spans), default=update.end)
        end = max((s.end for s in spans), default=update.end)
        firsts += begin - update.start
        lasts += update.end - end
        reach += end - begin
    busy = sum(covered(spans) for spans in inside)
    memory, compute = bounds(operations, ridge)
    return Timeline(
        updates=len(updates),
        seconds=total,
        busy_share=busy / total if total else 0.0,
        idle_before_first_s=firsts / len(updates),
        gap_share=(reach - busy) / reach if reach else 0.0,
        tail_s=lasts / len(updates),
        top=top(operations),
        memory_bound_share=memory,
        compute_bound_share=compute,
    )


def bounds(
    operations: Sequence[Operation], ridge: float | None
) -> tuple[float | None, float | None]:
    """Shares of device time below and at or above the ridge (roofline)."""
    total = sum(op.seconds for op in operations)
    if ridge is None or not total:
        return None, None
    memory = sum(op.seconds for op in operations if op.intensity < ridge)
    return memory / total, 1 - memory / total


def top(operations: Sequence[Operation]) -> list[dict[str, Any]]:
    """The TOP operations by device time, with their share and intensity."""
    total = sum(op.seconds for op in operations)
    ranked = sorted(operations, key=lambda op: -op.seconds)[:TOP]
    return [
        {
            "name": op.name,
            "seconds": op.seconds,
            "share": op.seconds / total if total else 0.0,
            "flops_per_byte": op.intensity,
        }
        for op in ranked
    ]
