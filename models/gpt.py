"""The GPT-2 architecture as a configured part: shapes, checks, initialisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.description import Description, require, require_positive

if TYPE_CHECKING:
    from models.gpt_network import GPTNetwork


@dataclass(frozen=True, kw_only=True)
class GPT:
    """A decoder of the GPT-2 type: learned positions, layer norm before each part, GELU (tanh).

    layers, heads, width: depth, attention heads, hidden width (a multiple of `heads`).
    positions: longest document. vocab: rows of embedding and head; a multiple of 16 suits
        low-precision kernels. mlp_ratio: inner width of the feed-forward part over `width`.
    dropout: of embeddings, attention weights and residual branches. init_std: standard deviation
        of the initial matrices. tied: whether the head is the embedding.
    init: folder of a run whose final weights replace the random ones; None for random ones.
    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """

    layers: int
    heads: int
    width: int
    positions: int
    vocab: int
    mlp_ratio: int = 4
    dropout: float = 0.0
    init_std: float = 0.02
    norm_eps: float = 1e-5
    tied: bool = True
    init: str | None = None

    def __post_init__(self) -> None:
        require_positive(
            layers=self.layers,
            heads=self.heads,
            width=self.width,
            positions=self.positions,
            vocab=self.vocab,
            mlp_ratio=self.mlp_ratio,
            init_std=self.init_std,
            norm_eps=self.norm_eps,
        )
        allowed = f"a multiple of heads={self.heads}"
        require(self.width % self.heads == 0, "width", self.width, allowed)
        require(0 <= self.dropout < 1, "dropout", self.dropout, "from 0 to below 1")

    def describe(self) -> Description:
        """Shapes, without building anything."""
        inner = self.mlp_ratio * self.width
        matrices = 4 * self.width**2 + 2 * self.width * inner
        biases = 4 * self.width + inner + self.width
        norms = 4 * self.width
        embeddings = (self.vocab + self.positions) * self.width
        head = self.vocab * self.width
        return Description(
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.heads,
            width=self.width,
            head_width=self.width // self.heads,
            mlp_width=inner,
            positions=self.positions,
            vocab=self.vocab,
            params=self.layers * (matrices + biases + norms)
            + 2 * self.width
            + embeddings
            + (0 if self.tied else head),
            matmul_params=self.layers * matrices + head,
        )

    def build(self, seed: int) -> GPTNetwork:
        """The network on the CPU in fp32; the same weights for the same seed, whatever ran
        before, and the global random state stays as it is."""
        from models.building import build
        from models.gpt_network import GPTNetwork

        return build(lambda: GPTNetwork(self), seed=seed, std=self.init_std, layers=self.layers)
