"""A summed loss over chunks of tokens, whose backward pass computes each chunk again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LossSum = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def chunked_sum(
    loss_sum: LossSum,
    tokens: int,
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    weights: Tensor | None,
) -> Tensor:
    """`loss_sum` of (rows, length, d) hidden states, `tokens` of them at a time.

    Value and gradients are those of `loss_sum` over all of them, up to the order of summation;
    the head's gradient is added up in the head's own format.
    """
    apply: Callable[..., Tensor] = ChunkedSum.apply
    return apply(loss_sum, tokens, hidden, head_weight, targets, weights)


class ChunkedSum(torch.autograd.Function):
    """Keeps nothing for the backward pass but what it was given."""

    @staticmethod
    def forward(
        ctx: Any,
        loss_sum: LossSum,
        tokens: int,
        hidden: Tensor,
        head_weight: Tensor,
        targets: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        """Adds up the chunks' losses."""
        kind = hidden.device.type
        ctx.loss_sum, ctx.tokens = loss_sum, tokens
        ctx.autocast = {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
        }
        ctx.save_for_backward(hidden, head_weight, targets, weights)
        parts = [
            loss_sum(chunk, head_weight, chosen, weight)
            for chunk, chosen, weight, _ in chunks(tokens, hidden, targets, weights)
        ]
        return torch.stack(parts).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Each chunk forward and backward, in the forward pass's autocast."""
        hidden, head_weight, targets, weights = ctx.saved_tensors
        wants_hidden, wants_head = ctx.needs_input_grad[2:4]
        head = head_weight.detach().requires_grad_(wants_head)
        to_head = torch.zeros_like(head_weight) if wants_head else None
        to_hidden = (
            torch.empty_like(hidden, memory_format=torch.contiguous_format)
            if wants_hidden
            else None
        )
        # One context around all chunks: autocast then converts the head once.
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            for chunk, chosen, weight, place in chunks(ctx.tokens, hidden, targets, weights):
                own = chunk.detach().requires_grad_(wants_hidden)
                wanted = [t for t in (own, head) if t.requires_grad]
                loss = ctx.loss_sum(own, head, chosen, weight)
                found = list(torch.autograd.grad(loss, wanted, gradient))
                if to_hidden is not None:
                    to_hidden.view(-1, hidden.shape[-1])[place] = found.pop(0)[0]
                if to_head is not None:
                    to_head += found.pop(0)
        return None, None, to_hidden, to_head, None, None


def chunks(
    tokens: int, hidden: Tensor, targets: Tensor, weights: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, slice]]:
    """Hidden states, targets and weights of `tokens` slots at a time, as one row each, and the
    slots' place among all of them."""
    flat = hidden.flatten(0, 1)[None]
    chosen = targets.flatten()[None]
    weight = None if weights is None else weights.flatten()[None]
    # One chunk of nothing where there is nothing, so that there is a loss, which is zero.
    for start in range(0, max(flat.shape[1], 1), tokens):
        place = slice(start, start + tokens)
        some = None if weight is None else weight[:, place]
        yield flat[:, place], chosen[:, place], some, place
