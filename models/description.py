"""Shapes of a model, known without building it and without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Description:
    """Shapes of a decoder.

    layers: blocks. heads: query heads; kv_heads: key and value heads. width: hidden width d.
    head_width: width of one head. mlp_width: inner width of the feed-forward part.
    positions: longest document. vocab: rows of the head.
    params: elements of all parameters, each unique (tied) one counted once.
    matmul_params: elements of every matrix that each token is multiplied with, head included;
        embedding look-ups, gains and biases excluded.
    frozen_matmul_params: those of them that get no gradient.
    """

    layers: int
    heads: int
    kv_heads: int
    width: int
    head_width: int
    mlp_width: int
    positions: int
    vocab: int
    params: int
    matmul_params: int
    frozen_matmul_params: int = 0


def require(holds: bool, key: str, given: Any, allowed: str) -> None:
    """Raise ValueError about the field `key` unless `holds`."""
    if not holds:
        raise ValueError(f"{key}: given {given!r}; allowed: {allowed}")


def require_positive(**fields: float) -> None:
    """Raise ValueError about the first field that is not above 0."""
    for key, value in fields.items():
        require(value > 0, key, value, "a number above 0")
