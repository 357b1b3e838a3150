"""Small real parts for tests: a tiny GPT, examples with known target counts, a Training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models.gpt import GPT
from runner.contracts import Example, MicroBatch, Recipe
from runner.data.padded import Padded
from runner.memory.gradients import Gradients
from runner.memory.loss import Full
from runner.objective import TokenMean
from runner.optimizer import Sgd
from runner.precision.scaling import LossScaler
from runner.step import Training

PAD = 256


def tiny_gpt(*, seed: int = 0, dropout: float = 0.0, double: bool = False) -> nn.Module:
    """A random GPT: width 32, 2 layers, 2 heads, 64 positions, 264 rows."""
    spec = GPT(layers=2, heads=2, width=32, positions=64, vocab=264, dropout=dropout)
    model = spec.build(seed)
    return model.double() if double else model


def example(tokens: int, *, masked: int = 0, seed: int = 0) -> Example:
    """An example of `tokens` random bytes whose first `masked` carry no loss."""
    ids = np.random.default_rng([seed, tokens]).integers(0, 256, tokens, dtype=np.int32)
    loss = np.arange(tokens) >= masked
    return Example(ids=ids, loss=loss)


def examples(*tokens: int) -> list[Example]:
    """Unmasked examples of these lengths, all different."""
    return [example(count, seed=number) for number, count in enumerate(tokens)]


def padded(chosen: Sequence[Example], size: int) -> list[MicroBatch]:
    """Micro-batches of `size` examples, padded to the longest."""
    return Padded().micro_batches(chosen, size=size, pad_id=PAD, seq_len=64)


class Quiet:
    """Listens to phases and keeps their names."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def enter(self, phase: str) -> None:
        self.phases.append(phase)


def training_of(model: nn.Module, **changes: Any) -> Training:
    """SGD with rate 1, no clipping, no scaling: the weight change is minus the gradient."""
    device = torch.device("cpu")
    recipe: Recipe = changes.pop("recipe", Recipe())
    optimizer = changes.pop("optimizer", Sgd(lr=1.0, implementation="fused"))
    factors = changes.pop("factors", [1.0] * 100)
    policy = changes.pop("policy", recipe.scaler())
    lever = Gradients(clear="none")
    settings: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer.build(model, device),
        "objective": TokenMean(),
        "loss": Full(),
        "device": device,
        "base_lr": optimizer.lr,
        "lr_factors": torch.tensor(factors),
        "scaler": LossScaler(policy, device) if policy else None,
        "clip": None,
        "skips_on_device": optimizer.skips_on_device,
        "clear_gradients": lever.clear_gradients(),
        "forward_contexts": lambda: [recipe.compute(device)],
        "backward_contexts": list,
        "applied": torch.zeros((), dtype=torch.int64),
    }
    return Training(**{**settings, **changes})


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def reference_gradient(model: nn.Module, chosen: Sequence[Example]) -> tuple[float, list[Tensor]]:
    """Loss and gradient from first principles: each example alone, summed cross-entropy over its
    targets, divided by the number of targets of all."""
    count = sum(e.useful for e in chosen)
    total: Tensor | float = 0.0
    for one in chosen:
        ids = torch.from_numpy(one.ids.astype(np.int64))[None]
        logits = model.hidden(ids, None, None) @ model.head_weight.T  # type: ignore
        logprobs = logits[0, :-1].log_softmax(-1)
        picked = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        total = total - (picked * torch.from_numpy(one.loss[1:])).sum()
    loss = total / count
    assert isinstance(loss, Tensor)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), list(gradients)


def relative_difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """2-norm of the difference over the 2-norm of b, over all tensors together."""
    difference = sum(((x - y).double() ** 2).sum() for x, y in zip(a, b, strict=True))
    return float((difference / sum((y.double() ** 2).sum() for y in b)) ** 0.5)
