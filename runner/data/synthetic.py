"""A corpus without a meaning, whose entropy and lengths are given."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar, overload

import numpy as np
from numpy.typing import NDArray

from runner.contracts import Corpus, Example
from runner.data.examples import Chunk, StoredExamples
from runner.data.feeding import Feeding
from runner.data.pipeline import check_limit

STEPS = 60
"""Halvings of the exponent's range: more than a double has digits."""
STEEPEST = 64.0


@dataclass(frozen=True, kw_only=True)
class Synthetic(Feeding):
    """Tokens drawn independently of each other, so no model can do better than `entropy`.

    examples, held_out: how many to train on, and to hold out. vocab: ids in use; id i has a
        probability in proportion to (i + 1)^-s, with the exponent s that gives `entropy`.
    entropy: nats per token; ln(vocab), at most, makes all ids equally likely.
    length, spread: median of the lengths in tokens, and standard deviation of their logarithm
        (log-normal; 0 makes all equal). Below 2 tokens it is 2; above `seq_len` they are cut.
    source: seed of the draws. delay: seconds that looking up an example to train on takes, to see
        what a slow source does; it changes no example.
    """

    setup_keys: ClassVar[frozenset[str]] = Feeding.setup_keys | {"delay"}
    examples: int = 4096
    held_out: int = 256
    vocab: int = 256
    entropy: float = 4.0
    length: int = 64
    spread: float = 0.6
    source: int = 0
    delay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        lowest = {"examples": 1, "held_out": 1, "vocab": 2, "length": 2, "source": 0}
        lowest |= {"spread": 0, "delay": 0}
        for name, least in lowest.items():
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise ValueError(f"{name}: given {value}; allowed: {least} or more")
        most = math.log(self.vocab)
        if not 0 < self.entropy <= most:
            raise ValueError(
                f"entropy: given {self.entropy}; allowed: above 0, up to ln(vocab) = {most:.6g}"
            )

    def load(self, *, seq_len: int, cache: str) -> Corpus:
        """See `runner.contracts.Data`. Nothing is kept in the cache."""
        started = time.perf_counter()
        check_limit(seq_len)
        bits = np.random.Philox(np.random.SeedSequence(self.source))
        lengths = self._lengths(bits)
        limited = np.minimum(lengths, seq_len)
        ids = self._ids(bits, int(limited.sum()))
        digest = hashlib.sha256(limited.astype("<i8").tobytes() + ids.astype("<i4").tobytes())
        edges = np.concatenate([[0], np.cumsum(limited)])
        train = examples_of(ids, edges[: self.examples + 1])
        return Corpus(
            train=Delayed(train, self.delay) if self.delay else train,
            eval=examples_of(ids, edges[self.examples :]),
            fingerprint=digest.hexdigest(),
            vocab=self.vocab,
            pad_id=0,
            truncated=int((lengths > seq_len).sum()),
            prepared_s=time.perf_counter() - started,
            tokens=int(limited[: self.examples].sum()),
        )

    def _lengths(self, bits: Any) -> NDArray[np.int64]:
        normal = NormalDist()
        draws = uniform(bits, self.examples + self.held_out)
        drawn = (self.length * math.exp(self.spread * normal.inv_cdf(u)) for u in draws.tolist())
        return np.array([max(2, round(one)) for one in drawn], dtype=np.int64)

    def _ids(self, bits: Any, count: int) -> NDArray[np.int32]:
        sums = np.cumsum(probabilities(self.vocab, self.entropy))
        found = np.searchsorted(sums, uniform(bits, count) * sums[-1], side="right")
        ids: NDArray[np.int32] = np.minimum(found, self.vocab - 1).astype(np.int32)
        return ids


def uniform(bits: Any, count: int) -> NDArray[np.float64]:
    """(count,) numbers above 0 and below 1, made of 53 raw bits each: the same in every NumPy."""
    return ((bits.random_raw(count) >> np.uint64(11)) + 0.5) / 2.0**53  # type: ignore[no-any-return]


def entropy_of(p: NDArray[np.float64]) -> float:
    """Entropy of a distribution in nats."""
    held = p[p > 0]
    return float(-(held * np.log(held)).sum())


def probabilities(vocab: int, entropy: float) -> NDArray[np.float64]:
    """(vocab,) in proportion to (i + 1)^-s, s being found by halving: the entropy falls with s."""
    ranks = np.log(np.arange(1, vocab + 1))
    low, high = 0.0, STEEPEST
    for _ in range(STEPS):
        middle = (low + high) / 2
        if entropy_of(zipf(ranks, middle)) > entropy:
            low = middle
        else:
            high = middle
    return zipf(ranks, low)


def zipf(ranks: NDArray[np.float64], s: float) -> NDArray[np.float64]:
    """Probabilities in proportion to exp(-s rank)."""
    weights = np.exp(-s * ranks)
    return weights / weights.sum()  # type: ignore[no-any-return]


def examples_of(ids: NDArray[np.int32], edges: NDArray[np.int64]) -> StoredExamples:
    """Consecutive stretches of `ids` as examples, every token predicted."""
    return StoredExamples([Chunk(ids=ids, loss=np.ones(len(ids), dtype=np.bool_), offsets=edges)])


class Delayed(Sequence[Example]):
    """Examples that take their time; `undelayed` are the same without."""

    def __init__(self, examples: Sequence[Example], seconds: float) -> None:
        self.undelayed, self._seconds = examples, seconds

    def __len__(self) -> int:
        return len(self.undelayed)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | Sequence[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        time.sleep(self._seconds)
        return self.undelayed[index]
