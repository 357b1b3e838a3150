"""Low-rank adapters through peft: put beside matrices in place, described, and merged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from models.description import Description as Shapes
from runner.contracts import Description, Fault, UserError
from runner.memory.adapter import LoRA
from runner.memory.frozen import FrozenLinear
from runner.memory.installed import loading_torchao
from runner.weights import unique_tensors

with loading_torchao():
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

NAME = "default"
"""peft's name of the only adapter."""


def inject(model: nn.Module, lora: LoRA) -> None:
    """Freeze `model` and put adapters into it; its own methods and names stay.

    Adapters are at least FP32; A starts as peft starts it, B at zero. Raises UserError when a
    target names no matrix.
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
    # peft makes them without storage, outside of fake tensors, which it cannot move; they get it
    # here, fake where the model is, in a format of their own.
    with unset_fake_temporarily():
        inject_adapter_in_model(config, model, adapter_name=NAME, low_cpu_mem_usage=True)
    head: Any = model.head_weight
    wide = torch.promote_types(head.dtype, torch.float32)
    for _, layer in adapted(model):
        start(layer.lora_A[NAME], head.device, wide)
        start(layer.lora_B[NAME], head.device, wide)
        nn.init.kaiming_uniform_(layer.lora_A[NAME].weight, a=math.sqrt(5))
        nn.init.zeros_(layer.lora_B[NAME].weight)


def start(matrix: nn.Linear, device: torch.device, dtype: torch.dtype) -> None:
    """Give one half of an adapter its storage."""
    made = torch.empty(matrix.weight.shape, device=device, dtype=dtype)
    matrix.weight = nn.Parameter(made)


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
