"""Transformer Engine, written from its documentation (2.19); unverified on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

from torch import nn

from runner.precision.native import NativeLinear, sharing

NAME = "transformer_engine"


def engine_layer(linear: nn.Linear, *, multiple: int) -> nn.Module:
    """The engine's layer over the weight of `linear`; its formats come from the context."""
    engine: Any = import_module(f"{NAME}.pytorch")

    def make(inputs: int, outputs: int) -> nn.Module:
        layer: nn.Module = engine.Linear(
            inputs, outputs, bias=False, params_dtype=linear.weight.dtype, device="meta"
        )
        return layer

    return NativeLinear(linear, sharing(linear, make), multiple=multiple)


def engine_context(recipe: str, **settings: Any) -> AbstractContextManager[Any]:
    """The engine's context of a forward pass, with one of its recipes by name."""
    engine: Any = import_module(f"{NAME}.pytorch")
    recipes: Any = import_module(f"{NAME}.common.recipe")
    context: AbstractContextManager[Any] = engine.autocast(
        enabled=True, recipe=getattr(recipes, recipe)(**settings)
    )
    return context
