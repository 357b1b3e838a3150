"""Learning-rate schedules, as factors by applied update. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


def _warm(index: int, warmup: int) -> float:
    """Linear warm-up: the first update already moves, update `warmup` has the full rate."""
    return min(1.0, (index + 1) / warmup) if warmup else 1.0


def _check_warmup(warmup: int) -> None:
    if warmup < 0:
        raise ValueError(f"warmup: given {warmup}; allowed: 0 or more updates")


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Linear warm-up over `warmup` updates, then factor 1."""

    warmup: int = 0

    def __post_init__(self) -> None:
        _check_warmup(self.warmup)

    def factors(self, updates: int) -> list[float]:
        """`factors[i]` for the update after i applied ones."""
        return [_warm(i, self.warmup) for i in range(updates)]


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Linear warm-up, then half a cosine from 1 to `final` at the last update."""

    warmup: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        _check_warmup(self.warmup)
        if not 0 <= self.final <= 1:
            raise ValueError(f"final: given {self.final}; allowed: 0 to 1")

    def factors(self, updates: int) -> list[float]:
        """`factors[i]` for the update after i applied ones."""
        return [self._factor(i, updates) for i in range(updates)]

    def _factor(self, index: int, updates: int) -> float:
        if index < self.warmup:
            return _warm(index, self.warmup)
        span = max(1, updates - 1 - self.warmup)
        progress = min(1.0, (index - self.warmup) / span)
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress))
