"""FP32 by name: IEEE arithmetic, no TF32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from runner.contracts import Numerics, Recipe


@dataclass(frozen=True, kw_only=True)
class Fp32(Recipe):
    """Storage, compute, accumulation and state in FP32; the default controls say `ieee`."""

    numerics: ClassVar[Numerics] = "same"
    formats: ClassVar[Mapping[str, str]] = {
        "storage": "fp32",
        "compute": "fp32",
        "accumulate": "fp32",
        "state": "fp32",
    }
