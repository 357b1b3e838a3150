"""In which order examples are trained on: a pure function of seed and epoch, nothing stored."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Draw(NamedTuple):
    """The examples of one update.

    epoch, number: which epoch, and which update within it, both from 0.
    indices: example numbers, in order.
    """

    epoch: int
    number: int
    indices: NDArray[np.intp]


def order(count: int, *, seed: int, epoch: int) -> NDArray[np.intp]:
    """(count,) permutation of the examples, the same for the same seed and epoch."""
    return permutation(count, seed=seed, key=(epoch,))


def permutation(count: int, *, seed: int, key: tuple[int, ...]) -> NDArray[np.intp]:
    """(count,) permutation, the same for the same seed and key.

    Philox and SeedSequence, unlike `Generator.permutation`, are promised to give the same numbers
    in every NumPy version (NEP 19), so the order is made by sorting raw 64-bit draws.
    """
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=key))
    return np.argsort(bits.random_raw(count), kind="stable")


def updates_per_epoch(count: int, batch: int) -> int:
    """Updates that visit every example once; the last may be shorter.

    Raises ValueError without examples or with a batch below 1.
    """
    if count < 1 or batch < 1:
        raise ValueError(f"count and batch: given {count} and {batch}; allowed: 1 or more")
    return -(-count // batch)


class Order(Protocol):
    """Updates by number, from 0, without end."""

    def __getitem__(self, update: int) -> Draw: ...


class Numbered:
    """Updates of `batch` examples, the next ones in the order of the epoch each.

    An update never crosses an epoch's end: the last of an epoch is shorter, never dropped. Looked
    up by number without replaying those before; keeps one epoch's order at a time.
    """

    def __init__(self, count: int, *, batch: int, seed: int) -> None:
        self.count, self.batch, self.seed = count, batch, seed
        self.per_epoch = updates_per_epoch(count, batch)
        self._epoch = -1
        self._shuffled: NDArray[np.intp] = np.empty(0, dtype=np.intp)

    def shuffled(self, epoch: int) -> NDArray[np.intp]:
        """(count,) the examples in the order of an epoch."""
        if epoch != self._epoch:
            self._shuffled = order(self.count, seed=self.seed, epoch=epoch)
            self._epoch = epoch
        return self._shuffled

    def __getitem__(self, update: int) -> Draw:
        epoch, index = divmod(update, self.per_epoch)
        start = index * self.batch
        return Draw(epoch, index, self.shuffled(epoch)[start : start + self.batch])
