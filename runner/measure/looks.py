"""What rounding does to the numbers while training goes on, looked at every few updates.

A look is taken between two updates and leaves no trace: nothing it computes is timed (the update
that carries it is marked `numerics`), and weights, gradients, histories and random state are put
back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from runner.contracts import MicroBatch, Recipe
from runner.measure.gradients import fp32_gradients, gradient_probe, group_of
from runner.precision.formats import BF16, FP16, Format
from runner.precision.history import DelayedScale
from runner.precision.linear import Operand, Products, RoundedLinear
from runner.step import Training

SIXTEEN = {form.name: form for form in (FP16, BF16)}
"""Formats of gradients that have FP32's role in a recipe of that compute format."""


ROOM = {
    "float8_e4m3fn": 2**-4,
    "float8_e5m2": 2**-3,
    "float4_e2m1fn": 2**-1,  # its gradients may be rounded to the farther neighbour
    "tf32": 2**-11,
    "int8": 0.5 / 127,
    "int4": 0.5 / 7,
    "ternary": 0.5,
}
"""By operand format, how far beyond a code, relative to it, a value may lie that is rounded to it
and not clamped. Half a step of the significand, wherever in its binade the largest code is."""


@dataclass(kw_only=True)
class Rounding:
    """Sums over the operands of one kind in one group of layers."""

    difference: float = 0.0
    square: float = 0.0
    beyond: float = 0
    judged: int = 0
    amax: float = 0.0

    def take(self, x: Tensor, rounded: Tensor, room: float | None) -> None:
        """Count one operand and what it was rounded to. room: see ROOM; None is not known."""
        wide, narrow = x.detach().double(), rounded.detach().double()
        self.difference += float(((wide - narrow) ** 2).sum())
        self.square += float((wide**2).sum())
        amax = float(wide.abs().amax())
        if room is not None:
            reach = float(narrow.abs().amax()) * (1 + room) * (1 + 1e-6)
            # Nothing compares with NaN: a count of what is larger would tell of no share.
            odd = math.isnan(amax) or math.isnan(reach)
            self.beyond += math.nan if odd else int((wide.abs() > reach).sum())
            self.judged += x.numel()
        self.amax = largest((self.amax, amax))

    @property
    def error(self) -> float:
        """2-norm of what rounding changed over that of the operands."""
        return (self.difference / self.square) ** 0.5 if self.square else 0.0

    @property
    def saturated(self) -> float | None:
        """Share of the elements that are larger than what rounding could have brought to the
        largest value of their rounded tensor; None where the format's room is not known."""
        return self.beyond / self.judged if self.judged else None


OPERANDS = {
    ("output", 0): "inputs",
    ("output", 1): "weights",
    ("grad_input", 0): "gradients",
}
"""Operands that are looked at, each once: of which product, and on which side."""


