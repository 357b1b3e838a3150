"""A linear layer whose three products see rounded operands and accumulate in FP32.

One layer serves every emulated recipe and the recipes whose rounding is ordinary arithmetic. What
is rounded, and how it is scaled, is a policy for each operand of each product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.precision.labels import labelled

Round = Callable[[Tensor], Tensor]
"""Rounds an operand (rows, k) to a format and back; k is the dimension that is summed over."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Operand:
    """How one operand of one product is rounded. format: as evidence names it."""

    format: str
    round: Round


Pair = tuple[Operand | None, Operand | None]
"""The operands of a product; None leaves one in the format it has."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Products:
    """The policies of a layer's three products.

    output: of input and weight. grad_input: of output gradient and weight. grad_weight: of output
    gradient and input. one_weight: the weight is rounded once, along its inputs, and the gradient
    of the input goes through that same weight (straight-through training).
    exact: operands are multiplied in FP32, as an emulation does; else in the format of the input,
    which is then what the device runs. states: what policies remember, by name.
    """

    output: Pair
    grad_input: Pair
    grad_weight: Pair
    one_weight: bool = False
    exact: bool = True
    states: Mapping[str, nn.Module] = field(default_factory=dict)


class RoundedLinear(nn.Linear):
    """A linear layer over the parameters of another, with rounded operands.

    In evaluation mode it is that other layer, but where `in_evaluation` says that the rounding of
    its weight is part of the model. Under autocast input and output are in autocast's format, as
    they are for the layers that this one stands for.
    """

    def __init__(
        self, linear: nn.Linear, products: Products, *, in_evaluation: bool = False
    ) -> None:
        with torch.device("meta"):
            super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight = linear.weight
        self.bias = linear.bias
        self.products = products
        self.in_evaluation = in_evaluation
        self.states = nn.ModuleDict(products.states)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        if not self.training:
            return F.linear(x, self._weight_in_evaluation(), self.bias)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if torch.compiler.is_compiling():
            return self._traced(x)
        out: Tensor = RoundedProducts.apply(x, self.weight, self.products)  # type: ignore
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def _traced(self, x: Tensor) -> Tensor:
        """The same arithmetic in operations that a compiler can follow. Only a layer whose weight
        alone is rounded, once, is ever compiled: an emulation runs eagerly."""
        policy = self.products.output[1]
        assert self.products.one_weight and policy is not None
        narrow = policy.round(self.weight.detach().float())
        through = self.weight + (narrow - self.weight).detach()
        return F.linear(
            x, through.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        )

    def _weight_in_evaluation(self) -> Tensor:
        rounded = self.products.output[1]
        if rounded is None or not self.in_evaluation:
            return self.weight
        return rounded.round(self.weight.detach())


class RoundedProducts(torch.autograd.Function):
    """out = x w^T, and its two gradients, each with its own rounding of its two operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: Products) -> Tensor:
        """x (..., in) and weight (out, in) to (..., out) in x's format."""
        rows = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            left, right = products.output
            narrow = rounded(weight, right)
            out = product(rounded(rows, left), narrow, products, x.dtype, (left, right))
        ctx.products = products
        ctx.save_for_backward(x, narrow if products.one_weight else weight)
        return out.reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and of the weight."""
        x, weight = ctx.saved_tensors
        products: Products = ctx.products
        gradient = gradients[0].reshape(-1, weight.shape[0])
        rows = x.reshape(-1, x.shape[-1])
        grad_x = grad_weight = None
        with torch.autocast(x.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                left, right = products.grad_input
                across = weight.t() if products.one_weight else rounded(weight.t(), right)
                grad_x = product(
                    rounded(gradient, left), across, products, x.dtype, (left, right)
                ).reshape(x.shape)
            if ctx.needs_input_grad[1]:
                left, right = products.grad_weight
                grad_weight = product(
                    rounded(gradient.t(), left),
                    rounded(rows.t(), right),
                    products,
                    x.dtype,
                    (left, right),
                )
        return grad_x, grad_weight, None


def rounded(operand: Tensor, policy: Operand | None) -> Tensor:
    """The operand as its product sees it; rounding is done from FP32."""
    return operand if policy is None else policy.round(operand.float())


def product(
    left: Tensor, right: Tensor, products: Products, dtype: torch.dtype, by: Pair
) -> Tensor:
    """left (m, k) times right (n, k) transposed, in `dtype`; operands carry their format's name."""
    plain = by == (None, None) or not products.exact
    wide = dtype if plain else torch.float32
    names = [None if policy is None else policy.format for policy in by]
    names = [name or (None if plain else str(dtype).removeprefix("torch.")) for name in names]
    first = labelled(left.to(wide), names[0])
    second = labelled(right.to(wide).t(), names[1])
    return torch.mm(first, second).to(dtype)
