"""The whole training step, top to bottom, in one function.

What happens between two calls of `Clock.start` is one update. `measured_update` draws all its
micro-batches first, so the divisor of the objective is known before the first backward pass, and
waits for nothing between the first forward and the last backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from runner.contracts import Counts, LossLever, MicroBatch, Objective, entered
from runner.precision.scaling import LossScaler


class Phases(Protocol):
    """Whatever listens to the phases of an update: a clock, or the memory account."""

    def enter(self, phase: str) -> None:
        """From now on the update is in `phase`."""


@dataclass(kw_only=True, eq=False)
class Training:
    """What an update touches: the built parts, and the state that updates change.

    contexts: make the contexts of a forward and of a backward pass.
    lr_factors: (updates,) float32 on the device; the factor after i applied updates.
    applied: scalar int64 on the device, updates applied so far.
    masters: by parameter name, the tensor that the optimizer changes in its stead.
    trained: by name, what the optimizer changes; parameters: the same without names.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    objective: Objective
    loss: LossLever
    device: torch.device
    base_lr: float
    lr_factors: Tensor
    scaler: LossScaler | None
    clip: float | None
    skips_on_device: bool
    clear_gradients: Callable[[torch.optim.Optimizer], None]
    forward_contexts: Callable[[], Sequence[AbstractContextManager[Any]]]
    backward_contexts: Callable[[], Sequence[AbstractContextManager[Any]]]
    applied: Tensor
    masters: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.trained = {
            name: self.masters.get(name, p)
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }
        self.parameters = list(self.trained.values())
        self.rates = self.base_lr * self.lr_factors
        loss_dtype = torch.promote_types(torch.float32, self.parameters[0].dtype)
        self.one = torch.ones((), dtype=loss_dtype, device=self.device)


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What one update leaves for the host to read later.

    figures: (5,) on the device: loss, gradient norm, 1 if skipped, rate, loss scale (1 without
        scaling); None when no target was valid and nothing ran.
    """

    figures: Tensor | None
    counts: Counts
    examples: int
    lengths: tuple[int, ...]


def measured_update(
    training: Training, draw: Callable[[], Sequence[MicroBatch]], clock: Phases
) -> Outcome:
    """One complete update, from its first example to its last parameter.

    `draw` delivers every micro-batch of the update. Each micro-batch's summed loss is divided by
    the objective's denominator over all of them, so any split has the same gradient. The update
    is skipped, on the device where the optimizer can, if the gradient norm is not finite.
    """
    clock.enter("data")
    micros = draw()
    divisor = training.objective.denominator(micros)
    counts = sum((micro.counts for micro in micros), Counts())
    lengths = tuple(length for micro in micros for length in micro.lengths)
    if not divisor:
        clock.enter("other")
        return Outcome(figures=None, counts=counts, examples=len(lengths), lengths=lengths)

    clock.enter("optimizer")
    training.clear_gradients(training.optimizer)
    scale = training.scaler.scale if training.scaler else training.one
    # Every backward pass starts from this instead of 1, which is the same as multiplying its
    # summed loss by it: divisor and loss scale cost one operation per update.
    seed = scale / divisor
    loss = None
    for micro in micros:
        clock.enter("transfer")
        micro = to_device(micro, training.device)
        clock.enter("forward")
        with entered(training.forward_contexts()):
            hidden = training.model.hidden(  # type: ignore[operator]
                micro.input_ids, micro.positions, micro.segments
            )
            head_weight: Tensor = training.model.head_weight  # type: ignore[assignment]
            hidden, targets, weights = at_places(hidden, micro)
            part = training.loss.loss_sum(hidden, head_weight, targets, weights)
        clock.enter("backward")
        with entered(training.backward_contexts()):
            part.backward(gradient=seed)  # type: ignore[no-untyped-call]
        loss = part.detach() if loss is None else loss + part.detach()
        del hidden, targets, weights, part  # their memory is the next forward pass's

    clock.enter("optimizer")
    assert loss is not None
    gradients = [p.grad for p in training.parameters if p.grad is not None]
    if training.scaler:
        torch._foreach_mul_(gradients, 1 / scale)
    norm = torch.nn.utils.get_total_norm(gradients)
    bad = 1 - (norm < torch.inf).float()  # a norm is never negative; NaN is not below either
    if training.clip is not None:
        torch.nn.utils.clip_grads_with_norm_(training.parameters, training.clip, norm)
    lr = step_or_skip(training, bad)
    figures = torch.stack([loss / divisor, norm, bad, lr, scale])
    if training.scaler:
        training.scaler.update(bad)
    clock.enter("other")
    return Outcome(figures=figures, counts=counts, examples=len(lengths), lengths=lengths)


def step_or_skip(training: Training, bad: Tensor) -> Tensor:
    """Apply the update unless `bad` is 1; returns the learning rate used.

    Optimizers that skip on the device are told there. For the others the host reads the one flag,
    which is the only wait of an update and is declared in the evidence.
    """
    # `take`, since indexing with a tensor of no dimensions would read it on the host.
    lr = training.rates.take(training.applied.clamp(max=len(training.rates) - 1))
    optimizer = training.optimizer
    if training.skips_on_device:
        for group in optimizer.param_groups:
            group["lr"].copy_(lr)
        optimizer.found_inf = bad  # type: ignore[attr-defined]
        optimizer.step()
    elif not bad.item():
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(lr)
            else:
                group["lr"] = float(lr)
        optimizer.step()
    training.applied += bad == 0
    return lr


def at_places(hidden: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, targets and weights where the head is applied, as (1, n) for n places."""
    if micro.places is None:
        return hidden, micro.targets, micro.weights

    def there(x: Tensor) -> Tensor:
        return x.flatten(0, 1).index_select(0, micro.places)[None]  # type: ignore[arg-type]

    weights = None if micro.weights is None else there(micro.weights)
    return there(hidden), there(micro.targets), weights


def to_device(micro: MicroBatch, device: torch.device) -> MicroBatch:
    """The micro-batch with its tensors on `device`; asynchronous from pinned memory.

    One that another stream copies already is waited for on the device, not by the host.
    """
    if device.type == "cpu":
        return micro
    if micro.ready is not None:
        stream = torch.cuda.current_stream(device)
        stream.wait_event(micro.ready)
        for tensor in micro.tensors:
            tensor.record_stream(stream)  # its memory is free again only after this stream
        return micro
    return micro.moved(lambda held: held.to(device, non_blocking=True))
