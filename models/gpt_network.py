"""The GPT-2 network."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import Attention, CausalAttention, Plan
from models.building import row_positions
from models.description import Description
from models.documents import Documents
from models.gpt import GPT


class SelfAttention(nn.Module):
    """Multi-head self-attention through the plan's attention."""

    def __init__(self, spec: GPT) -> None:
        super().__init__()
        self.heads = spec.heads
        self.dropout = spec.dropout
        self.qkv = nn.Linear(spec.width, 3 * spec.width)
        self.out = nn.Linear(spec.width, spec.width)

    def forward(self, x: Tensor, plan: Plan) -> Tensor:
        """(rows, length, d) to the same shape."""
        rows, length, width = x.shape
        split = (rows, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(x).view(split).permute(2, 0, 3, 1, 4)
        dropout_p = self.dropout if self.training else 0.0
        attended = plan.attend(q, k, v, dropout_p)
        out: Tensor = self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return out


class MLP(nn.Module):
    """Two matrices with GELU (tanh approximation, as GPT-2 was trained) between them."""

    def __init__(self, spec: GPT) -> None:
        super().__init__()
        self.up = nn.Linear(spec.width, spec.mlp_ratio * spec.width)
        self.down = nn.Linear(spec.mlp_ratio * spec.width, spec.width)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, d) to the same shape."""
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """One layer: attention and feed-forward, each on a normalised residual branch."""

    def __init__(self, spec: GPT) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(spec.width, eps=spec.norm_eps)
        self.attn = SelfAttention(spec)
        self.norm_2 = nn.LayerNorm(spec.width, eps=spec.norm_eps)
        self.mlp = MLP(spec)
        self.drop = nn.Dropout(spec.dropout)

    def forward(self, x: Tensor, plan: Plan) -> Tensor:
        """(rows, length, d) to the same shape."""
        x = x + self.drop(self.attn(self.norm_1(x), plan))
        out: Tensor = x + self.drop(self.mlp(self.norm_2(x)))
        return out


class GPTNetwork(nn.Module):
    """A GPT-2 decoder up to the head; implements the contract `Model`.

    `model.compile()` compiles in place, and `hidden` runs what it compiled.
    """

    blocks: nn.ModuleList
    description: Description
    attention: Attention

    def __init__(self, spec: GPT) -> None:
        super().__init__()
        self.spec = spec
        self.description = spec.describe()
        self.attention = CausalAttention()
        self.embed = nn.Embedding(spec.vocab, spec.width)
        self.position = nn.Embedding(spec.positions, spec.width)
        self.drop = nn.Dropout(spec.dropout)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(spec.width, eps=spec.norm_eps)
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
        rows longer than the learned positions.
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
            positions = row_positions(input_ids, self.spec.positions)
        x = self.drop(self.embed(input_ids) + self.position(positions))
        plan = Plan(self.attention, self.attention.plan(segments, x))
        for block in self.blocks:
            x = block(x, plan)
        out: Tensor = self.norm(x)
        return out
