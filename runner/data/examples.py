"""Stored examples, and how a row of text becomes them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from runner.contracts import Example
from runner.data.texts import Row
from runner.data.tokenizer import Tokenizer, exact_ids

OVERLONG = ("truncate", "cut")
"""What happens to a text longer than the limit: `truncate` drops its right end, `cut` makes
consecutive examples of it."""


def encode(rows: Sequence[Row], tokenizer: Tokenizer) -> list[Example]:
    """Each row whole, as one example: what the tokenizer begins with, the parts, their ends.

    All parts go to the tokenizer in one call, and the ids are views of one array. Raises
    ValueError for an id that the vocabulary does not hold.
    """
    parted = [row.parts(tokenizer) for row in rows]
    begin = np.array(tokenizer.begin_ids, dtype=np.int64)
    end = np.array([tokenizer.eos_id], dtype=np.int64)
    found = iter(tokenizer.encode([part.text for parts in parted for part in parts]))
    ids: list[NDArray[np.integer[Any]]] = []
    loss: list[bool] = []
    lengths: list[int] = []
    for parts in parted:
        first = len(ids)
        for part in parts:
            if part.begins:
                ids.append(begin)
                loss.append(False)
            ids.append(next(found))
            loss.append(part.loss)
            if part.ends:
                ids.append(end)
                loss.append(part.loss)
        lengths.append(sum(map(len, ids[first:])))
    if not ids:
        return []
    flat = exact_ids(np.concatenate(ids), tokenizer.vocab)
    mask = np.repeat(loss, [len(piece) for piece in ids])
    edges = [0, *accumulate(lengths)]
    return [Example(ids=flat[start:stop], loss=mask[start:stop]) for start, stop in pairwise(edges)]


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


def stored(table: Any) -> StoredExamples:
    """View an Arrow table with the columns `ids` and `loss`, without copying it."""
    columns = zip(table.column("ids").chunks, table.column("loss").chunks, strict=True)
    return StoredExamples([chunk_of(ids, loss) for ids, loss in columns])


def chunk_of(ids: Any, loss: Any) -> Chunk:
    """Two Arrow list arrays of the same rows as flat arrays."""
    offsets = ids.offsets.to_numpy()
    if not np.array_equal(offsets, loss.offsets.to_numpy()):
        raise ValueError("ids and loss mask differ in length")
    return Chunk(
        ids=ids.values.to_numpy(), loss=loss.values.to_numpy().view(np.bool_), offsets=offsets
    )
