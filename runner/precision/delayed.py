"""FP8 products with scales from earlier tensors: Transformer Engine's delayed scaling."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from runner.contracts import Requirements
from runner.precision.lowbit import LowBit

if TYPE_CHECKING:
    import torch
    from torch import nn

    from runner.precision.linear import Products

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


@dataclass(frozen=True, kw_only=True)
class Delayed(LowBit):
    """One scale a tensor, from the largest magnitude that its last `history` tensors had.

    Values beyond what the scale foresaw saturate. E4M3 forward, E5M2 for gradients. The first
    tensor of all has the scale 1. A history goes on with every micro-batch.
    """

    narrow: ClassVar[str] = "fp8"
    visible: ClassVar[bool] = False
    requirements: ClassVar[Requirements] = Requirements(
        cuda=True, capability=(8, 9), modules=("transformer_engine",)
    )
    history: int = 1024
    margin: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.history < 1:
            raise ValueError(f"history: given {self.history}; allowed: 1 or more")

    def operands(self) -> Mapping[str, tuple[str, str]]:
        """Formats by role."""
        return {
            "output": (E4M3, E4M3),
            "grad_input": (E5M2, E4M3),
            "grad_weight": (E5M2, E4M3),
        }

    def rounding(self) -> Products:
        """Three histories: of input, weight and output gradient; each product after the first
        takes the scale that its tensor had there."""
        from runner.precision.history import DelayedScale
        from runner.precision.linear import Operand, Products
        from runner.precision.policies import E4M3 as E4M3_TYPE
        from runner.precision.policies import E5M2 as E5M2_TYPE

        def scale(dtype: torch.dtype) -> DelayedScale:
            return DelayedScale(dtype, history=self.history, margin=self.margin)

        x, weight, gradient = scale(E4M3_TYPE), scale(E4M3_TYPE), scale(E5M2_TYPE)
        return Products(
            output=(
                Operand(format=E4M3, round=x.forward_first),
                Operand(format=E4M3, round=weight.forward_first),
            ),
            grad_input=(
                Operand(format=E5M2, round=gradient.first),
                Operand(format=E4M3, round=weight.again),
            ),
            grad_weight=(
                Operand(format=E5M2, round=gradient.again),
                Operand(format=E4M3, round=x.again),
            ),
            states={"input": x, "weight": weight, "grad_output": gradient},
        )

    def kernels(self) -> AbstractContextManager[Any]:
        """Transformer Engine's context."""
        from runner.precision.engine import engine_context

        return engine_context("DelayedScaling", margin=self.margin, amax_history_len=self.history)

    def native(self, linear: nn.Linear) -> nn.Module:
        """Transformer Engine's layer."""
        from runner.precision.engine import engine_layer

        return engine_layer(linear, multiple=self.multiple)
