"""Documents that lie one behind the other in a single row, and attention within each of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Documents:
    """Where the documents of a single row lie, known on the host and on the device.

    lengths: tokens of each document, in order; their sum is the length of the row.
    bounds: (documents + 1,) int64, the place where each document begins, and the end of the last.

    Neither a tuple nor a dataclass: torch's compiler looks into those, and would make one graph
    for every combination of lengths.
    """

    __slots__ = ("bounds", "lengths")

    def __init__(self, lengths: Sequence[int], bounds: Tensor | None = None) -> None:
        self.lengths = tuple(lengths)
        if bounds is None:
            bounds = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int64)
        self.bounds = bounds

    def to(self, device: torch.device, non_blocking: bool = False) -> Documents:
        """The same with its bounds on `device`."""
        return Documents(self.lengths, self.bounds.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Documents:
        """The same with its bounds in page-locked memory."""
        return Documents(self.lengths, self.bounds.pin_memory())

    def segments(self) -> Tensor:
        """(1, length) int64 number of each position's document."""
        device = self.bounds.device
        numbers = torch.arange(len(self.lengths), device=device)
        return numbers.repeat_interleave(self.bounds.diff(), output_size=sum(self.lengths))[None]


def attend_documents(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, dropout_p: float
) -> Tensor:
    """(1, heads, length, dh) causal attention within each document; as many key as query heads.

    On CUDA the flash and the memory-efficient kernel take the boundaries themselves, in one call.
    Everywhere else each document is attended to on its own, by the kernel that is in force: the
    work is that of the documents, whatever row they share. A mask over the row would cost the
    square of the row.
    """
    if q.device.type == "cuda" and boundaries_taken():
        return by_boundaries(q, k, v, documents, dropout_p)
    return one_by_one(q, k, v, documents.lengths, dropout_p)


def boundaries_taken() -> bool:
    """Whether a kernel that takes document boundaries may run (see `sdpa_kernel`)."""
    cuda: Any = torch.backends.cuda
    return bool(cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled())


def one_by_one(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], dropout_p: float) -> Tensor:
    """One call for each document."""

    def parts(x: Tensor) -> Sequence[Tensor]:
        return torch.split(x, list(lengths), dim=2)

    attended = [
        F.scaled_dot_product_attention(*qkv, None, dropout_p, True)
        for qkv in zip(parts(q), parts(k), parts(v), strict=True)
    ]
    return torch.cat(attended, dim=2)


def by_boundaries(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, dropout_p: float
) -> Tensor:
    """One call for all documents, through torch's jagged layout (CUDA)."""

    def jagged(x: Tensor) -> Tensor:
        # The kernels want (length, heads, dh) in one piece. With both extremes of the lengths
        # given, nothing waits for the device.
        return torch.nested.nested_tensor_from_jagged(
            x[0].transpose(0, 1).contiguous(),
            documents.bounds,
            min_seqlen=min(documents.lengths),
            max_seqlen=max(documents.lengths),
        ).transpose(1, 2)

    attended = F.scaled_dot_product_attention(
        jagged(q), jagged(k), jagged(v), dropout_p=dropout_p, is_causal=True
    )
    values: Tensor = attended.transpose(1, 2).values()
    return values.transpose(0, 1)[None]
