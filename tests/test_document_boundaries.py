"""The call that CUDA makes for all documents at once, with a plain kernel in the place of flash."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nested._internal import sdpa
from torch.nn.attention import SDPBackend

from models.documents import Documents, by_boundaries, one_by_one
from runner.measure.evidence import Watch

LENGTHS = (5, 7, 1)


def weights(q: Tensor, k: Tensor) -> Tensor:
    length = q.shape[1]
    ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
    return (q @ k.mT / 4).masked_fill(ahead, float("-inf")).softmax(-1)


def parts(bounds: Tensor, *tensors: Tensor) -> Iterator[list[Tensor]]:
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        yield [x[start:end].transpose(0, 1) for x in tensors]


def forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, _: Tensor, longest: int, *more: Any, **kw: Any
) -> tuple[Tensor, ...]:
    assert longest == max(LENGTHS)
    out = [(weights(a, b) @ c).transpose(0, 1) for a, b, c in parts(bounds, q, k, v)]
    zero = torch.zeros((), dtype=torch.int64)
    return torch.cat(out), torch.zeros(q.shape[1], q.shape[0]), zero, zero, torch.zeros(0)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, s: Tensor, bounds: Tensor, *more: Any,
    **kw: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    found: list[list[Tensor]] = [[], [], []]
    for g, a, b, c in parts(bounds, grad, q, k, v):
        p = weights(a, b)
        dp = g @ c.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / 4
        for kept, x in zip(found, (ds @ b, ds.mT @ a, p.mT @ g), strict=True):
            kept.append(x.transpose(0, 1))
    return tuple(torch.cat(kept) for kept in found)


def test_one_call_over_boundaries_is_one_call_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "_select_sdp_backend", lambda *_: SDPBackend.FLASH_ATTENTION)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    qkv = torch.randn(1, sum(LENGTHS), 3 * 64, generator=torch.Generator().manual_seed(0))
    qkv.requires_grad_()
    q, k, v = qkv.view(1, -1, 3, 4, 16).permute(2, 0, 3, 1, 4)
    scale = torch.arange(float(sum(LENGTHS)))[:, None]
    try:
        with Watch() as watch:
            together = by_boundaries(q, k, v, Documents(LENGTHS), 0.0)
            (own,) = torch.autograd.grad((together * scale).sum(), qkv, retain_graph=True)
    finally:
        library._destroy()
    apart = one_by_one(q, k, v, LENGTHS, 0.0)
    (expected,) = torch.autograd.grad((apart * scale).sum(), qkv)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)
    assert watch.result().attention_operators == ("_flash_attention_forward",)
