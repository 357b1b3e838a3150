"""TF32 by name: FP32 storage, matrix products with operands rounded to TensorFloat-32."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from runner.contracts import Recipe, Requirements
from runner.precision.lowbit import Emulated, LowBit

if TYPE_CHECKING:
    from torch import nn

    from runner.precision.linear import Products


@dataclass(frozen=True, kw_only=True)
class Tf32(Recipe):
    """FP32 tensors; CUDA matrix products and convolutions may use TF32 tensor cores.

    TF32 keeps FP32's 8 exponent bits and 10 of its 23 fraction bits. It exists from compute
    capability 8.0 on; elsewhere the name would silently mean plain FP32, so it is refused.
    """

    requirements: ClassVar[Requirements] = Requirements(cuda=True, capability=(8, 0))
    formats: ClassVar[Mapping[str, str]] = {
        "storage": "fp32",
        "compute": "tf32",
        "accumulate": "fp32",
        "state": "fp32",
    }

    def controls(self) -> Mapping[str, str | bool]:
        """TF32 on CUDA; the CPU's matrix products stay IEEE."""
        return {
            **super().controls(),
            "cuda.matmul.fp32_precision": "tf32",
            "cudnn.fp32_precision": "tf32",
        }

    def emulation(self) -> Recipe | None:
        """Operands of the blocks' linear layers rounded to TF32; attention and head stay FP32."""
        return Emulated(of=RoundedTf32(rest="fp32"))

    def evaluation(self, model: nn.Module) -> AbstractContextManager[Any]:
        """IEEE FP32 while the held-out loss is computed."""
        from runner.precision.controls import controls_set

        return controls_set(super().controls())


@dataclass(frozen=True, kw_only=True)
class RoundedTf32(LowBit):
    """TF32 as rounding: 10 fraction bits of every operand, whatever its dimensions."""

    narrow: ClassVar[str] = "tf32"
    multiple: ClassVar[int] = 1

    def operands(self) -> Mapping[str, tuple[str, str]]:
        """Formats by role."""
        return dict.fromkeys(("output", "grad_input", "grad_weight"), ("tf32", "tf32"))

    def rounding(self) -> Products:
        """No scales: TF32 has FP32's exponent."""
        from runner.precision.linear import Operand, Products
        from runner.precision.policies import tf32

        both = (Operand(format="tf32", round=tf32),) * 2
        return Products(output=both, grad_input=both, grad_weight=both)
