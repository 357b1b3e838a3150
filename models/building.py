"""What the networks share: how they are built, initialised, and how positions are counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)

RESIDUAL = ("attn.out", "mlp.down")
"""Names of the matrices of a block that write to the residual stream."""


def build(make: Callable[[], Network], *, seed: int, std: float, layers: int) -> Network:
    """The network that `make` constructs, on the CPU in fp32 with initial weights.

    It is constructed without storage, so that no layer draws from the global random state.
    """
    with torch.device("meta"):
        network = make()
    network = network.float().to_empty(device="cpu")
    initialise(network, std=std, layers=layers, generator=torch.Generator().manual_seed(seed))
    return network


@torch.no_grad()
def initialise(network: nn.Module, *, std: float, layers: int, generator: torch.Generator) -> None:
    """Initial weights as GPT-2's: normal matrices, the ones that write to the residual stream
    scaled by 1/sqrt(2 * layers) (Radford et al. 2019, section 2.3); zero biases, unit gains."""
    residual = std / math.sqrt(2 * layers)
    for name, module in network.named_modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Linear | nn.Embedding):
            own = residual if name.endswith(RESIDUAL) else std
            nn.init.normal_(module.weight, std=own, generator=generator)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def row_positions(input_ids: Tensor, limit: int) -> Tensor:
    """(length,) positions 0, 1, 2, ... of a row; ValueError beyond `limit`."""
    length = input_ids.shape[1]
    if length > limit:
        raise ValueError(f"rows of {length} tokens, but the model has positions={limit}")
    return torch.arange(length, device=input_ids.device)
