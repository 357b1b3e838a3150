"""One example per row, padded on the right: the baseline batching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from runner.contracts import IGNORE, Counts, Example, MicroBatch, Numerics


@dataclass(frozen=True, kw_only=True)
class Padded:
    """Micro-batches of consecutive examples, padded to the longest example of each."""

    numerics: ClassVar[Numerics] = "same"

    def micro_batches(
        self, examples: Sequence[Example], *, size: int, pad_id: int, seq_len: int
    ) -> list[MicroBatch]:
        """See `runner.contracts.Batching`. Raises ValueError for an example over `seq_len`."""
        longest = max(example.length for example in examples)
        if longest > seq_len:
            raise ValueError(f"an example has {longest} tokens; allowed: up to {seq_len}")
        return [
            collate(examples[start : start + size], pad_id=pad_id)
            for start in range(0, len(examples), size)
        ]


def collate(examples: Sequence[Example], *, pad_id: int) -> MicroBatch:
    """One micro-batch. The causal shift happens here and nowhere else.

    Padding is known by length: its target is IGNORE whatever ids stand there.
    """
    import torch

    lengths = tuple(example.length for example in examples)
    shape = (len(lengths), max(lengths))
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    targets = np.full(shape, IGNORE, dtype=np.int64)
    for row, (example, length) in enumerate(zip(examples, lengths, strict=True)):
        input_ids[row, :length] = example.ids
        np.copyto(targets[row, : length - 1], example.ids[1:], where=example.loss[1:])
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        targets=torch.from_numpy(targets),
        lengths=lengths,
        counts=Counts(
            useful=int(np.count_nonzero(targets != IGNORE)),
            nonpad=sum(lengths),
            slots=input_ids.size,
        ),
    )
