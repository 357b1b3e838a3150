"""Peak rates of devices: dense matrix products, no sparsity, from their makers' documents."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

TERA = 10**12

Rates = Mapping[str, float]
"""TFLOP/s by compute format (TOP/s for int8)."""


def _rates(**rates: float) -> Rates:
    return MappingProxyType(rates)


HOPPER_SXM = _rates(fp32=66.9, tf32=494.7, bf16=989.4, fp16=989.4, fp8=1978.9, int8=1978.9)
A100 = _rates(fp32=19.5, tf32=156, bf16=312, fp16=312, int8=624)

PEAKS: Mapping[str, Rates] = MappingProxyType(
    {
        # NVIDIA H100 Tensor Core GPU datasheet (its sparse figures halved) and the H100
        # architecture white paper, table 2.
        r"NVIDIA H100 80GB HBM3": HOPPER_SXM,
        r"NVIDIA H100 PCIe": _rates(fp32=51, tf32=378, bf16=756, fp16=756, fp8=1513, int8=1513),
        # NVIDIA H200 Tensor Core GPU datasheet, column H200 SXM.
        r"NVIDIA H200": HOPPER_SXM,
        # NVIDIA A100 Tensor Core GPU datasheet; SXM and PCIe have the same peaks.
        r"(NVIDIA )?A100-(SXM4|PCIE)-40GB": A100,
        r"NVIDIA A100(-SXM4-80GB| 80GB PCIe)": A100,
        # NVIDIA L4 datasheet (its sparse figures halved).
        r"NVIDIA L4": _rates(fp32=30.3, tf32=60, bf16=121, fp16=121, fp8=242.5, int8=242.5),
        # NVIDIA L40S datasheet.
        r"NVIDIA L40S": _rates(fp32=91.6, tf32=183, bf16=362.05, fp16=362.05, fp8=733, int8=733),
        # NVIDIA Ada GPU architecture white paper, appendix A; 16-bit and FP8 products with FP32
        # accumulation, which is what torch's kernels use.
        r"NVIDIA GeForce RTX 4090": _rates(
            fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3, int8=660.6
        ),
        # NVIDIA Ampere GA102 GPU architecture white paper, appendix A; FP32 accumulation.
        r"NVIDIA GeForce RTX 3090": _rates(fp32=35.6, tf32=35.6, bf16=71, fp16=71, int8=284),
        # NVIDIA HGX B200 datasheet, an eighth of eight GPUs (its sparse figures halved).
        r"NVIDIA B200": _rates(
            fp32=75, tf32=1125, bf16=2250, fp16=2250, fp8=4500, int8=4500, fp4=9000
        ),
    }
)
"""By device name as the driver gives it (a pattern for the whole name: a part of a name would
take a partition, a laptop or a cut-down variant for the full device)."""


BANDWIDTHS: Mapping[str, float] = MappingProxyType(
    {
        # The same documents as above, memory bandwidth, in GB/s (10**9 bytes).
        r"NVIDIA H100 80GB HBM3": 3350,
        r"NVIDIA H100 PCIe": 2000,
        r"NVIDIA H200": 4800,
        r"(NVIDIA )?A100-(SXM4|PCIE)-40GB": 1555,
        r"NVIDIA A100-SXM4-80GB": 2039,
        r"NVIDIA A100 80GB PCIe": 1935,
        r"NVIDIA L4": 300,
        r"NVIDIA L40S": 864,
        r"NVIDIA GeForce RTX 4090": 1008,
        r"NVIDIA GeForce RTX 3090": 936,
        r"NVIDIA B200": 7700,
    }
)


def peak_bytes_per_s(device: str) -> float | None:
    """Peak memory bandwidth of the named device in bytes/s; None if unknown."""
    for pattern, rate in BANDWIDTHS.items():
        if re.fullmatch(pattern, device):
            return rate * 1e9
    return None


def peak_flops_per_s(device: str, compute: str) -> float | None:
    """Peak FLOP/s of the named device in a compute format such as `bf16`; None if unknown."""
    for pattern, rates in PEAKS.items():
        if re.fullmatch(pattern, device):
            rate = rates.get(compute)
            return None if rate is None else rate * TERA
    return None
