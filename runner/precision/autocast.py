"""Mixed precision by autocast: reduced compute over FP32 parameters (specification 7.4)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.contracts import Recipe, ScalePolicy

if TYPE_CHECKING:
    import torch

FORMATS = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, kw_only=True)
class Autocast(Recipe):
    """Matrix products in `dtype`; parameters, gradients and optimizer state stay FP32.

    dtype: `bfloat16` or `float16`.
    scaling: dynamic loss scaling, or None. FP16 needs it: its smallest subnormal is 2**-24.
    reduced_sums: whether a GPU may add partial sums of a product in `dtype`, as torch lets it by
        default.
    """

    dtype: str
    scaling: ScalePolicy | None = None
    reduced_sums: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in FORMATS:
            raise ValueError(f"dtype: given {self.dtype}; allowed: {', '.join(FORMATS)}")

    @property
    def formats(self) -> Mapping[str, str]:  # type: ignore[override]
        """Declared formats by role."""
        compute = FORMATS[self.dtype]
        sums = f"fp32, partial sums {compute}" if self.reduced_sums else "fp32"
        return {"storage": "fp32", "compute": compute, "accumulate": sums, "state": "fp32"}

    def controls(self) -> Mapping[str, str | bool]:
        """Reduced sums where they are asked for."""
        name = f"cuda.matmul.allow_{FORMATS[self.dtype]}_reduced_precision_reduction"
        return {**super().controls(), name: self.reduced_sums}

    def compute(self, device: torch.device) -> AbstractContextManager[Any]:
        """Autocast on the device's type."""
        import torch

        return torch.autocast(device.type, dtype=getattr(torch, self.dtype))

    def scaler(self) -> ScalePolicy | None:
        """The configured scaling."""
        return self.scaling
