"""What feeds the loop: updates as they are needed, by processes ahead, and copied ahead on CUDA."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from runner.contracts import MicroBatch
from runner.feed import Feed, Prepared


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """What preparing an update took in all, hidden behind other work or not.

    data_s: seconds of preparing it, in whichever process; None where that was the loop's own wait.
    copies: events around its copies on their own stream, or None.
    """

    data_s: float | None = None
    copies: tuple[Any, Any] | None = None

    def totals(self, host: Mapping[str, float]) -> dict[str, float]:
        """Seconds of `data` and `transfer`; `host` has those that the loop itself saw pass.

        Never less than what the loop waited: what is exposed is part of the whole. The copies
        must have completed.
        """
        found = dict(host)
        if self.data_s is not None:
            found["data"] = max(host["data"], self.data_s)
        if self.copies is not None:
            found["transfer"] = self.copies[0].elapsed_time(self.copies[1]) / 1e3
        return found


class Draws(Protocol):
    """Updates one after another. One that knows more of the update that came last than the loop
    sees has it as `work`."""

    def __iter__(self) -> Iterator[list[MicroBatch]]: ...

    def __next__(self) -> list[MicroBatch]: ...

    def close(self) -> None:
        """End what runs beside: processes, threads."""


class Unpacked(Iterator[list[MicroBatch]]):
    """Updates that processes prepare. work: of the update that came last."""

    def __init__(self, prepared: Generator[Prepared, None, None]) -> None:
        self._prepared = prepared
        self.work = Work()

    def __next__(self) -> list[MicroBatch]:
        found = next(self._prepared)
        self.work = Work(data_s=found.seconds)
        return found.micros

    def close(self) -> None:
        """See `Draws`."""
        self._prepared.close()


class Copied(Iterator[list[MicroBatch]]):
    """Updates that are copied to a CUDA device one ahead, on a stream of their own.

    The copies of an update are asked for before the one in front of it is computed, so they
    overlap with it; each micro-batch carries the event that its computation waits for. work: of
    the update that came last. (Written from the documentation; unverified on a GPU.)
    """

    def __init__(self, draws: Draws, device: torch.device) -> None:
        self._draws, self._device = draws, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._held: tuple[list[MicroBatch], Work] | None = None
        self.work = Work()

    def __next__(self) -> list[MicroBatch]:
        current = self._held or self._copy()
        self._held = self._copy()
        micros, self.work = current
        return micros

    def close(self) -> None:
        """See `Draws`."""
        self._held = None
        self._draws.close()

    def _copy(self) -> tuple[list[MicroBatch], Work]:
        micros = next(self._draws)
        seconds = getattr(self._draws, "work", Work()).data_s
        begin, end = event(timed=True), event(timed=True)
        with torch.cuda.stream(self._stream):
            begin.record(self._stream)
            copied = [self._one(micro) for micro in micros]
            end.record(self._stream)
        return copied, Work(data_s=seconds, copies=(begin, end))

    def _one(self, micro: MicroBatch) -> MicroBatch:
        moved = micro.moved(lambda held: held.to(self._device, non_blocking=True))
        ready = event(timed=False)
        ready.record(self._stream)
        return replace(moved, ready=ready)


def event(*, timed: bool) -> Any:
    """A CUDA event, with or without a time."""
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def fed(feed: Feed, device: torch.device) -> Draws:
    """The updates of a run for its loop: plainly one after another, unless something is ahead."""
    draws: Draws = Unpacked(feed.ahead()) if feed.workers else feed.draws()
    return Copied(draws, device) if device.type == "cuda" else draws
