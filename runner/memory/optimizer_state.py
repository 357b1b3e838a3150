"""Where AdamW's two moments are kept, and in which format (specification 7.2, optimizer state)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from runner.config import TARGET, part_class
from runner.contracts import (
    BuiltOptimizer,
    Description,
    Fault,
    Lever,
    LiveObjects,
    Numerics,
    OptimizerBuilder,
    Recipe,
)
from runner.memory.installed import absent
from runner.optimizer import AdamW

if TYPE_CHECKING:
    import torch
    from torch import nn

    from runner.largest import Largest

KEY = "memory/optimizer_state"
BITS = (16, 8, 4)
LEAST = 4096
"""Tensors of fewer elements keep FP32 moments."""
LARGEST_BETA = 0.99
"""BF16 keeps 8 significant bits: with a larger second beta the second moment, which moves by
1 - beta of its difference to the squared gradient, would mostly round back to where it was."""


@dataclass(frozen=True, kw_only=True)
class LowBit(Lever):
    """AdamW whose moments are BF16, or 8-bit or 4-bit codes, through torchao.

    bits: 16 for BF16; 8: blocks of 256 with one scale (Dettmers et al. 2021, arXiv:2110.02861);
    4: blocks of 128 (Li et al. 2023, arXiv:2309.01507). The update is computed in FP32 and only
    its moments are rounded. Tensors of fewer than 4096 elements keep FP32 moments. It runs tensor
    by tensor, compiled if `optimizer.implementation` is `compiled`.
    """

    numerics: ClassVar[Numerics] = "close"
    libraries: ClassVar[tuple[str, ...]] = ("torchao",)

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits: given {self.bits}; allowed: {', '.join(map(str, BITS))}")

    def reduces(self) -> Sequence[LiveObjects]:
        """The moments take a half, a quarter or an eighth of their bytes."""
        return ("optimizer_state",)

    def leaves(self, found: Largest) -> float:
        """The bits of a moment over those of FP32, where the tensor is not too small."""
        stored = found.kind in self.reduces() and found.elements >= LEAST
        return self.bits / 32 if stored else 1.0

    def conflicts(self, job: Mapping[str, Any]) -> Sequence[Fault]:
        """Only AdamW has these moments."""
        return tuple(self._faults(job))

    def _faults(self, job: Mapping[str, Any]) -> Iterator[Fault]:
        yield from not_adamw(job)
        betas = job["optimizer"].get("betas", (0, 0))
        if self.bits == BITS[0] and betas[1] > LARGEST_BETA:
            yield Fault(
                key="optimizer.betas",
                given=f"{list(betas)} with {KEY}=bf16",
                allowed=f"a second beta up to {LARGEST_BETA}: with a larger one a BF16 second "
                "moment would round back to where it was",
                next_step=f"optimizer.betas=[{betas[0]},0.95], or {KEY}=8bit",
            )

    def refusal(self, description: Description, recipe: Recipe, device: torch.device) -> str | None:
        """torchao must be here."""
        return absent(KEY, "lowbit", *self.libraries)

    def optimizer(self) -> OptimizerBuilder:
        """Builds torchao's AdamW with the optimizer part's hyper-parameters."""
        return self._build

    def _build(self, part: Any, model: nn.Module, device: torch.device) -> BuiltOptimizer:
        from runner.memory.lowbit import low_bit_adamw

        return BuiltOptimizer(optimizer=low_bit_adamw(part, model, self.bits))


@dataclass(frozen=True, kw_only=True)
class Host(Lever):
    """AdamW on the host: FP32 copies of the parameters and both moments in pinned host memory.

    Gradients are copied there after they were clipped, the new weights back before the next
    forward pass; all of that is optimizer time. Unverified on a GPU.
    """

    def reduces(self) -> Sequence[LiveObjects]:
        """The moments are on the host."""
        return ("optimizer_state",)

    def in_host_memory(self, category: str, operation: str) -> bool:
        """Moments, and the copies of parameters and gradients that only this optimizer knows."""
        return category in ("optimizer_state", "unattributed")

    def conflicts(self, job: Mapping[str, Any]) -> Sequence[Fault]:
        """Only AdamW is computed there."""
        return tuple(not_adamw(job))

    def refusal(self, description: Description, recipe: Recipe, device: torch.device) -> str | None:
        """There must be a device that the host's memory relieves."""
        if device.type == "cuda":
            return None
        return f"{KEY}=cpu_offload: on {device.type} the optimizer is on the host already"

    def optimizer(self) -> OptimizerBuilder:
        """Builds AdamW over host copies with the optimizer part's hyper-parameters."""
        return self._build

    def _build(self, part: Any, model: nn.Module, device: torch.device) -> BuiltOptimizer:
        from runner.memory.hostadamw import HostAdamW
        from runner.optimizer import parameter_groups

        groups = parameter_groups(model, part.weight_decay)
        built = HostAdamW(groups, lr=part.lr, betas=part.betas, eps=part.eps)
        return BuiltOptimizer(optimizer=built)


def not_adamw(job: Mapping[str, Any]) -> Iterator[Fault]:
    """A fault when the job's optimizer is another one."""
    target = job["optimizer"][TARGET]
    if issubclass(part_class(target, key="optimizer", allow=job["allow"]), AdamW):
        return
    yield Fault(
        key=KEY,
        given=f"another format or place of AdamW's moments with {target}",
        allowed="the option fp32 with this optimizer, or optimizer=adamw",
        next_step=f"optimizer=adamw, or {KEY}=fp32",
    )
