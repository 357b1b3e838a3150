"""MXFP8: E4M3 values with one power-of-two scale for 32 of them (OCP MX specification 1.0)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from runner.contracts import Requirements
from runner.precision.lowbit import LowBit

if TYPE_CHECKING:
    from torch import Tensor, nn

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
        """torchao's MXFP8 products."""
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        return mx_layer(linear, KernelPreference.AUTO, multiple=self.multiple)


def mx_layer(linear: nn.Linear, preference: Any, *, multiple: int) -> nn.Module:
    """A layer of torchao's MXFP8 products. Its kernels take BF16 only, so the weight, which stays
    FP32, is cast for each product."""
    import torch
    from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    from runner.precision.native import NativeLinear

    def kernel(rows: Tensor) -> Tensor:
        out: Tensor = _to_mxfp8_then_scaled_mm(
            rows.to(torch.bfloat16),
            linear.weight.to(torch.bfloat16),
            kernel_preference=preference,
            scale_calculation_mode=ScaleCalculationMode.RCEIL,
        )
        return out.to(rows.dtype)

    return NativeLinear(linear, kernel, multiple=multiple)
