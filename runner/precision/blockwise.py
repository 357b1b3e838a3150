"""FP8 products with a scale for each block of 128 (DeepSeek-V3, arXiv:2412.19437, section 3.3)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from runner.contracts import Requirements
from runner.precision.lowbit import LowBit

if TYPE_CHECKING:
    from torch import nn

    from runner.precision.linear import Products

E4M3 = "float8_e4m3fn"
SIZE = 128


@dataclass(frozen=True, kw_only=True)
class Blockwise(LowBit):
    """E4M3 throughout: a power-of-two scale for 128 values of an input or gradient along the
    dimension that is summed over, and for 128 x 128 values of a weight, as Transformer Engine's
    block scaling has it."""

    narrow: ClassVar[str] = "fp8"
    visible: ClassVar[bool] = False
    requirements: ClassVar[Requirements] = Requirements(
        cuda=True, capability=(9, 0), modules=("transformer_engine",)
    )

    def operands(self) -> Mapping[str, tuple[str, str]]:
        """Formats by role."""
        return dict.fromkeys(("output", "grad_input", "grad_weight"), (E4M3, E4M3))

    def rounding(self) -> Products:
        """Blocks along the dimension that is summed over."""
        from runner.precision.linear import Operand, Products
        from runner.precision.policies import fp8_blocks

        def block(rows: int) -> Operand:
            rounding = partial(fp8_blocks, rows=rows, columns=SIZE, power_of_2=True)
            return Operand(format=E4M3, round=rounding)

        line, square = block(1), block(SIZE)
        return Products(output=(line, square), grad_input=(line, square), grad_weight=(line, line))

    def kernels(self) -> AbstractContextManager[Any]:
        """Transformer Engine's context."""
        from runner.precision.engine import engine_context

        return engine_context("Float8BlockScaling")

    def native(self, linear: nn.Linear) -> nn.Module:
        """Transformer Engine's layer."""
        from runner.precision.engine import engine_layer

        return engine_layer(linear, multiple=self.multiple)
