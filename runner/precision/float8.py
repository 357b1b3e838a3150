"""FP8 products with scales from the tensors themselves (torchao's three FP8 recipes)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from runner.contracts import Requirements
from runner.precision.lowbit import LowBit

if TYPE_CHECKING:
    from torch import nn

    from runner.precision.linear import Products

SCALES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


@dataclass(frozen=True, kw_only=True)
class Float8(LowBit):
    """FP8 operands, each scaled by its own largest value.

    scales: `tensorwise` (one a tensor; E4M3 forward, E5M2 for gradients), `rowwise` (one a row of
        the dimension that is summed over, powers of two; E4M3 throughout) or `rowwise_with_gw_hp`
        (as `rowwise`, but the weight is scaled as a whole for the gradient of the input, and the
        gradient of the weight is computed from operands that are not narrow).
    """

    narrow: ClassVar[str] = "fp8"
    requirements: ClassVar[Requirements] = Requirements(
        cuda=True, capability=(8, 9), modules=("torchao",)
    )
    scales: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scales not in SCALES:
            raise ValueError(f"scales: given {self.scales}; allowed: {', '.join(SCALES)}")

    def operands(self) -> Mapping[str, tuple[str, str]]:
        """Formats by role."""
        gradient = E5M2 if self.scales == "tensorwise" else E4M3
        wide = (self.wide, self.wide)
        return {
            "output": (E4M3, E4M3),
            "grad_input": (gradient, E4M3),
            "grad_weight": wide if self.scales == "rowwise_with_gw_hp" else (gradient, E4M3),
        }

    def rounding(self) -> Products:
        """Scales as torchao computes them."""
        from runner.precision.linear import Operand, Products
        from runner.precision.policies import E4M3 as E4M3_TYPE
        from runner.precision.policies import E5M2 as E5M2_TYPE
        from runner.precision.policies import fp8

        def by(dtype: Any, name: str, granularity: Any) -> Operand:
            power = self.scales != "tensorwise"
            return Operand(
                format=name, round=partial(fp8, dtype=dtype, by=granularity, power_of_2=power)
            )

        if self.scales == "tensorwise":
            e4m3, e5m2 = by(E4M3_TYPE, E4M3, "tensor"), by(E5M2_TYPE, E5M2, "tensor")
            return Products(output=(e4m3, e4m3), grad_input=(e5m2, e4m3), grad_weight=(e5m2, e4m3))
        row, whole = by(E4M3_TYPE, E4M3, "row"), by(E4M3_TYPE, E4M3, "tensor")
        if self.scales == "rowwise":
            return Products(output=(row, row), grad_input=(row, row), grad_weight=(row, row))
        return Products(output=(row, row), grad_input=(row, whole), grad_weight=(None, None))

    def native(self, linear: nn.Linear) -> nn.Module:
        """torchao's FP8 layer."""
        from torchao.float8.config import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear

        from runner.precision.native import NativeLinear, sharing

        config = Float8LinearConfig.from_recipe_name(self.scales)

        def make(inputs: int, outputs: int) -> nn.Module:
            layer: nn.Module = Float8Linear(
                inputs, outputs, bias=False, config=config, device="meta"
            )
            return layer

        return NativeLinear(linear, sharing(linear, make), multiple=self.multiple)
