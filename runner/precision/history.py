"""A scale predicted from the largest magnitudes of earlier tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from runner.precision.policies import to_fp8


class DelayedScale(nn.Module):
    """FP8 rounding with the scale that the last `length` tensors called for.

    scale: what the next tensor is multiplied by: the format's largest value over the largest of
    `amaxes`, over 2**margin; 1 before the first tensor. used: what the last one was multiplied by.
    amaxes: (history,) the newest first, 0 where there was none.
    """

    scale: Tensor
    used: Tensor
    amaxes: Tensor

    def __init__(self, dtype: torch.dtype, *, history: int, margin: int = 0) -> None:
        super().__init__()
        self.dtype = dtype
        self.limit = torch.finfo(dtype).max / 2.0**margin
        for name, value in (
            ("scale", torch.ones(())),
            ("used", torch.ones(())),
            ("amaxes", torch.zeros(history)),
        ):
            self.register_buffer(name, value, persistent=False)

    def first(self, x: Tensor) -> Tensor:
        """Round by the predicted scale, and take this tensor into the history."""
        self.used.copy_(self.scale)
        self.amaxes.copy_(self.amaxes.roll(1))
        self.amaxes[0] = x.abs().amax()
        amax = self.amaxes.amax()
        known = (amax > 0) & amax.isfinite()
        self.scale.copy_(torch.where(known, self.limit / amax, self.scale))
        return self.again(x)

    def forward_first(self, x: Tensor) -> Tensor:
        """As `first`; what a backward pass computes again is rounded as it was before."""
        recomputing = torch._C._current_graph_task_id() != -1
        return self.again(x) if recomputing else self.first(x)

    def again(self, x: Tensor) -> Tensor:
        """Round by the scale that was used last."""
        return to_fp8(x, self.dtype, self.used)
