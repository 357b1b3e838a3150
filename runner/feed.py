"""The micro-batches of each update, in the order that seed and epoch fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from runner.contracts import Batching, Example, MicroBatch, Objective
from runner.data.order import updates_from

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SCAN_UPDATES = 2000
"""How many updates ahead the largest micro-batch is looked for."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Feed:
    """Draws updates from a split.

    micro: examples of one micro-batch (`batch / accum`). pin: whether tensors go to pinned host
    memory, from which copies to a CUDA device are asynchronous.
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

    def collate(self, indices: NDArray[np.intp]) -> list[MicroBatch]:
        """The micro-batches of one update over the examples of the given indices."""
        chosen = [self.examples[int(i)] for i in indices]
        micros = self.batching.micro_batches(
            chosen, size=self.micro, pad_id=self.pad_id, seq_len=self.seq_len
        )
        return [self._finish(micro) for micro in micros]

    def _finish(self, micro: MicroBatch) -> MicroBatch:
        weights = self.objective.weights(micro)
        if weights is not None:
            micro = replace(micro, weights=weights)
        return pinned(micro) if self.pin else micro

    def draws(self, start: int = 0) -> Iterator[list[MicroBatch]]:
        """Update after update without end, from update number `start` of the run on."""
        order = updates_from(start, count=len(self.examples), batch=self.batch, seed=self.seed)
        for draw in order:
            yield self.collate(draw.indices)

    def probes(self, count: int) -> list[list[MicroBatch]]:
        """Micro-batches whose memory bounds that of the first `count` updates of the order.

        The largest micro-batch that opens an update, and the largest that follows another one
        (gradients are then already held), each in its own update and with at most one
        predecessor. Looks at SCAN_UPDATES updates at most.
        """
        plain = replace(self, pin=False)
        first: list[MicroBatch] = []
        later: list[MicroBatch] = []
        for number, micros in enumerate(plain.draws()):
            if number >= min(count, SCAN_UPDATES):
                break
            if not first or micros[0].counts.slots > first[-1].counts.slots:
                first = micros[:1]
            for before, micro in pairwise(micros):
                if not later or micro.counts.slots > later[-1].counts.slots:
                    later = [before, micro]
        return [found for found in (first, later) if found]


def pinned(micro: MicroBatch) -> MicroBatch:
    """The micro-batch with its tensors in page-locked memory."""
    return micro.moved(lambda held: held.pin_memory())
