"""The Llama network."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import Attention, CausalAttention, Plan
from models.building import row_positions
from models.description import Description
from models.documents import Documents
from models.llama import Llama, RopeScaling


class RotaryPlan(NamedTuple):
    """What a forward pass hands to its blocks.

    attending: the attention in force and its plan. cos, sin: (rows or 1, 1, length, dh / 2)
    float32 of the angle of each position and pair.
    """

    attending: Plan
    cos: Tensor
    sin: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        """(rows, heads, length, dh) with each pair (i, i + dh/2) turned by its angle, in float32
        (Su et al. 2021, "RoFormer", equation 34, with the pairs that Llama's weights expect)."""
        first, second = x.chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, dim=-1).to(x.dtype)


class SelfAttention(nn.Module):
    """Grouped-query self-attention with rotary positions through the plan's attention."""

    def __init__(self, spec: Llama) -> None:
        super().__init__()
        self.head_width = spec.width // spec.heads
        self.q = nn.Linear(spec.width, spec.width, bias=False)
        self.k = nn.Linear(spec.width, spec.kv_heads * self.head_width, bias=False)
        self.v = nn.Linear(spec.width, spec.kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(spec.width, spec.width, bias=False)

    def forward(self, x: Tensor, plan: RotaryPlan) -> Tensor:
        """(rows, length, d) to the same shape."""
        q, k, v = plan.rotate(self.split(self.q(x))), plan.rotate(self.split(self.k(x))), self.v(x)
        attended = plan.attending.attend(q, k, self.split(v), 0.0)
        out: Tensor = self.out(attended.transpose(1, 2).reshape(x.shape))
        return out

    def split(self, x: Tensor) -> Tensor:
        """(rows, length, n * dh) to (rows, n, length, dh)."""
        rows, length, _ = x.shape
        return x.view(rows, length, -1, self.head_width).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020, "GLU Variants", equation 6)."""

    def __init__(self, spec: Llama) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.width, spec.mlp_width, bias=False)
        self.up = nn.Linear(spec.width, spec.mlp_width, bias=False)
        self.down = nn.Linear(spec.mlp_width, spec.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, d) to the same shape."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One layer: attention and feed-forward, each on a normalised residual branch."""

    def __init__(self, spec: Llama) -> None:
        super().__init__()
        self.norm_1 = nn.RMSNorm(spec.width, eps=spec.norm_eps)
        self.attn = SelfAttention(spec)
        self.norm_2 = nn.RMSNorm(spec.width, eps=spec.norm_eps)
        self.mlp = MLP(spec)

    def forward(self, x: Tensor, plan: RotaryPlan) -> Tensor:
        """(rows, length, d) to the same shape."""
        x = x + self.attn(self.norm_1(x), plan)
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


class LlamaNetwork(nn.Module):
    """A Llama decoder up to the head; implements the contract `Model`.

    `model.compile()` compiles in place, and `hidden` runs what it compiled.
    """

    blocks: nn.ModuleList
    description: Description
    attention: Attention

    def __init__(self, spec: Llama) -> None:
        super().__init__()
        self.spec = spec
        self.description = spec.describe()
        self.attention = CausalAttention()
        self.embed = nn.Embedding(spec.vocab, spec.width)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.norm = nn.RMSNorm(spec.width, eps=spec.norm_eps)
        self.head = None if spec.tied else nn.Linear(spec.width, spec.vocab, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """(vocab, d) weight of the head; the embedding where tied."""
        return self.embed.weight if self.head is None else self.head.weight

    def hidden(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        segments: Tensor | Documents | None = None,
    ) -> Tensor:
        """(rows, length, d) final hidden states, ready for the head.

        positions: (rows, length), or None for 0, 1, 2, ... in every row. segments: (rows,
        length) document numbers, the documents of a single row, or None for one document in
        every row. Raises ValueError for
        rows of one document that are longer than the model's positions.
        """
        states: Tensor = self(input_ids, positions, segments)
        return states

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        segments: Tensor | Documents | None = None,
    ) -> Tensor:
        """As `hidden`."""
        if positions is None:
            positions = row_positions(input_ids, self.spec.positions)[None]
        x = self.embed(input_ids)
        attending = Plan(self.attention, self.attention.plan(segments, x))
        plan = RotaryPlan(attending, *self.angles(positions))
        for block in self.blocks:
            x = block(x, plan)
        out: Tensor = self.norm(x)
        return out

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position's angles, (rows or 1, 1, length, dh / 2) float32.

        Positions are float32 throughout: in bfloat16 those above 256 would no longer differ.
        """
        width = self.spec.width // self.spec.heads
        pairs = torch.arange(0, width, 2, device=positions.device).float()
        frequencies = 1.0 / self.spec.rope_theta ** (pairs / width)
        if self.spec.rope_scaling is not None:
            frequencies = stretched(frequencies, self.spec.rope_scaling)
        turns = positions.float()[:, None, :, None] * frequencies
        return turns.cos(), turns.sin()


def stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Frequencies (radians a position) after `scaling`, see RopeScaling."""
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
