"""Scaling policies: an operand rounded to a narrow format and back, as its product would see it.

An operand is (rows, k); k is the dimension that is summed over. A policy gives FP32 values of the
same shape, each a code of the format times its scale. Blocks that k does not fill are filled with
zeros, which change neither a scale nor a sum.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
E4M3_MAX = 448.0
E2M1_MAX = 6.0
LEAST_AMAX = 1e-12
"""Stands for the amax of zeros, as in torchao."""
Granularity = Literal["tensor", "row"]


def fp8(x: Tensor, dtype: torch.dtype, by: Granularity, *, power_of_2: bool = False) -> Tensor:
    """One scale for the tensor or for each row: the format's largest value over the amax, rounded
    down to a power of two where asked for."""
    amax = x.abs().amax() if by == "tensor" else x.abs().amax(-1, keepdim=True)
    return to_fp8(x, dtype, scale_of(amax, dtype, power_of_2=power_of_2))


def scale_of(amax: Tensor, dtype: torch.dtype, *, power_of_2: bool = False) -> Tensor:
    """What values are multiplied by before they are cast, from their largest magnitude."""
    scale = (torch.finfo(dtype).max / amax.double().clamp(min=LEAST_AMAX)).float()
    return torch.exp2(scale.log2().floor()) if power_of_2 else scale


def to_fp8(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """Scaled, cast with saturation, and scaled back."""
    limit = torch.finfo(dtype).max
    return (x * scale).clamp(-limit, limit).to(dtype).float() / scale


def blocks(x: Tensor, rows: int, columns: int) -> tuple[Tensor, tuple[int, int]]:
    """(a, rows, b, columns) view of x filled up with zeros to whole blocks, and x's own shape."""
    height, width = x.shape
    filled = F.pad(x, (0, -width % columns, 0, -height % rows))
    return filled.view(filled.shape[0] // rows, rows, -1, columns), (height, width)


def whole(tiles: Tensor, shape: tuple[int, int]) -> Tensor:
    """What `blocks` took apart, without its filling."""
    flat = tiles.reshape(tiles.shape[0] * tiles.shape[1], -1)
    return flat[: shape[0], : shape[1]]


def fp8_blocks(x: Tensor, rows: int, columns: int, *, power_of_2: bool = False) -> Tensor:
    """E4M3 with one FP32 scale for each block of rows x columns."""
    tiles, shape = blocks(x, rows, columns)
    scale = scale_of(tiles.abs().amax((1, 3), keepdim=True), E4M3, power_of_2=power_of_2)
    return whole(to_fp8(tiles, E4M3, scale), shape)


def mxfp8(x: Tensor, dtype: torch.dtype = E4M3, size: int = 32) -> Tensor:
    """One power-of-two (E8M0) scale for each `size` values, the smallest with which none saturates
    (cuBLAS documentation, block scaling of 1 x 32; torchao calls it RCEIL)."""
    tiles, shape = blocks(x, 1, size)
    amax = tiles.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(amax / torch.finfo(dtype).max)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
    # Of infinity and NaN frexp gives no exponent: the largest scale keeps the one, NaN the other.
    exponent = torch.where(amax.isinf(), 127, exponent)
    scale = torch.where(amax.isnan(), amax, torch.exp2(exponent.float()))
    return whole((tiles / scale).to(dtype).float() * scale, shape)


def nvfp4(x: Tensor, *, rows: int = 1, stochastic: bool = False, size: int = 16) -> Tensor:
    """E2M1 values with an E4M3 scale for each block of rows x `size`, and one FP32 scale for the
    tensor, which brings the largest block scale to E4M3's largest value."""
    tensor_scale = x.abs().amax() / (E2M1_MAX * E4M3_MAX)
    tensor_scale = torch.where(tensor_scale == 0, 1.0, tensor_scale)  # small ones keep their own
    tiles, shape = blocks(x, rows, size)
    amax = tiles.abs().amax((1, 3), keepdim=True)
    least = torch.finfo(E4M3).tiny
    scaled = (amax / E2M1_MAX / tensor_scale).clamp(least, E4M3_MAX)
    scale = scaled.to(E4M3).float()
    codes = e2m1(tiles * ((1 / tensor_scale) / scale), stochastic=stochastic)
    return whole(codes * (scale * tensor_scale), shape)


def e2m1(x: Tensor, *, stochastic: bool = False) -> Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with either sign, ties to even, saturating; or one of
    the two neighbours at random, right on average."""
    size = x.abs().clamp(max=E2M1_MAX)
    step = torch.exp2(size.clamp(min=1.0).log2().floor() - 1)
    counts = size / step
    counts = (counts + torch.rand_like(counts)).floor() if stochastic else counts.round()
    return (counts * step).clamp(max=E2M1_MAX).copysign(x)


def int8(x: Tensor) -> Tensor:
    """One scale for each row: its amax is 127."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=LEAST_AMAX) / 127
    return (x / scale).round().clamp(-128, 127) * scale


def int4(x: Tensor, size: int = 32) -> Tensor:
    """Codes -8 to 7 with one scale for each `size` values: their amax is 7."""
    tiles, shape = blocks(x, 1, size)
    scale = tiles.abs().amax(-1, keepdim=True).clamp(min=LEAST_AMAX) / 7
    return whole((tiles / scale).round().clamp(-8, 7) * scale, shape)


def ternary(x: Tensor) -> Tensor:
    """-1, 0 or 1 times the mean magnitude of the tensor (BitNet b1.58, arXiv:2402.17764)."""
    scale = x.abs().mean().clamp(min=1e-5)
    return (x / scale).round().clamp(-1, 1) * scale


def tf32(x: Tensor) -> Tensor:
    """10 of FP32's 23 fraction bits, ties to even."""
    bits = x.view(torch.int32)
    odd = (bits >> 13) & 1
    cut = (bits + 0xFFF + odd) & -(1 << 13)
    return torch.where(x.isfinite(), cut.view(torch.float32), x)
