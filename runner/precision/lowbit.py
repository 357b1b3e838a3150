"""What all recipes share that put linear layers into a narrow format, and their emulation."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from runner.contracts import Recipe, entered

if TYPE_CHECKING:
    import torch
    from torch import nn

    from runner.precision.linear import Products

REST = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True, kw_only=True)
class LowBit(Recipe):
    """The linear layers of the blocks multiply narrow operands and accumulate in FP32; weights,
    their gradients and the optimizer's state stay FP32.

    rest: format of what is not converted (attention, head) and of the layers' inputs and outputs:
        `bf16` (autocast) or `fp32`.
    narrow: name of the format of the products. multiple: what dimensions must be multiples of.
    visible: whether the hardware's products pass torch's dispatcher.
    """

    narrow: ClassVar[str]
    multiple: ClassVar[int] = 16
    visible: ClassVar[bool] = True
    rest: str = "bf16"

    def __post_init__(self) -> None:
        if self.rest not in REST:
            raise ValueError(f"rest: given {self.rest}; allowed: {', '.join(REST)}")

    @property
    def formats(self) -> Mapping[str, str]:  # type: ignore[override]
        """Declared formats by role."""
        return {"storage": "fp32", "compute": self.narrow, "accumulate": "fp32", "state": "fp32"}

    @property
    def wide(self) -> str:
        """dtype of the operands that are not narrow."""
        return REST[self.rest]

    def operands(self) -> Mapping[str, tuple[str, str]]:
        """Declared operand formats of the three products, by role."""
        raise NotImplementedError

    def rounding(self) -> Products:
        """The rounding of one layer's products; called once a layer."""
        raise NotImplementedError

    def native(self, linear: nn.Linear) -> nn.Module:
        """The layer that runs on hardware."""
        raise NotImplementedError

    def around(self, device: torch.device) -> AbstractContextManager[Any]:
        """Autocast for what is not converted."""
        import torch

        if self.rest == "fp32":
            return nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16)

    def kernels(self) -> AbstractContextManager[Any]:
        """What the hardware's layers need around them."""
        return nullcontext()

    def compute(self, device: torch.device) -> AbstractContextManager[Any]:
        """Both, for each forward pass."""
        return entered([self.around(device), self.kernels()])

    def prepare(self, model: nn.Module) -> nn.Module:
        """Convert the layers of the blocks to the hardware's own."""
        from runner.precision.conversion import convert

        return convert(
            model,
            self.native,
            multiple=self.multiple,
            products=self.operands(),
            visible=self.visible,
        )

    def emulation(self) -> Recipe | None:
        """The same scaling by rounding."""
        return Emulated(of=self)


@dataclass(frozen=True, kw_only=True)
class Emulated(Recipe):
    """Another recipe's arithmetic on any device: operands are rounded to its format with its
    scales, and multiplied in FP32. Everything else is as it has it."""

    of: LowBit

    @property
    def formats(self) -> Mapping[str, str]:  # type: ignore[override]
        """The formats that are emulated."""
        return self.of.formats

    def compute(self, device: torch.device) -> AbstractContextManager[Any]:
        """What is not converted is as on hardware."""
        return self.of.around(device)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Convert the layers that hardware would convert."""
        from runner.precision.conversion import convert
        from runner.precision.linear import RoundedLinear

        return convert(
            model,
            lambda linear: RoundedLinear(linear, self.of.rounding()),
            multiple=self.of.multiple,
            products=self.of.operands(),
        )
