"""The attention that models use unless a memory lever puts another one in its place."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from models.documents import Documents, attend_documents


class Attention(Protocol):
    """The seam through which every model attends; see the contract of the same name."""

    def plan(self, segments: Tensor | Documents | None, like: Tensor) -> Any:
        """What `attend` needs to know about documents; made once per forward pass."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Any, dropout_p: float) -> Tensor:
        """Causal attention; q (rows, heads, length, dh), k and v (rows, kv_heads, length, dh)."""


class Plan(NamedTuple):
    """What a forward pass hands to its blocks: the attention in force and that one's own plan."""

    attention: Attention
    documents: Any

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        """(rows, heads, length, dh) attended values."""
        return self.attention.attend(q, k, v, self.documents, dropout_p)


class CausalAttention:
    """torch's scaled dot-product attention, causal within documents.

    within: attention within documents of one row; a place of its own, so that it can stay
    uncompiled where everything around it is compiled.
    """

    def __init__(self) -> None:
        self.within = attend_documents

    def plan(self, segments: Tensor | Documents | None, like: Tensor) -> Tensor | Documents | None:
        """None for rows of one document; documents of one row as they are; else the (rows, 1,
        length, length) mask, True where a query may look.

        A document followed by padding needs no mask: causal attention never looks ahead.
        """
        if segments is None or isinstance(segments, Documents):
            return segments
        return block_causal_mask(segments)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, plan: Tensor | Documents | None, dropout_p: float
    ) -> Tensor:
        """(rows, heads, length, dh) attended values."""
        grouped = q.shape[1] != k.shape[1]
        if grouped and not takes_groups(q, plan):
            k, v, grouped = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1]), False
        if isinstance(plan, Documents):
            return self.within(q, k, v, plan, dropout_p)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=plan,
            dropout_p=dropout_p,
            is_causal=plan is None,
            enable_gqa=grouped,
        )


def block_causal_mask(segments: Tensor) -> Tensor:
    """(rows, 1, length, length) bool: same segment and not ahead.

    Padding (segment -1) is a segment like any other: it looks at padding only, so that no
    softmax is taken over nothing, which would be NaN.
    """
    length = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    ahead = torch.ones(length, length, dtype=torch.bool, device=segments.device).triu(1)
    return (same & ~ahead)[:, None]


def takes_groups(q: Tensor, plan: Tensor | Documents | None) -> bool:
    """Whether a fused kernel takes fewer key than query heads as they are.

    Only the flash kernel does, which takes neither a mask nor float32, and not with document
    boundaries; every other case would fall to the kernel that keeps the square of the length.
    """
    return plan is None and q.dtype in (torch.bfloat16, torch.float16)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(rows, kv_heads, length, dh) to (rows, heads, length, dh), each head repeated in place."""
    return x.repeat_interleave(heads // x.shape[1], dim=1, output_size=heads)
