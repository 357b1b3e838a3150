"""Optimizers: algorithm and hyper-parameters (workload), implementation (setup)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import nn

IMPLEMENTATIONS = ("fused", "foreach", "plain", "compiled")

TENSOR_RATE = ("fused", "compiled")
"""Implementations whose rate is a tensor: changing a number would compile the step anew."""


def _check(name: str, value: float, good: bool, allowed: str) -> None:
    if not (math.isfinite(value) and good):
        raise ValueError(f"{name}: given {value}; allowed: {allowed}")


def _check_common(part: AdamW | Sgd) -> None:
    _check("lr", part.lr, part.lr > 0, "a positive number")
    _check("weight_decay", part.weight_decay, part.weight_decay >= 0, "0 or more")
    if part.implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: given {part.implementation}; allowed: {', '.join(IMPLEMENTATIONS)}"
        )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Every unique trainable parameter in exactly one of two groups.

    Parameters of two or more dimensions decay; gains, biases and other vectors do not. The rule
    looks at shapes, never at class names. A group without parameters is left out.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def switches(implementation: str) -> dict[str, bool]:
    """torch's own switches for an implementation, every one stated."""
    return {"fused": implementation == "fused", "foreach": implementation == "foreach"}


def first_rate(lr: float, implementation: str, device: torch.device) -> float | torch.Tensor:
    """The rate as the implementation takes it: a device tensor where it can stay there."""
    import torch

    return torch.tensor(lr, device=device) if implementation in TENSOR_RATE else lr


def finished(optimizer: torch.optim.Optimizer, implementation: str) -> torch.optim.Optimizer:
    """The optimizer, its step compiled where the implementation says so."""
    import torch

    if implementation == "compiled":
        optimizer.step = torch.compile(optimizer.step)  # type: ignore[assignment]
    return optimizer


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) through `torch.optim.AdamW`.

    lr: base rate, multiplied by the schedule. implementation: `fused` (one kernel per group of
    tensors; skips on the device), `foreach`, `plain` (tensor by tensor) or `compiled` (plain,
    compiled by torch).
    """

    setup_keys: ClassVar[frozenset[str]] = frozenset({"implementation"})

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    implementation: str = "fused"

    def __post_init__(self) -> None:
        _check_common(self)
        _check("eps", self.eps, self.eps >= 0, "0 or more")
        for beta in self.betas:
            _check("betas", beta, 0 <= beta < 1, "two numbers from 0 up to, but not, 1")

    @property
    def skips_on_device(self) -> bool:
        """Whether `step` obeys `found_inf` and takes a tensor rate."""
        return self.implementation == "fused"

    def build(self, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
        """The optimizer over `model`'s trainable parameters."""
        import torch

        optimizer = torch.optim.AdamW(
            parameter_groups(model, self.weight_decay),
            lr=first_rate(self.lr, self.implementation, device),
            betas=self.betas,
            eps=self.eps,
            **switches(self.implementation),
        )
        return finished(optimizer, self.implementation)


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Stochastic gradient descent with momentum through `torch.optim.SGD`."""

    setup_keys: ClassVar[frozenset[str]] = frozenset({"implementation"})

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    implementation: str = "fused"

    def __post_init__(self) -> None:
        _check_common(self)
        _check("momentum", self.momentum, 0 <= self.momentum < 1, "from 0 up to, but not, 1")

    @property
    def skips_on_device(self) -> bool:
        """Whether `step` obeys `found_inf` and takes a tensor rate."""
        return self.implementation == "fused"

    def build(self, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
        """The optimizer over `model`'s trainable parameters."""
        import torch

        optimizer = torch.optim.SGD(
            parameter_groups(model, self.weight_decay),
            lr=first_rate(self.lr, self.implementation, device),
            momentum=self.momentum,
            **switches(self.implementation),
        )
        return finished(optimizer, self.implementation)
