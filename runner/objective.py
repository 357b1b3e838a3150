"""What one update minimises: a sum over targets, divided once by a denominator.

The denominator is over the whole update, so accumulation does not change the objective: the
mean of per-micro-batch means would weigh the targets of a sparse micro-batch more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.contracts import MicroBatch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenMean:
    """Mean cross-entropy over the targets of the update."""

    def weights(self, micro: MicroBatch) -> Tensor | None:
        """Every target weighs 1."""
        return None

    def denominator(self, micros: Sequence[MicroBatch]) -> float:
        """Number of targets of the update; 0 when nothing is valid."""
        return float(sum(micro.counts.useful for micro in micros))
