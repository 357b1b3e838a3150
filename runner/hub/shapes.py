"""Shapes of a model from its config's JSON, and what cannot be trained here, by name. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    "vocab": ("vocab_size",),
}
"""Under which names configs keep a shape."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
REFUSED = {
    "is_encoder_decoder": "an encoder and a decoder",
    "add_cross_attention": "cross-attention",
    "quantization_config": "quantized weights; choose a precision or an adapter instead",
    "auto_map": "code of its own, which is never run",
    "final_logit_softcapping": "capped logits",
    "attn_logit_softcapping": "capped attention scores",
    "alibi": "ALiBi biases in attention",
    "text_config": "a language model inside a model of several inputs",
    "vision_config": "a model of several inputs",
}
"""Settings that, where they are set, ask for what this project's attention, head or objective does
not do."""
MOVING_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, kw_only=True)
class HubShapes:
    """Shapes of a model of the hub; the contract `Description`.

    positions: longest document: the config's own limit, or its sliding window where that is
    shorter, since up to there the window hides nothing. counts: (params, matmul_params), counted
    on a model without storage when they are asked for first.
    """

    layers: int
    heads: int
    kv_heads: int
    width: int
    head_width: int
    mlp_width: int
    positions: int
    vocab: int
    counts: Callable[[], tuple[int, int]]
    frozen_matmul_params: int = 0

    @cached_property
    def _counted(self) -> tuple[int, int]:
        return self.counts()

    @property
    def params(self) -> int:
        """Elements of all parameters, each unique (tied) one once."""
        return self._counted[0]

    @property
    def matmul_params(self) -> int:
        """Elements of every matrix that each token is multiplied with, head included."""
        return self._counted[1]


def shapes_of(config: Mapping[str, Any], counts: Callable[[], tuple[int, int]]) -> HubShapes:
    """Raises ValueError that names what the config lacks."""
    found = {name: shape(config, name) for name in NAMES}
    heads, width = found["heads"], found["width"]
    inner = config.get("intermediate_size") or config.get("n_inner") or config.get("ffn_dim")
    return HubShapes(
        layers=found["layers"],
        heads=heads,
        kv_heads=kv_heads(config, heads),
        width=width,
        head_width=config.get("head_dim") or width // heads,
        mlp_width=inner or 4 * width,
        positions=min([found["positions"], *windows(config)]),
        vocab=found["vocab"],
        counts=counts,
    )


def kv_heads(config: Mapping[str, Any], heads: int) -> int:
    """Key and value heads; Falcon and GPT-BigCode say with `multi_query` that there is one."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return int(config.get("num_key_value_heads") or config.get("num_kv_heads") or heads)


def shape(config: Mapping[str, Any], name: str) -> int:
    """One shape, under whichever name the config keeps it."""
    for key in NAMES[name]:
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    keys = " or ".join(NAMES[name])
    raise ValueError(f"path: given a config without {keys}; allowed: a decoder's config")


def windows(config: Mapping[str, Any]) -> Iterable[int]:
    """Lengths beyond which some layer does not see all of a document."""
    kinds = config.get("layer_types")
    used = config.get("use_sliding_window", True)
    window = config.get("sliding_window")
    if window and used and (kinds is None or "sliding_attention" in kinds):
        yield int(window)
    chunk = config.get("attention_chunk_size")
    if chunk:
        yield int(chunk)


def refusals(config: Mapping[str, Any]) -> Iterable[str]:
    """Everything of this config that would be trained wrongly, by name."""
    for key, what in REFUSED.items():
        if config.get(key):
            yield f"{key}: {what}"
    for key in EXPERTS:
        if (config.get(key) or 0) > 1:
            yield f"{key}={config[key]}: a mixture of experts, whose routing loss is not part of it"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        kind = part.get("rope_type") or part.get("type")
        if kind in MOVING_ROPE:
            yield f"rope_type={kind}: angles that depend on what else is in the micro-batch"
