"""A decoder of `transformers` as the contract `Model`: its attention goes through the seam."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from models.attention import Attention, CausalAttention
from models.building import row_positions
from models.documents import Documents
from runner.contracts import Unsupported
from runner.hub.shapes import HubShapes

SEAM = "fullstep"
"""Name of `attend` among the library's attention implementations."""

UNKNOWN = ("softcap", "s_aux", "position_bias", "cu_seq_lens_q", "block_mask")
"""Arguments with which an architecture asks its attention for what the seam does not do."""


class Seam:
    """What the attention modules of one network share: the attention in force and its plan."""

    def __init__(self) -> None:
        self.attention: Attention = CausalAttention()
        self.plan: Any = None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as the library asks for it: (rows, heads, length, dh) in, (rows, length, heads,
    dh) out. Raises Unsupported for what would be attended to wrongly."""
    asked = [name for name in UNKNOWN if others.get(name) is not None]
    if attention_mask is not None:
        asked.append("a mask of its own")
    if asked:
        raise Unsupported(f"model: its attention asks for {', '.join(asked)}")
    seam: Seam = module.seam  # type: ignore[assignment]
    if sliding_window is not None and longest(query, seam.plan) > sliding_window:
        raise Unsupported(f"model: documents longer than sliding_window={sliding_window}")
    usual = 1 / math.sqrt(query.shape[-1])
    if scaling is not None and not math.isclose(scaling, usual):
        query = query * (scaling / usual)
    attended = seam.attention.attend(query, key, value, seam.plan, dropout)
    return attended.transpose(1, 2), None


def longest(query: Tensor, plan: Any) -> int:
    """Length of the longest document, as far as it is known on the host."""
    return max(plan.lengths) if isinstance(plan, Documents) else query.shape[2]


class HubNetwork(nn.Module):
    """The decoder up to its head; implements the contract `Model`.

    blocks: the decoder's layers, which `body` has as well. body: the library's model without its
    head. logit_factor: logits are this times the product of hidden states and head.
    takes_positions: whether `body` can be told positions; without, it counts them by row, and
    documents cannot share one. initial_weights: digest of the stored weights it began with; None
    for random ones.
    """

    def __init__(
        self,
        *,
        body: Any,
        head: nn.Linear | None,
        description: HubShapes,
        logit_factor: float,
        takes_positions: bool,
    ) -> None:
        super().__init__()
        # In front of `body`, so that every layer has the name that the project's models give it.
        self.blocks = layers_of(body, description.layers)
        self.body = body
        self.head = head
        self.description = description
        self.attention: Attention = CausalAttention()
        self.logit_factor = logit_factor
        self.takes_positions = takes_positions
        self.initial_weights: str | None = None
        self.seam = Seam()
        for module in body.modules():
            module.seam = self.seam

    @property
    def head_weight(self) -> Tensor:
        """(vocab, d) weight of the head; the embedding where tied."""
        if self.head is not None:
            return self.head.weight
        embedding: Tensor = self.body.get_input_embeddings().weight
        return embedding

    def hidden(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        segments: Tensor | Documents | None = None,
    ) -> Tensor:
        """(rows, length, d) final hidden states, ready for the head; see the contract."""
        states: Tensor = self(input_ids, positions, segments)
        return states

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        segments: Tensor | Documents | None = None,
    ) -> Tensor:
        """As `hidden`."""
        if not self.takes_positions and (positions is not None or segments is not None):
            kind = self.body.config.model_type
            raise Unsupported(
                f"model: {kind} cannot be told positions, so documents cannot share a row; "
                "choose a batching with one example in each row"
            )
        if positions is None:
            positions = row_positions(input_ids, self.description.positions)[None]
        self.seam.attention = self.attention
        self.seam.plan = self.attention.plan(segments, self.head_weight)
        told = {"position_ids": positions} if self.takes_positions else {}
        out = self.body(input_ids=input_ids, use_cache=False, **told)
        hidden: Tensor = out.last_hidden_state
        return hidden if self.logit_factor == 1 else hidden * self.logit_factor

    def _apply(self, fn: Any, recurse: bool = True) -> HubNetwork:
        """Move or convert; what is no parameter and was float32 stays so: angles of rotary
        positions in bfloat16 would be other angles."""
        kept = {
            name: buffer
            for name, buffer in self.named_buffers()
            if buffer is not None and buffer.dtype == torch.float32
        }
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in kept.items():
            place, _, own = name.rpartition(".")
            module = self.get_submodule(place)
            found = getattr(module, own)
            if found.dtype != torch.float32:
                setattr(module, own, buffer.to(found.device))
        return self


def layers_of(body: nn.Module, layers: int) -> nn.ModuleList:
    """The one list of `layers` modules in `body` that lies in no other list."""
    found = [part for part in outer_lists(body) if len(part) == layers]
    if len(found) != 1:
        raise Unsupported(
            f"model: {type(body).__name__} has {len(found)} lists of {layers} layers, not one"
        )
    return found[0]


def outer_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    """Every list of modules that lies in no other list."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from outer_lists(child)
