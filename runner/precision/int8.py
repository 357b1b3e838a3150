"""INT8 products over FP32 weights (torchao's INT8 mixed-precision training)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from runner.contracts import Requirements
from runner.precision.lowbit import LowBit

if TYPE_CHECKING:
    from torch import nn

    from runner.precision.linear import Products

INT8 = "int8"


@dataclass(frozen=True, kw_only=True)
class Int8(LowBit):
    """One scale for each row along the dimension that is summed over, sums in INT32.

    On hardware it needs the integer matrix units that torchao's kernels use. A CPU has none here:
    its emulation sums in FP32, which is exact as long as a sum stays below 2**24.
    """

    narrow: ClassVar[str] = "int8"
    requirements: ClassVar[Requirements] = Requirements(
        cuda=True, capability=(8, 0), modules=("torchao", "triton")
    )

    @property
    def formats(self) -> Mapping[str, str]:  # type: ignore[override]
        """Declared formats by role."""
        return {**super().formats, "accumulate": "int32"}

    def operands(self) -> Mapping[str, tuple[str, str]]:
        """Formats by role."""
        return dict.fromkeys(("output", "grad_input", "grad_weight"), (INT8, INT8))

    def rounding(self) -> Products:
        """The same for every operand."""
        from runner.precision.linear import Operand, Products
        from runner.precision.policies import int8

        both = (Operand(format=INT8, round=int8),) * 2
        return Products(output=both, grad_input=both, grad_weight=both)

    def native(self, linear: nn.Linear) -> nn.Module:
        """torchao's INT8 layer."""
        from torchao.prototype.quantized_training.int8_mixed_precision import (
            Int8MixedPrecisionTrainingConfig,
            Int8MixedPrecisionTrainingLinear,
        )

        from runner.precision.native import NativeLinear, sharing

        config = Int8MixedPrecisionTrainingConfig()

        def make(inputs: int, outputs: int) -> nn.Module:
            layer: nn.Module = Int8MixedPrecisionTrainingLinear(
                inputs, outputs, bias=False, config=config, device="meta"
            )
            return layer

        return NativeLinear(linear, sharing(linear, make), multiple=self.multiple)
