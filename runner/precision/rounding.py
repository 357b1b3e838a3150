"""Tensors rounded to the numbers of a format."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.precision.formats import Format


def round_to(
    x: Tensor,
    form: Format,
    generator: torch.Generator | None = None,
    *,
    saturate: bool | None = None,
) -> Tensor:
    """`x` with every element on a number of the format, in x's own dtype.

    x: float32 or float64, any shape; float64 for fp32 itself. Nearest, ties to even; with a
    generator one of the two neighbours at random, so that the mean is the value itself (stochastic
    rounding). Values beyond the largest are clamped or overflow as the format does, or as
    `saturate` says: conversions to FP8 come in both kinds, and torch's cast to E5M2 overflows. NaN
    stays.
    """
    wide = x.double()
    size = wide.abs()
    finite = size.isfinite()
    _, exponent = torch.frexp(torch.where(finite, size, 1.0))
    exponent = (exponent - 1).clamp(min=form.least_exponent)
    step = torch.ldexp(torch.ones_like(wide), exponent - form.fraction_bits)
    if not form.subnormal:  # one step leads from 0 to the smallest number
        step = torch.where(size < form.smallest_normal, form.smallest_normal, step)
    counts = size / step  # exact: the step is a power of two
    if generator is None:
        counts = counts.round()
    else:
        drawn = torch.rand(wide.shape, generator=generator, dtype=wide.dtype, device=wide.device)
        counts = (counts + drawn).floor()
    found = counts * step
    beyond = (found > form.largest) | ~finite
    clamped = form.saturates if saturate is None else saturate
    found = torch.where(beyond, form.largest if clamped else _missing(form), found)
    return torch.where(wide.isnan(), wide, found.copysign(wide)).to(x.dtype)


def _missing(form: Format) -> float:
    return torch.inf if form.infinity else torch.nan
