"""MXFP8: E4M3 values with one power-of-two scale for 32 of them (OCP MX specification 1.0)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from runner.contracts import Requirements
from runner.precision.lowbit import LowBit

if TYPE_CHECKING:
    from torch import nn

    from runner.precision.linear import Products

E4M3 = "float8_e4m3fn"


@dataclass(frozen=True, kw_only=True)
class Mxfp8(LowBit):
    """E4M3 throughout; an E8M0 scale for 32 values along the dimension that is summed over, large
    enough that none saturates. Each operand is rounded anew for each product."""

    narrow: ClassVar[str] = "fp8"
    multiple: ClassVar[int] = 32
    requirements: ClassVar[Requirements] = Requirements(
        cuda=True, capability=(10, 0), modules=("torchao", "triton")
    )

    def operands(self) -> Mapping[str, tuple[str, str]]:
        """Formats by role."""
        return dict.fromkeys(("output", "grad_input", "grad_weight"), (E4M3, E4M3))

    def rounding(self) -> Products:
        """The same for every operand."""
        from runner.precision.linear import Operand, Products
        from runner.precision.policies import mxfp8

        both = (Operand(format=E4M3, round=mxfp8),) * 2
        return Products(output=both, grad_input=both, grad_weight=both)

    def native(self, linear: nn.Linear) -> nn.Module:
        """torchao's MXFP8 layer."""
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear

        from runner.precision.native import NativeLinear, sharing

        def make(inputs: int, outputs: int) -> nn.Module:
            layer: nn.Module = MXFP8Linear(inputs, outputs, bias=False, device="meta")
            return layer

        return NativeLinear(linear, sharing(linear, make), multiple=self.multiple)
