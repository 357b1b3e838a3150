"""FP16 weights with FP32 masters and loss scaling (Micikevicius et al., arXiv:1710.03740)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from runner.contracts import BuiltOptimizer, OptimizerBuilder, OptimizerPart, Recipe, ScalePolicy

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Fp16Master(Recipe):
    """The model computes on an FP16 copy; the optimizer updates persistent FP32 weights.

    Every gradient leaves the backward pass in FP16, scaled, and is added to its master's gradient
    in FP32 at once: unscaling, norm, clipping and update never see FP16. After an update the
    masters are rounded into the copy.

    scaling: dynamic loss scaling; FP16 gradients below 2**-25 would round to zero without it.
    """

    formats: ClassVar[Mapping[str, str]] = {
        "storage": "fp16 with fp32 masters",
        "compute": "fp16",
        "accumulate": "fp32",
        "state": "fp32",
    }
    scaling: ScalePolicy = field(default_factory=ScalePolicy)

    def scaler(self) -> ScalePolicy | None:
        """The configured scaling."""
        return self.scaling

    def evaluation(self, model: nn.Module) -> AbstractContextManager[Any]:
        """FP32 arithmetic on the masters: they are the trained weights."""
        from runner.precision.storage import widened

        masters: Mapping[str, Tensor] = getattr(model, "fp32_masters", {})
        return widened(model, masters)

    def optimizer(self) -> OptimizerBuilder | None:
        """The optimizer part's own, over the masters."""
        return build


def build(part: OptimizerPart, model: nn.Module, device: torch.device) -> BuiltOptimizer:
    """Masters from the model's FP32 weights, the model in FP16, and an optimizer over the first."""
    import torch

    from runner.precision.storage import Masters

    masters = Masters(model, torch.float16)
    optimizer = part.build(masters, device)
    masters.follow(optimizer)
    return BuiltOptimizer(
        optimizer=optimizer, skips_on_device=part.skips_on_device, masters=masters.by_name
    )
