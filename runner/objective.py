"""What one update minimises: a sum over targets, divided once by a denominator.

The denominator is over the whole update, so accumulation does not change the objective: the
mean of per-micro-batch means would weigh the targets of a sparse micro-batch more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.contracts import IGNORE, MicroBatch

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


@dataclass(frozen=True, kw_only=True)
class SequenceMean:
    """Mean over the examples of each example's mean cross-entropy over its targets.

    Examples without any target are not counted.
    """

    def weights(self, micro: MicroBatch) -> Tensor | None:
        """1 / n for each of the n targets of an example."""
        import torch

        valid = micro.targets != IGNORE
        owner = owners(micro)
        targets = torch.bincount(owner[valid], minlength=micro.examples)
        shares = 1.0 / targets.clamp(min=1)
        return torch.where(valid, shares[owner.clamp(min=0)], 0.0)

    def denominator(self, micros: Sequence[MicroBatch]) -> float:
        """Number of examples of the update that have a target."""
        return float(sum(with_targets(micro) for micro in micros))


def with_targets(micro: MicroBatch) -> int:
    """Number of examples of a micro-batch that have a target."""
    import torch

    return int(torch.bincount(owners(micro)[micro.targets != IGNORE]).count_nonzero())


def owners(micro: MicroBatch) -> Tensor:
    """(rows, length) number of the example of each position; -1 may stand on padding."""
    import torch

    if micro.sequence is not None:
        return micro.sequence
    return torch.arange(len(micro.targets))[:, None].expand_as(micro.targets)


@dataclass(frozen=True, kw_only=True)
class ClassWeighted:
    """Weighted mean of the targets' cross-entropy, the weight given by the target token.

    classes: weight by token id. other: weight of every other token.
    """

    classes: dict[int, float]
    other: float = 1.0

    def __post_init__(self) -> None:
        for name, weight in [("other", self.other), *self.classes.items()]:
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"{name}: given {weight}; allowed: a finite weight, 0 or more")
        if any(token < 0 for token in self.classes):
            raise ValueError(f"classes: given {self.classes}; allowed: token ids, 0 or more")

    def weights(self, micro: MicroBatch) -> Tensor | None:
        """The weight of each target's token."""
        import torch

        found = torch.full(micro.targets.shape, self.other, dtype=torch.float32)
        for token, weight in self.classes.items():
            found[micro.targets == token] = weight
        return found.masked_fill(micro.targets == IGNORE, 0.0)

    def denominator(self, micros: Sequence[MicroBatch]) -> float:
        """Sum of the weights of the update's targets, as they are applied (rounded to FP32)."""
        weights = [self.weights(micro) for micro in micros]
        return sum(float(found.double().sum()) for found in weights if found is not None)