@dataclass(kw_only=True)
class Roundings:
    """What the converted layers round, by kind of operand and group of layers."""

    found: dict[tuple[str, str], Rounding] = field(default_factory=dict)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Every operand that a converted layer rounds inside is counted."""
        layers = {n: m for n, m in model.named_modules() if isinstance(m, RoundedLinear)}
        before = {name: layer.products for name, layer in layers.items()}
        for name, layer in layers.items():
            layer.products = self._watched(layer.products, group_of(f"{name}.weight"))
        try:
            yield
        finally:
            for name, layer in layers.items():
                layer.products = before[name]

    def _watched(self, products: Products, group: str) -> Products:
        changed: dict[str, Any] = {}
        for (role, side), kind in OPERANDS.items():
            pair = list(changed.get(role, getattr(products, role)))
            pair[side] = self._noting(pair[side], (kind, group))
            changed[role] = tuple(pair)
        return replace(products, **changed)

    def _noting(self, operand: Operand | None, key: tuple[str, str]) -> Operand | None:
        if operand is None:
            return None
        given: Callable[[Tensor], Tensor] = operand.round

        def note(x: Tensor) -> Tensor:
            rounded = given(x)
            self.found.setdefault(key, Rounding()).take(x, rounded, ROOM.get(operand.format))
            return rounded

        return replace(operand, round=note)

    def values(self) -> dict[str, float]:
        """Figures over all layers by kind of operand, and errors by group of layers."""
        figures: dict[str, float] = {}
        for kind in OPERANDS.values():
            groups = {g: r for (k, g), r in self.found.items() if k == kind}
            if not groups:
                continue
            square = sum(r.square for r in groups.values())
            difference = sum(r.difference for r in groups.values())
            judged = sum(r.judged for r in groups.values())
            figures[f"{kind}_error"] = (difference / square) ** 0.5 if square else 0.0
            if judged:
                beyond = sum(r.beyond for r in groups.values())
                figures[f"{kind}_saturated_share"] = beyond / judged
            figures[f"{kind}_amax"] = largest([r.amax for r in groups.values()])
            figures |= {f"{kind}_error/{group}": r.error for group, r in groups.items()}
        return figures


@dataclass(frozen=True, kw_only=True, eq=False)
class Looks:
    """Takes a look at a training after every `every` applied updates, on one micro-batch.

    micros: of one update, whose denominator divides the loss of the one that is looked at: a
    gradient is as small as the update's share of it, and underflows as that does.
    """

    training: Training
    recipe: Recipe
    micros: Sequence[MicroBatch]
    every: int

    def due(self, update: int) -> bool:
        """Whether a look follows this applied update."""
        return update % self.every == 0

    def before(self) -> dict[str, Tensor]:
        """What the coming update will change, as it is now."""
        return {name: tensor.detach().clone() for name, tensor in self.training.trained.items()}

    def take(self, before: Mapping[str, Tensor]) -> dict[str, float]:
        """Figures by their name without `numerics/`, the gradients of the update being there."""
        figures = {"lost_share": unmoved_share(self.training, before)}
        if self.training.scaler is not None:
            figures["loss_scale"] = float(self.training.scaler.scale)
        roundings = Roundings()
        with untraced(self.training):
            form = SIXTEEN.get(self.recipe.formats["compute"])
            if form is not None:
                figures |= self._ranges(form)
            with roundings.watching(self.training.model):
                found = gradient_probe(self.training, self.recipe, self.micros)
            figures |= amax_errors(self.training.model)
        figures |= roundings.values()
        probed = {
            "gradient_error": found.gradient.relative_error,
            "gradient_cosine": found.gradient.cosine,
            "gradient_norm_ratio": found.gradient.norm_ratio,
            "output_error": found.output.relative_error,
        }
        return figures | {n: math.nan if v is None else v for n, v in probed.items()}

    def _ranges(self, form: Format) -> dict[str, float]:
        scale = float(self.training.scaler.scale) if self.training.scaler else 1.0
        exact = fp32_gradients(self.training, self.recipe, self.micros)
        under, over = beyond_range(list(exact.values()), form, scale)
        return {"underflow_share": under, "overflow_share": over}


def beyond_range(gradients: Sequence[Tensor], form: Format, scale: float) -> tuple[float, float]:
    """Shares of the gradient's elements that are not zero and would be flushed to zero in the
    format at this loss scale, and of those that would lie beyond its largest value; NaN where an
    element is."""
    under = over = count = 0
    for gradient in gradients:
        size = gradient.double().abs() * scale
        if size.isnan().any():
            return math.nan, math.nan
        present = size > 0
        count += int(present.sum())
        under += int((present & (size <= form.smallest / 2)).sum())
        over += int((size > form.largest).sum())
    return (under / count, over / count) if count else (0.0, 0.0)


def unmoved_share(training: Training, before: Mapping[str, Tensor]) -> float:
    """Share of the trained elements with a gradient that the update left exactly as they were."""
    still = moved = 0
    for name, tensor in training.trained.items():
        if tensor.grad is not None:
            asked = tensor.grad != 0
            same = tensor.detach() == before[name]
            still += int((asked & same).sum())
            moved += int((asked & ~same).sum())
    return still / (still + moved) if still + moved else 0.0


def amax_errors(model: nn.Module) -> dict[str, float]:
    """How far delayed scaling's predictions were from what came: largest predicted amax over the
    real one, less 1; 0 would be exact, below 0 values were clamped; NaN where an amax is."""
    errors = []
    for module in model.modules():
        if isinstance(module, DelayedScale) and float(module.amaxes[0]) != 0:
            predicted = module.limit / float(module.used)
            errors.append(predicted / float(module.amaxes[0]) - 1)
    if not errors:
        return {}
    least = -largest([-error for error in errors])
    return {"amax_error_least": least, "amax_error_most": largest(errors)}


def largest(values: Sequence[float]) -> float:
    """The largest value; NaN where one is, which `max` may or may not give."""
    return math.nan if any(map(math.isnan, values)) else max(values)


@contextmanager
def untraced(training: Training) -> Iterator[None]:
    """What layers remember, gradients and random state are as before, afterwards."""
    buffers = {name: tensor.clone() for name, tensor in training.model.named_buffers()}
    cuda = [training.device] if training.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in training.model.named_buffers():
                    tensor.copy_(buffers[name])
