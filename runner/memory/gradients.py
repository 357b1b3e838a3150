"""How gradients are cleared before an update (specification 7.2, gradients)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.contracts import Lever, LiveObjects

if TYPE_CHECKING:
    import torch

    from runner.largest import Largest


@dataclass(frozen=True, kw_only=True)
class Gradients(Lever):
    """`none` releases gradient storage before each update; `zero` keeps and zeroes it."""

    clear: str = "none"

    def __post_init__(self) -> None:
        if self.clear not in ("none", "zero"):
            raise ValueError(f"clear: given {self.clear}; allowed: none, zero")

    def reduces(self) -> Sequence[LiveObjects]:
        """Released gradients are not there in the forward pass."""
        return ("gradients",) if self.clear == "none" else ()

    def leaves(self, found: Largest) -> float:
        """None in the forward pass of an only micro-batch; after a backward pass all are there."""
        released = found.phase == "forward" and found.accum == 1
        return 0.0 if found.kind in self.reduces() and released else 1.0

    def clear_gradients(self) -> Callable[[torch.optim.Optimizer], None]:
        """Clearing through the optimizer, over all its parameters."""
        release = self.clear == "none"

        def clear(optimizer: torch.optim.Optimizer) -> None:
            optimizer.zero_grad(set_to_none=release)

        return clear
