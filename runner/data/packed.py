"""The examples of a micro-batch one behind the other in a single row: no padding at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from runner.contracts import Counts, Example, MicroBatch, Numerics
from runner.data.heads import HeadChoice
from runner.data.padded import chunks, refuse_overlong, shifted_into


@dataclass(frozen=True, kw_only=True)
class Packed(HeadChoice):
    """Micro-batches of the same consecutive examples as `padded` makes, each one row of documents.

    Attention stays within each document, positions start anew in each, and no target lies in
    another document than its position, so the update is that of the documents alone.
    """

    numerics: ClassVar[Numerics] = "same"

    def micro_batches(
        self, examples: Sequence[Example], *, size: int, pad_id: int, seq_len: int
    ) -> list[MicroBatch]:
        """See `runner.contracts.Batching`. Raises ValueError for an example over `seq_len`."""
        refuse_overlong(examples, seq_len)
        return [self.choose(pack(chunk)) for chunk in chunks(examples, size)]


def pack(examples: Sequence[Example]) -> MicroBatch:
    """One micro-batch of shape (1, sum of the lengths)."""
    import torch

    from models.documents import Documents

    lengths = tuple(example.length for example in examples)
    total = sum(lengths)
    targets = np.empty(total, dtype=np.int64)
    begin = 0
    for example, length in zip(examples, lengths, strict=True):
        shifted_into(targets[begin : begin + length], example)
        begin += length

    def row(pieces: Sequence[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(pieces).astype(np.int64))[None]

    return MicroBatch(
        input_ids=row([example.ids for example in examples]),
        targets=torch.from_numpy(targets)[None],
        positions=row([np.arange(length) for length in lengths]),
        segments=Documents(lengths),
        sequence=row([np.full(length, number) for number, length in enumerate(lengths)]),
        lengths=lengths,
        counts=Counts(
            useful=sum(example.useful for example in examples), nonpad=total, slots=total
        ),
    )
