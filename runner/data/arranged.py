"""Orders in which an update is not simply the next `batch` examples: sorted windows, budgets."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from runner.data.order import Draw, Numbered, permutation


class Windowed:
    """Updates whose examples are of similar length, sorted within windows of `window` updates.

    The examples of a window are sorted, cut into its updates, and the updates shuffled, all by
    seed, epoch and the window's place: any update can be looked up by its number. A window ends
    with its epoch, and the shorter update of an epoch stays its last.
    """

    def __init__(self, plain: Numbered, length: Callable[[int], int], *, window: int) -> None:
        self._plain, self._length, self._window = plain, length, window
        self._held: tuple[int, int] | None = None
        self._updates: list[NDArray[np.intp]] = []

    def __getitem__(self, update: int) -> Draw:
        """The update with this number, from 0."""
        epoch, index, _ = self._plain[update]
        first = index - index % self._window
        if self._held != (epoch, first):
            self._updates = self._arranged(update - index + first, epoch, first)
            self._held = (epoch, first)
        return Draw(epoch, index, self._updates[index - first])

    def _arranged(self, update: int, epoch: int, first: int) -> list[NDArray[np.intp]]:
        """The updates of the window that begins with `update`, number `first` of its epoch."""
        last = min(first + self._window, self._plain.per_epoch)
        drawn = [self._plain[update + n].indices for n in range(last - first)]
        together = np.concatenate(drawn)
        lengths = [self._length(int(i)) for i in together]
        ordered = together[np.argsort(lengths, kind="stable")]
        # Each update keeps its size; `ranks` says which piece of the sorted examples it gets.
        ranks = permutation(len(drawn), seed=self._plain.seed, key=(epoch, first))
        sizes = np.empty(len(drawn), dtype=np.intp)
        sizes[ranks] = [len(indices) for indices in drawn]
        pieces = np.split(ordered, np.cumsum(sizes)[:-1])
        return [pieces[rank] for rank in ranks]


class Budgeted:
    """Updates of as many examples, in order, as fit into `tokens`, and at most `batch`.

    Any update can be looked up by its number, at the cost of one pass over the lengths of the
    examples. An update never crosses an epoch's end.
    """

    def __init__(self, plain: Numbered, length: Callable[[int], int], *, tokens: int) -> None:
        self._plain, self._length, self._tokens = plain, length, tokens
        self._lengths: NDArray[np.intp] | None = None
        self._cuts: list[NDArray[np.intp]] = []

    def __getitem__(self, update: int) -> Draw:
        """The update with this number, from 0."""
        epoch, index = 0, update
        while index >= (updates := len(self._bounds(epoch)) - 1):
            epoch, index = epoch + 1, index - updates
        start, end = self._bounds(epoch)[index : index + 2]
        return Draw(epoch, index, self._plain.shuffled(epoch)[start:end])

    def _bounds(self, epoch: int) -> NDArray[np.intp]:
        """Where each update of an epoch begins in its order, and the end of the last."""
        while len(self._cuts) <= epoch:
            self._cuts.append(self._cut(len(self._cuts)))
        return self._cuts[epoch]

    def _cut(self, epoch: int) -> NDArray[np.intp]:
        if self._lengths is None:
            count = self._plain.count
            self._lengths = np.fromiter(map(self._length, range(count)), np.intp, count)
        ends = np.cumsum(self._lengths[self._plain.shuffled(epoch)])
        found = [0]
        while found[-1] < len(ends):
            start = found[-1]
            used = int(ends[start - 1]) if start else 0
            fit = int(np.searchsorted(ends, used + self._tokens, side="right"))
            # An example that alone exceeds the budget has an update of its own.
            found.append(max(start + 1, min(fit, start + self._plain.batch)))
        return np.array(found, dtype=np.intp)
