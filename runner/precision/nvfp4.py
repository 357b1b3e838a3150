"""NVFP4: E2M1 values, an E4M3 scale for 16 of them, and an FP32 scale for the tensor."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from runner.contracts import Requirements
from runner.precision.lowbit import LowBit

if TYPE_CHECKING:
    from torch import nn

    from runner.precision.linear import Products

E2M1 = "float4_e2m1fn"
SIZE = 16


@dataclass(frozen=True, kw_only=True)
class Nvfp4(LowBit):
    """Blocks of 16 along the dimension that is summed over, of 16 x 16 for weights; gradients are
    rounded at random (arXiv:2509.25149, without its Hadamard transforms).

    stochastic: whether gradients are rounded at random, else to nearest.
    """

    narrow: ClassVar[str] = "fp4"
    multiple: ClassVar[int] = 32
    visible: ClassVar[bool] = False
    requirements: ClassVar[Requirements] = Requirements(
        cuda=True, capability=(10, 0), modules=("transformer_engine",)
    )
    stochastic: bool = True

    def operands(self) -> Mapping[str, tuple[str, str]]:
        """Formats by role."""
        return dict.fromkeys(("output", "grad_input", "grad_weight"), (E2M1, E2M1))

    def rounding(self) -> Products:
        """Three roundings: of inputs, weights and gradients."""
        from runner.precision.linear import Operand, Products
        from runner.precision.policies import nvfp4

        x = Operand(format=E2M1, round=nvfp4)
        weight = Operand(format=E2M1, round=partial(nvfp4, rows=SIZE))
        gradient = Operand(format=E2M1, round=partial(nvfp4, stochastic=self.stochastic))
        return Products(
            output=(x, weight), grad_input=(gradient, weight), grad_weight=(gradient, x)
        )

    def kernels(self) -> AbstractContextManager[Any]:
        """Transformer Engine's context."""
        from runner.precision.engine import engine_context

        return engine_context(
            "NVFP4BlockScaling",
            disable_rht=True,
            disable_stochastic_rounding=not self.stochastic,
        )

    def native(self, linear: nn.Linear) -> nn.Module:
        """Transformer Engine's layer."""
        from runner.precision.engine import engine_layer

        return engine_layer(linear, multiple=self.multiple)
