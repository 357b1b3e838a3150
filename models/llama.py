"""The Llama architecture as a configured part: shapes, checks, initialisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.description import Description, require, require_positive

if TYPE_CHECKING:
    from models.llama_network import LlamaNetwork


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary wavelengths are stretched for contexts longer than a model was first trained on
    (Llama 3.1 and later; transformers calls it `llama3`).

    A pair that turns at least `high_freq_factor` times within `original_positions` keeps its
    wavelength; one that turns at most `low_freq_factor` times turns `factor` times as slowly;
    between the two the frequency goes from one to the other in proportion to the turns.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def __post_init__(self) -> None:
        require_positive(
            factor=self.factor,
            low_freq_factor=self.low_freq_factor,
            original_positions=self.original_positions,
        )
        allowed = f"a number above low_freq_factor={self.low_freq_factor}"
        holds = self.high_freq_factor > self.low_freq_factor
        require(holds, "high_freq_factor", self.high_freq_factor, allowed)


@dataclass(frozen=True, kw_only=True)
class Llama:
    """A decoder of the Llama type: rotary positions, RMS norm, SwiGLU, grouped-query attention.

    layers, heads, width: depth, query heads, hidden width (a multiple of 2 * `heads`).
    kv_heads: key and value heads, a divisor of `heads`. mlp_width: inner width of the
        feed-forward part. positions: longest document. vocab: rows of embedding and head.
    rope_theta: base of the rotary wavelengths. rope_scaling: how they are stretched for long
        contexts; None for not at all.
    init_std: standard deviation of the initial matrices. tied: whether the head is the embedding.
    init: folder of a run whose final weights replace the random ones; None for random ones.
    Source: Touvron et al. 2023, "LLaMA"; Grattafiori et al. 2024, "The Llama 3 Herd of Models".
    """

    layers: int
    heads: int
    kv_heads: int
    width: int
    mlp_width: int
    positions: int
    vocab: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    init_std: float = 0.02
    norm_eps: float = 1e-5
    tied: bool = True
    init: str | None = None

    def __post_init__(self) -> None:
        require_positive(
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            width=self.width,
            mlp_width=self.mlp_width,
            positions=self.positions,
            vocab=self.vocab,
            rope_theta=self.rope_theta,
            init_std=self.init_std,
            norm_eps=self.norm_eps,
        )
        pairs = f"a multiple of 2 * heads={2 * self.heads} (rotation takes pairs)"
        require(self.width % (2 * self.heads) == 0, "width", self.width, pairs)
        divisor = f"a divisor of heads={self.heads}"
        require(self.heads % self.kv_heads == 0, "kv_heads", self.kv_heads, divisor)

    def describe(self) -> Description:
        """Shapes, without building anything."""
        head_width = self.width // self.heads
        attention = 2 * self.width**2 + 2 * self.width * self.kv_heads * head_width
        matrices = self.layers * (attention + 3 * self.width * self.mlp_width)
        norms = (2 * self.layers + 1) * self.width
        head = self.vocab * self.width
        return Description(
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            width=self.width,
            head_width=head_width,
            mlp_width=self.mlp_width,
            positions=self.positions,
            vocab=self.vocab,
            params=matrices + norms + head + (0 if self.tied else head),
            matmul_params=matrices + head,
        )

    def build(self, seed: int) -> LlamaNetwork:
        """The network on the CPU in fp32; the same weights for the same seed, whatever ran
        before, and the global random state stays as it is."""
        from models.building import build
        from models.llama_network import LlamaNetwork

        return build(lambda: LlamaNetwork(self), seed=seed, std=self.init_std, layers=self.layers)
