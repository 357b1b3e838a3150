"""What a recipe does to the gradient: the same weights and micro-batch, against FP32.

It catches what a loss cannot: under AdamW halved gradients leave the loss curve as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runner.compiling import eagerly
from runner.contracts import MicroBatch, Recipe, entered
from runner.measure.probe import applied_once, untouched
from runner.precision.conversion import conversion_of
from runner.step import Training, to_device


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How a vector agrees with its reference.

    relative_error: 2-norm of the difference over that of the reference. cosine: of the angle
    between them, None where the vector is 0. norm_ratio: of their 2-norms, the reference's below.
    All None where something is not finite or the reference alone is 0; where both are 0 the error
    is 0.
    """

    relative_error: float | None
    cosine: float | None
    norm_ratio: float | None

    def to_json(self) -> dict[str, float | None]:
        """As the record has it."""
        return {
            "relative_error": self.relative_error,
            "cosine": self.cosine,
            "norm_ratio": self.norm_ratio,
        }


@dataclass(frozen=True, kw_only=True)
class GradientProbe:
    """Agreement with FP32 of the final hidden states, of the whole gradient, and of the gradient
    of each group of layers, see `group_of`."""

    output: Agreement
    gradient: Agreement
    groups: Mapping[str, Agreement]

    @property
    def worst(self) -> str:
        """The group whose gradient is furthest from FP32's; one without figures is further."""
        errors = {name: found.relative_error for name, found in self.groups.items()}
        return max(errors, key=lambda name: 1e300 if errors[name] is None else errors[name] or 0.0)

    def to_json(self) -> dict[str, Any]:
        """As the record has it."""
        return {
            "worst": self.worst,
            "output": self.output.to_json(),
            "gradient": self.gradient.to_json(),
            "groups": {name: found.to_json() for name, found in self.groups.items()},
        }


def agreement(found: Sequence[Tensor], reference: Sequence[Tensor]) -> Agreement:
    """Over all pairs of tensors together, in FP64."""
    sums = torch.zeros(4, dtype=torch.float64)
    for own, other in zip(found, reference, strict=True):
        a, b = own.detach().cpu().double(), other.detach().cpu().double()
        sums += torch.stack([((a - b) ** 2).sum(), (a * a).sum(), (b * b).sum(), (a * b).sum()])
    difference, own_square, square, product = sums.tolist()
    if not torch.isfinite(sums).all() or not square:
        equal = sums.tolist() == [0.0] * 4
        return Agreement(relative_error=0.0 if equal else None, cosine=None, norm_ratio=None)
    return Agreement(
        relative_error=(difference / square) ** 0.5,
        cosine=product / (own_square * square) ** 0.5 if own_square else None,
        norm_ratio=(own_square / square) ** 0.5,
    )


def gradient_probe(
    training: Training, recipe: Recipe, micros: Sequence[MicroBatch]
) -> GradientProbe:
    """Gradients of one micro-batch by the recipe and by FP32, at the weights that are there.

    micros: of one update; the first of them that has a target is taken, and its loss divided by
    the denominator of all, as in that update: another divisor would be another gradient to a
    narrow format. Without dropout, and without a trace in gradients or optimizer; what a recipe
    remembers from tensor to tensor, such as a history of scales, is for the caller to put back.
    """
    micro = to_device(one_of(micros), training.device)
    divisor = training.objective.denominator(micros) or 1.0
    scale = float(training.scaler.scale) if training.scaler else 1.0
    with eagerly(), exact(training.model, recipe):
        reference = _gradients(training, micro, 1.0 / divisor)
    with eagerly(), converted_only(training.model), entered(training.forward_contexts()):
        found = _gradients(training, micro, scale / divisor)
    names = list(reference[1])
    unscaled = {name: gradient.float() / scale for name, gradient in found[1].items()}

    def of(chosen: Sequence[str]) -> Agreement:
        return agreement([unscaled[n] for n in chosen], [reference[1][n] for n in chosen])

    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(group_of(name), []).append(name)
    return GradientProbe(
        output=agreement([found[0]], [reference[0]]),
        gradient=of(names),
        groups={group: of(chosen) for group, chosen in groups.items()},
    )


def fp32_gradients(
    training: Training, recipe: Recipe, micros: Sequence[MicroBatch]
) -> dict[str, Tensor]:
    """The unscaled FP32 gradient of the same micro-batch and divisor as in `gradient_probe`, by
    parameter, at the weights that are there."""
    divisor = training.objective.denominator(micros) or 1.0
    with eagerly(), exact(training.model, recipe):
        return _gradients(training, to_device(one_of(micros), training.device), 1.0 / divisor)[1]


def one_of(micros: Sequence[MicroBatch]) -> MicroBatch:
    """The first micro-batch of an update that has a target."""
    return next((micro for micro in micros if micro.counts.useful), micros[0])


def measured_gradients(
    training: Training, recipe: Recipe, micros: Sequence[MicroBatch]
) -> GradientProbe | None:
    """The probe after one untimed update, which fills histories of scales and brings a loss scale
    down; no trace is left. None where the device has not the memory for it."""
    try:
        with untouched(training):
            applied_once(training, micros)
            return gradient_probe(training, recipe, micros)
    except torch.OutOfMemoryError:
        return None
    finally:
        if training.device.type == "cuda":
            torch.cuda.empty_cache()


def group_of(name: str) -> str:
    """The part of a block that a parameter is in, `blocks.3.attn` or `blocks.3.mlp`; outside the
    blocks the module that it belongs to."""
    numbered = re.match(r"(.*?\.\d+\.[^.]+)\.", name)
    return numbered[1] if numbered else name.rpartition(".")[0] or name


def _gradients(
    training: Training, micro: MicroBatch, seed: float
) -> tuple[Tensor, dict[str, Tensor]]:
    model = training.model
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    hidden = model.hidden(micro.input_ids, micro.positions, micro.segments)  # type: ignore[operator]
    head: Tensor = model.head_weight  # type: ignore[assignment]
    loss = training.loss.loss_sum(hidden, head, micro.targets, micro.weights)
    gradients = torch.autograd.grad(
        loss, list(trainable.values()), torch.full_like(loss, seed), allow_unused=True
    )
    known = {n: g for n, g in zip(trainable, gradients, strict=True) if g is not None}
    return hidden.detach().float().cpu(), {name: g.float().cpu() for name, g in known.items()}


@contextmanager
def _modes(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode; afterwards each is in its own again."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextmanager
def exact(model: nn.Module, recipe: Recipe) -> Iterator[None]:
    """FP32 by the book, no weight rounded, on the weights that are trained."""
    rounding = [m for m in model.modules() if getattr(m, "in_evaluation", False)]
    device = next(model.parameters()).device.type
    for module in rounding:
        module.in_evaluation = False  # type: ignore[assignment]
    try:
        with _modes(model), torch.autocast(device, enabled=False), recipe.evaluation(model):
            yield
    finally:
        for module in rounding:
            module.in_evaluation = True  # type: ignore[assignment]


@contextmanager
def converted_only(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, which has no dropout, but for the layers that a recipe converted: they
    round in training only."""
    conversion = conversion_of(model)
    with _modes(model):
        for name in conversion.converted if conversion else ():
            model.get_submodule(name).train()
        yield
