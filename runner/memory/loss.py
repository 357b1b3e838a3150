"""The summed loss from the final hidden states; the logits are often the largest object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.contracts import IGNORE, Lever

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Full(Lever):
    """All logits at once: (rows, length, vocab), cross-entropy in FP32."""

    def loss_sum(
        self, hidden: Tensor, head_weight: Tensor, targets: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Scalar float32 (float64 for float64 models), see LossLever."""
        from torch.nn.functional import cross_entropy, linear

        logits = linear(hidden, head_weight).flatten(0, 1)
        if logits.element_size() < 4:
            logits = logits.float()
        flat = targets.flatten()
        if weights is None:
            return cross_entropy(logits, flat, ignore_index=IGNORE, reduction="sum")
        losses = cross_entropy(logits, flat, ignore_index=IGNORE, reduction="none")
        return (losses * weights.flatten()).sum()
