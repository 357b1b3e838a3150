"""TF32 by name: FP32 storage, matrix products with operands rounded to TensorFloat-32."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from runner.contracts import Recipe, Requirements

if TYPE_CHECKING:
    from torch import nn


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

    def controls(self) -> Mapping[str, str]:
        """TF32 on CUDA; the CPU's matrix products stay IEEE."""
        return {
            **super().controls(),
            "cuda.matmul.fp32_precision": "tf32",
            "cudnn.fp32_precision": "tf32",
        }

    def evaluation(self, model: nn.Module) -> AbstractContextManager[Any]:
        """IEEE FP32 while the held-out loss is computed."""
        from runner.precision.controls import controls_set

        return controls_set(super().controls())
