"""The micro-batches of each update, in the order that seed and epoch fix."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count as numbers_from
from itertools import islice, pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any

from runner.contracts import Batching, Example, Fault, MicroBatch, Objective, Stream, UserError
from runner.data.order import Numbered, Order
from runner.data.processes import prepared_ahead

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SCAN_UPDATES = 2000
"""How many updates ahead the largest micro-batch is looked for."""
SCAN_STREAM = 64
"""The same in a stream, where looking ahead means reading and tokenizing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Feed:
    """Draws updates from a split.

    micro: examples of one micro-batch (`batch / accum`). pin: whether tensors go to pinned host
    memory, from which copies to a CUDA device are asynchronous. stream: where the examples come
    from in place of `examples`. whole_updates: whether a stream whose epoch has fewer examples
    than `batch` is a mistake. workers, prefetch: see `runner.data.feeding.Feeding`.
    """

    examples: Sequence[Example]
    batching: Batching
    objective: Objective
    pad_id: int
    seq_len: int
    batch: int
    micro: int
    seed: int
    pin: bool = False
    stream: Stream | None = None
    whole_updates: bool = False
    workers: int = 0
    prefetch: int = 2

    def collate(self, indices: NDArray[np.intp]) -> list[MicroBatch]:
        """The micro-batches of one update over the examples of the given indices."""
        return self._collated([self.examples[int(i)] for i in indices])

    def _collated(self, chosen: Sequence[Example]) -> list[MicroBatch]:
        micros = self.batching.micro_batches(
            chosen, size=self.micro, pad_id=self.pad_id, seq_len=self.seq_len
        )
        return [self._finish(micro) for micro in micros]

    def _finish(self, micro: MicroBatch) -> MicroBatch:
        weights = self.objective.weights(micro)
        if weights is not None:
            micro = replace(micro, weights=weights)
        return pinned(micro) if self.pin else micro

    def draws(self, start: int = 0) -> Generator[list[MicroBatch], None, None]:
        """Update after update without end, from update number `start` of the run on.

        A stream that starts later is read from its beginning.
        """
        if self.stream is not None:
            drawn = self.stream.updates(batch=self.batch, seed=self.seed)
            for found in islice(drawn, start, None):
                yield self._collated(found.examples)
        order = self.order()
        for number in numbers_from(start):
            yield self.collate(order[number].indices)

    def order(self) -> Order:
        """Which examples each update has: the next `batch`, unless the batching arranges them."""
        plain = Numbered(len(self.examples), batch=self.batch, seed=self.seed)
        arrange = getattr(self.batching, "arrange", None)
        if arrange is None:
            return plain
        arranged: Order = arrange(plain, lambda number: self.examples[number].length)
        return arranged

    def ahead(self, start: int = 0) -> Generator[Prepared, None, None]:
        """`draws` with the seconds that each update took to prepare, by processes ahead of time.

        The same updates in the same order for any number of processes. Of a stream the processes
        read and tokenize; the update is put together here.
        """
        if self.stream is not None:
            drawn = self.stream.updates(
                batch=self.batch, seed=self.seed, workers=self.workers, prefetch=self.prefetch
            )
            for found in islice(drawn, start, None):
                begin = perf_counter()
                micros = self._collated(found.examples)
                yield Prepared(micros, found.seconds + perf_counter() - begin)
        plain = replace(self, pin=False)
        order = self.order()

        def prepare(number: int) -> Prepared:
            begin = perf_counter()
            micros = plain.collate(order[number].indices)
            return Prepared(micros, perf_counter() - begin)

        yield from prepared_ahead(
            prepare,
            numbers_from(start),
            workers=self.workers,
            prefetch=self.prefetch,
            pin=self.pin,
        )

    def probes(self, count: int) -> list[list[MicroBatch]]:
        """Micro-batches whose memory bounds that of the first `count` updates of the order.

        The largest micro-batch that opens an update, and the largest that follows another one
        (gradients are then already held), each in its own update and with at most one
        predecessor. Looks at SCAN_UPDATES updates at most (SCAN_STREAM of a stream). Raises
        UserError for a stream whose whole updates would be short.
        """
        limit = min(count, SCAN_UPDATES if self.stream is None else SCAN_STREAM)
        # Examples that take their time on purpose are looked at without.
        examples = getattr(self.examples, "undelayed", self.examples)
        plain = replace(self, pin=False, examples=examples)
        first: list[MicroBatch] = []
        later: list[MicroBatch] = []
        for number, micros in enumerate(plain.draws()):
            if number >= limit:
                break
            if number == 0 and self.whole_updates:
                refuse_short(sum(micro.examples for micro in micros), self.batch)
            if not first or micros[0].counts.slots > first[-1].counts.slots:
                first = micros[:1]
            for before, micro in pairwise(micros):
                if not later or micro.counts.slots > later[-1].counts.slots:
                    later = [before, micro]
        return [found for found in (first, later) if found]


def refuse_short(examples: int, batch: int) -> None:
    """Raise UserError when the first update of an epoch, of `examples`, is not a whole one."""
    if examples < batch:
        raise UserError(
            Fault(
                key="batch",
                given=f"{batch} examples per update; an epoch of the stream has {examples}",
                allowed=f"1 to {examples}",
                next_step=f"batch={examples}, more data, or data.on_bad=skip for updates that are "
                "shorter",
            )
        )


@dataclass(frozen=True, eq=False)
class Prepared:
    """An update and the seconds that preparing it took, wherever that was done.

    Between processes it travels as plain arrays: tensors would go through shared memory, which
    containers keep small, and take a file handle each.
    """

    micros: list[MicroBatch]
    seconds: float

    def pin_memory(self) -> Prepared:
        """With tensors in page-locked memory."""
        return Prepared([pinned(micro) for micro in self.micros], self.seconds)

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = [micro.moved(partial(_inner, lambda one: one.numpy())) for micro in self.micros]
        return _unpacked, (arrays, self.seconds)


def _unpacked(arrays: list[MicroBatch], seconds: float) -> Prepared:
    import torch

    return Prepared([micro.moved(partial(_inner, torch.from_numpy)) for micro in arrays], seconds)


def _inner(change: Callable[[Any], Any], held: Any) -> Any:
    """A tensor changed, or what holds one in `bounds` with that one changed."""
    if hasattr(held, "bounds"):
        return type(held)(held.lengths, change(held.bounds))
    return change(held)


def pinned(micro: MicroBatch) -> MicroBatch:
    """The micro-batch with its tensors in page-locked memory."""
    return micro.moved(lambda held: held.pin_memory())
