"""Low-rank adapters through peft: put beside matrices in place, described, and merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from models.description import Description as Shapes
from runner.contracts import Description, Fault, UserError
from runner.memory.adapter import LoRA
from runner.memory.frozen import FrozenLinear
from runner.weights import unique_tensors

NAME = "default"
"""peft's name of the only adapter."""


def inject(model: nn.Module, lora: LoRA) -> None:
    """Freeze `model` and put adapters into it; its own methods and names stay.

    Adapters are at least FP32. Raises UserError when a target names no matrix.
    """
    names = target_names(model, lora)
    model.requires_grad_(False)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=names,
        bias="none",
    )
    inject_adapter_in_model(config, model, adapter_name=NAME)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def target_names(model: nn.Module, lora: LoRA) -> list[str]:
    """Full names of the matrices that the targets name."""
    prefix = next(n for n, m in model.named_modules() if m is model.blocks)
    matrices = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(f"{prefix}.")
    ]
    inside = {name: name.removeprefix(f"{prefix}.").partition(".")[2] for name in matrices}
    missing = [t for t in lora.targets if not any(named(i, t) for i in inside.values())]
    if missing:
        known = sorted(set(inside.values()))
        raise UserError(
            Fault(
                key="memory.adapter.targets",
                given=f"{', '.join(missing)}, which names no matrix of a block",
                allowed=f"parts of {', '.join(known)}",
                next_step="memory.adapter.targets=[attn,mlp], or parts of those names",
            )
        )
    return [n for n, i in inside.items() if any(named(i, target) for target in lora.targets)]


def named(name: str, target: str) -> bool:
    """Whether the target is one or more consecutive parts of the dotted name."""
    return f".{target}." in f".{name}."


def adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every layer that has an adapter, with its name."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def described(description: Description, model: nn.Module) -> Description:
    """The shapes with adapters: rank * (in + out) elements more for each target (C32)."""
    added = sum(
        layer.r[NAME] * (layer.in_features + layer.out_features) for _, layer in adapted(model)
    )
    shapes = {field.name: getattr(description, field.name) for field in fields(Shapes)}
    changed = {
        "params": description.params + added,
        "matmul_params": description.matmul_params + added,
        "frozen_matmul_params": description.matmul_params,
    }
    return Shapes(**{**shapes, **changed})


@torch.no_grad()
def merged(model: nn.Module) -> Mapping[str, Tensor]:
    """The weights of the plain architecture by name: frozen ones widened, adapters added."""
    found: dict[str, Tensor] = {}
    layers = dict(adapted(model))
    quantized = {n: m for n, m in model.named_modules() if isinstance(m, FrozenLinear)}
    for name, tensor in unique_tensors(model):
        owner, _, own = name.rpartition(".")
        if owner in quantized and own != "bias":
            continue
        if ".lora_" in name:
            continue
        found[name.replace(".base_layer.", ".")] = tensor
    for name, module in quantized.items():
        found[f"{name.removesuffix('.base_layer')}.weight"] = module.dense(torch.float32)
    for name, layer in layers.items():
        key = f"{name}.weight"
        delta = layer.get_delta_weight(NAME)
        found[key] = (found[key].to(delta.dtype) + delta).to(found[key].dtype)
    return found
