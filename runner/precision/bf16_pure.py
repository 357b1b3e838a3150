"""Everything in BF16: weights, gradients, arithmetic and optimizer state (specification 7.4)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from runner.contracts import (
    BuiltOptimizer,
    Fault,
    OptimizerBuilder,
    OptimizerPart,
    Recipe,
    UserError,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True, kw_only=True)
class Bf16Pure(Recipe):
    """No FP32 copy of anything: half the bytes, and updates that BF16 cannot hold are lost.

    A BF16 value has 8 significant bits: next to 1 stands 1 + 1/128, so an update below 1/256 of
    its weight disappears when it is rounded to nearest. Gradients of micro-batches are added in
    BF16 too.

    rounding: `nearest`, or `stochastic`: up or down at random, right on average. Weights and
        optimizer state are rounded so.
    kahan: keep what BF16 cannot hold of each weight in a second BF16 tensor and add it to the
        next update (Kahan, Communications of the ACM 8, 1965): 2 bytes a weight.
    """

    may_round_away: ClassVar[bool] = True
    formats: ClassVar[Mapping[str, str]] = {
        "storage": "bf16",
        "compute": "bf16",
        "accumulate": "fp32",
        "state": "bf16",
    }
    rounding: str = "nearest"
    kahan: bool = False

    def __post_init__(self) -> None:
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"rounding: given {self.rounding}; allowed: {', '.join(ROUNDINGS)}")
        if self.kahan and self.rounding == "stochastic":
            raise ValueError(
                "kahan: given true; allowed: false with rounding=stochastic, since each of the two "
                "keeps what the other would"
            )

    def prepare(self, model: nn.Module) -> nn.Module:
        """Weights and buffers in BF16."""
        import torch

        return model.to(torch.bfloat16)

    def evaluation(self, model: nn.Module) -> AbstractContextManager[Any]:
        """FP32 arithmetic on the BF16 weights, which FP32 holds exactly."""
        from runner.precision.storage import widened

        return widened(model)

    def optimizer(self) -> OptimizerBuilder | None:
        """The optimizer part's own, but for how its results are stored."""
        if self.rounding == "nearest" and not self.kahan:
            return None
        return partial(_build, rounding=self.rounding, kahan=self.kahan)


def _build(
    part: OptimizerPart, model: nn.Module, device: torch.device, *, rounding: str, kahan: bool
) -> BuiltOptimizer:
    from runner.precision.storage import StoredInBf16

    if getattr(part, "implementation", "") == "compiled":
        fault = Fault(
            key="optimizer.implementation",
            given="compiled, with weights that are widened and rounded one by one",
            allowed="fused, foreach or plain",
            next_step="optimizer.implementation=fused",
        )
        raise UserError(fault)
    inner = part.build(model, device)
    return BuiltOptimizer(
        optimizer=StoredInBf16(inner, stochastic=rounding == "stochastic", kahan=kahan),
        skips_on_device=part.skips_on_device,
    )
