"""In which order examples are trained on: a pure function of seed and epoch, nothing stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

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


def place(update: int, *, count: int, batch: int) -> tuple[int, int]:
    """Epoch, and index within it, of the update with this number, both from 0."""
    return divmod(update, updates_per_epoch(count, batch))


def updates(
    count: int, *, batch: int, seed: int, start_epoch: int = 0, start_index: int = 0
) -> Iterator[Draw]:
    """The updates from a place on, without end and without replaying those before.

    An update never crosses an epoch's end: the last of an epoch is shorter, never dropped.
    """
    per_epoch = updates_per_epoch(count, batch)
    epoch, index = start_epoch, start_index
    while True:
        shuffled = order(count, seed=seed, epoch=epoch)
        for number in range(index, per_epoch):
            yield Draw(epoch, number, shuffled[number * batch : (number + 1) * batch])
        epoch, index = epoch + 1, 0


def updates_from(update: int, *, count: int, batch: int, seed: int) -> Iterator[Draw]:
    """`updates`, starting at the update with this number (from 0)."""
    epoch, index = place(update, count=count, batch=batch)
    return updates(count, batch=batch, seed=seed, start_epoch=epoch, start_index=index)


class Numbered:
    """The same updates, looked up by number in any order; keeps one epoch's order at a time."""

    def __init__(self, count: int, *, batch: int, seed: int) -> None:
        self._count, self._batch, self._seed = count, batch, seed
        self._epoch = -1
        self._shuffled: NDArray[np.intp] = np.empty(0, dtype=np.intp)

    def __getitem__(self, update: int) -> Draw:
        epoch, index = place(update, count=self._count, batch=self._batch)
        if epoch != self._epoch:
            self._shuffled = order(self._count, seed=self._seed, epoch=epoch)
            self._epoch = epoch
        start = index * self._batch
        return Draw(epoch, index, self._shuffled[start : start + self._batch])
