"""Stored examples, and how a text becomes them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from runner.contracts import Example
from runner.data.texts import Text
from runner.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from datasets import Dataset

OVERLONG = ("truncate", "cut")
"""What happens to a text longer than the limit: `truncate` drops its right end, `cut` makes
consecutive examples of it."""


def encode(text: Text, tokenizer: Tokenizer) -> Example:
    """The whole text as one example: prompt, completion, end-of-text token.

    Prompt and completion are encoded apart, so that no token spans the mask's edge.
    """
    prompt = tokenizer.encode(text.prompt)
    completion = tokenizer.encode(text.completion)
    ids = np.concatenate([prompt, completion, [tokenizer.eos_id]]).astype(np.int64)
    return Example(ids=ids, loss=np.arange(len(ids)) >= len(prompt))


def ends(length: int, limit: int) -> list[int]:
    """Ends of the consecutive pieces of at most `limit` tokens.

    A last piece of one token would have no target, so it takes one from the piece before.
    """
    cuts = [*range(limit, length, limit), length]
    if len(cuts) > 1 and length - cuts[-2] == 1:
        cuts[-2] -= 1
    return cuts


def pieces(example: Example, *, limit: int, overlong: str) -> list[Example]:
    """The example within the limit: one piece (`truncate`), or as many as it takes (`cut`)."""
    if overlong == "truncate":
        return [Example(ids=example.ids[:limit], loss=example.loss[:limit])]
    cuts = ends(example.length, limit)
    return [
        Example(ids=example.ids[start:end], loss=example.loss[start:end])
        for start, end in zip([0, *cuts[:-1]], cuts, strict=True)
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """Consecutive examples as flat arrays; example i is `offsets[i]` to `offsets[i + 1]`."""

    ids: NDArray[np.integer[Any]]
    loss: NDArray[np.bool_]
    offsets: NDArray[np.integer[Any]]


class StoredExamples(Sequence[Example]):
    """Examples that are views of flat (memory-mapped) arrays, so that a look-up copies nothing.

    starts: number of examples before each chunk, and at the end their total.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = tuple(chunks)
        self.starts = [0, *accumulate(len(chunk.offsets) - 1 for chunk in chunks)]

    def __len__(self) -> int:
        return self.starts[-1]

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        number = bisect_right(self.starts, place) - 1
        chunk = self.chunks[number]
        row = place - self.starts[number]
        start, end = chunk.offsets[row], chunk.offsets[row + 1]
        return Example(ids=chunk.ids[start:end], loss=chunk.loss[start:end])


def stored(dataset: Dataset) -> StoredExamples:
    """View a dataset with the columns `ids` and `loss`, without copying it."""
    columns = zip(
        dataset.data.column("ids").chunks, dataset.data.column("loss").chunks, strict=True
    )
    return StoredExamples([chunk_of(ids, loss) for ids, loss in columns])


def chunk_of(ids: Any, loss: Any) -> Chunk:
    """Two Arrow list arrays of the same rows as flat arrays."""
    offsets = ids.offsets.to_numpy()
    if not np.array_equal(offsets, loss.offsets.to_numpy()):
        raise ValueError("ids and loss mask differ in length")
    return Chunk(
        ids=ids.values.to_numpy(), loss=loss.values.to_numpy().view(np.bool_), offsets=offsets
    )
