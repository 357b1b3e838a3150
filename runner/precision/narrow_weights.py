"""Weights of few values, trained through their rounding: ordinary arithmetic on any device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from runner.contracts import Recipe
from runner.precision.lowbit import LowBit

if TYPE_CHECKING:
    from torch import nn

    from runner.precision.linear import Products, Round


@dataclass(frozen=True, kw_only=True)
class NarrowWeights(LowBit):
    """The linear layers of the blocks multiply with rounded weights; the gradient of a rounded
    weight is taken for the gradient of the weight itself (straight-through).

    The rounding is part of the model: the held-out loss is computed with it.
    """

    multiple: ClassVar[int] = 1

    @property
    def formats(self) -> Mapping[str, str]:  # type: ignore[override]
        """Declared formats by role."""
        compute = f"{self.rest}, weights of {self.narrow} values"
        return {"storage": "fp32", "compute": compute, "accumulate": "fp32", "state": "fp32"}

    def operands(self) -> Mapping[str, tuple[str, str]]:
        """Formats by role: only the weight is narrow."""
        mixed = (self.wide, self.narrow)
        return {
            "output": mixed,
            "grad_input": mixed,
            "grad_weight": (self.wide, self.wide),
        }

    def round(self) -> Round:
        """The rounding of a weight."""
        raise NotImplementedError

    def rounding(self) -> Products:
        """One rounded weight for both products that it is in."""
        from runner.precision.linear import Operand, Products

        weight = Operand(format=self.narrow, round=self.round())
        return Products(
            output=(None, weight),
            grad_input=(None, weight),
            grad_weight=(None, None),
            one_weight=True,
            exact=False,
        )

    def native(self, linear: nn.Linear) -> nn.Module:
        """The same layer everywhere."""
        from runner.precision.linear import RoundedLinear

        return RoundedLinear(linear, self.rounding(), in_evaluation=True)

    def emulation(self) -> Recipe | None:
        """None is needed."""
        return None


@dataclass(frozen=True, kw_only=True)
class Int4Weights(NarrowWeights):
    """Codes -8 to 7 with one FP32 scale for `group` weights of a row."""

    narrow: ClassVar[str] = "int4"
    group: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group < 1:
            raise ValueError(f"group: given {self.group}; allowed: 1 or more")

    def round(self) -> Round:
        """Symmetric, to nearest."""
        from runner.precision.policies import int4

        return partial(int4, size=self.group)


@dataclass(frozen=True, kw_only=True)
class TernaryWeights(NarrowWeights):
    """-1, 0 or 1 times the mean magnitude of the matrix (BitNet b1.58, arXiv:2402.17764; its
    activations are not rounded here)."""

    narrow: ClassVar[str] = "ternary"

    def round(self) -> Round:
        """To nearest."""
        from runner.precision.policies import ternary

        return ternary
