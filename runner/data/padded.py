"""One example per row, padded on the right: the baseline batching."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from runner.contracts import IGNORE, Counts, Example, MicroBatch, Numerics
from runner.data.heads import HeadChoice

if TYPE_CHECKING:
    from runner.data.order import Numbered, Order


@dataclass(frozen=True, kw_only=True)
class Padded(HeadChoice):
    """Micro-batches of consecutive examples, padded to the longest example of each."""

    numerics: ClassVar[Numerics] = "same"

    def micro_batches(
        self, examples: Sequence[Example], *, size: int, pad_id: int, seq_len: int
    ) -> list[MicroBatch]:
        """See `runner.contracts.Batching`. Raises ValueError for an example over `seq_len`."""
        refuse_overlong(examples, seq_len)
        return [self.choose(collate(chunk, pad_id=pad_id)) for chunk in chunks(examples, size)]


@dataclass(frozen=True, kw_only=True)
class PaddedMax(HeadChoice):
    """Micro-batches of consecutive examples, padded to `seq_len`: one shape, most padding."""

    numerics: ClassVar[Numerics] = "same"

    def micro_batches(
        self, examples: Sequence[Example], *, size: int, pad_id: int, seq_len: int
    ) -> list[MicroBatch]:
        """See `runner.contracts.Batching`. Raises ValueError for an example over `seq_len`."""
        refuse_overlong(examples, seq_len)
        return [
            self.choose(collate(chunk, pad_id=pad_id, length=seq_len))
            for chunk in chunks(examples, size)
        ]


@dataclass(frozen=True, kw_only=True)
class Bucketed(HeadChoice):
    """The update's examples sorted by length, then cut into micro-batches padded to the longest.

    The examples of the update are the same, so its gradient is; only padding shrinks, and only
    where there is more than one micro-batch.

    window: 1, or how many updates share out their examples sorted by length. Each epoch still has
    every example once, but other ones together, so losses differ: numerics are `close`.
    """

    window: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ValueError(f"window: given {self.window}; allowed: 1 or more")

    @property
    def numerics(self) -> Numerics:
        """`same` as long as no example changes its update."""
        return "close" if self.rearranges else "same"

    @property
    def rearranges(self) -> bool:
        """Whether examples change their update."""
        return self.window > 1

    def arrange(self, order: Numbered, length: Callable[[int], int]) -> Order:
        """See `runner.contracts.Batching`."""
        from runner.data.arranged import Windowed

        return Windowed(order, length, window=self.window) if self.rearranges else order

    def micro_batches(
        self, examples: Sequence[Example], *, size: int, pad_id: int, seq_len: int
    ) -> list[MicroBatch]:
        """See `runner.contracts.Batching`. Raises ValueError for an example over `seq_len`."""
        refuse_overlong(examples, seq_len)
        ordered = sorted(examples, key=lambda example: example.length)
        return [self.choose(collate(chunk, pad_id=pad_id)) for chunk in chunks(ordered, size)]


def chunks(examples: Sequence[Example], size: int) -> Iterator[Sequence[Example]]:
    """Consecutive runs of `size` examples; the last may be shorter."""
    for start in range(0, len(examples), size):
        yield examples[start : start + size]


def refuse_overlong(examples: Sequence[Example], seq_len: int) -> None:
    """Raise ValueError for an example over `seq_len`."""
    longest = max(example.length for example in examples)
    if longest > seq_len:
        raise ValueError(f"an example has {longest} tokens; allowed: up to {seq_len}")


def collate(examples: Sequence[Example], *, pad_id: int, length: int | None = None) -> MicroBatch:
    """One micro-batch, `length` wide or as wide as its longest example.

    Padding is known by length: its target is IGNORE whatever ids stand there.
    """
    import torch

    lengths = tuple(example.length for example in examples)
    shape = (len(lengths), length or max(lengths))
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    targets = np.full(shape, IGNORE, dtype=np.int64)
    for row, (example, end) in enumerate(zip(examples, lengths, strict=True)):
        input_ids[row, :end] = example.ids
        shifted_into(targets[row, :end], example)
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


def shifted_into(targets: NDArray[np.int64], example: Example) -> None:
    """Fill (n,) `targets` with the token after each position, IGNORE where it is not predicted.

    The causal shift happens here and nowhere else.
    """
    targets.fill(IGNORE)
    np.copyto(targets[:-1], example.ids[1:], where=example.loss[1:])
