"""Untimed updates before the timed ones: the memory account, and proof that training trains.

They run the real `measured_update` on the real order's largest micro-batches and leave no trace:
weights, optimizer state, loss scale, counters and random state are put back bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from runner.contracts import Counts, MicroBatch
from runner.measure.account import MemoryAccount, MemoryTracker
from runner.measure.allocator import allocator_of
from runner.measure.evidence import Dispatched, Watch
from runner.measure.kernels import kernels_of
from runner.measure.live import CUDA_BLOCK
from runner.step import Training, measured_update
from runner.weights import unique_tensors

TRIES = 8
"""Untimed updates until one is applied: a loss scale may first have to come down."""


class Silent:
    """Listens to the phases of an update and does nothing."""

    def enter(self, phase: str) -> None:
        """Nothing."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What the untimed updates showed of the gradients and weights.

    parameters: trainable tensors. no_gradient: those whose gradient was missing or all zero in
    every untimed update. unchanged: those that no update changed. applied: whether any update was
    applied at all. dispatched: formats and operators of the last untimed update, over documents
    of the given lengths and with these counts of tokens. kernels: on CUDA, the kernels of an
    update that multiply matrices, counted by name. lost_share: where weights are stored in fewer
    bits than FP32, share of those with a gradient that no update changed: it rounded away.
    """

    parameters: int
    no_gradient: tuple[str, ...]
    unchanged: tuple[str, ...]
    applied: bool
    dispatched: Dispatched
    lengths: tuple[int, ...] = ()
    tokens: Counts = field(default_factory=Counts)
    kernels: Mapping[str, int] = field(default_factory=dict)
    lost_share: float | None = None

    def contradiction(self, *, may_round_away: bool = False) -> str | None:
        """Why this run would not train what it says, or None. With `may_round_away`, weights that
        no update changed are no fault: their format may be too coarse for the update."""
        if not self.parameters:
            return "the model has no trainable parameter"
        if not self.applied:
            return None
        for what, names in (
            ("no gradient reaches", self.no_gradient),
            ("no update changes", () if may_round_away else self.unchanged),
        ):
            if names:
                listed = ", ".join(names[:4])
                return f"{what} {len(names)} of {self.parameters} trainable tensors: {listed}"
        return None


def _kept(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything that a model remembers, buffers that are in no weights file included."""
    return {**dict(unique_tensors(model)), **dict(model.named_buffers())}


@contextmanager
def untouched(training: Training) -> Iterator[dict[str, torch.Tensor]]:
    """Run untimed updates inside; afterwards training is as if they had not happened.

    Yields what the optimizer changes, by name, as copied to the CPU. Requires an optimizer that
    has no state yet.
    """
    assert not training.optimizer.state, "untimed updates come before the first real one"
    before = {
        name: tensor.detach().to("cpu", copy=True) for name, tensor in _kept(training.model).items()
    }
    masters = {n: tensor.detach().to("cpu", copy=True) for n, tensor in training.masters.items()}
    applied = training.applied.clone()
    scaling = training.scaler.state_dict() if training.scaler else None
    cuda = [training.device] if training.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        try:
            yield {**before, **masters}
        finally:
            training.optimizer.zero_grad(set_to_none=True)
            training.optimizer.state.clear()
            with torch.no_grad():
                for name, tensor in _kept(training.model).items():
                    tensor.copy_(before[name])
                for name, tensor in training.masters.items():
                    tensor.copy_(masters[name])
            training.applied.copy_(applied)
            if training.scaler and scaling:
                training.scaler.load_state_dict(scaling)


def probe(
    training: Training, probes: Sequence[Sequence[MicroBatch]], *, account: bool = True
) -> tuple[MemoryAccount | None, Trained]:
    """The memory account with the larger peak over `probes`, and what the updates showed.

    Without `account` no account is taken: watching dispatch makes compiled code run eagerly, whose
    memory is another.
    """
    with untouched(training) as before:
        seen: set[str] = set()
        applied = False
        for _ in range(TRIES):
            applied = _update(training, probes[-1], seen) or applied
            if applied:
                break
        accounts = [_account(training, micros) for micros in probes] if account else []
        with Watch() as watch:
            watched = measured_update(training, lambda: probes[-1], watch)
        kernels = _kernels(training, probes[-1]) if training.device.type == "cuda" else {}
        _note_gradients(training, seen)
        trained = replace(
            _trained(training, before, seen, applied, watch.result()),
            lengths=watched.lengths,
            tokens=watched.counts,
            kernels=kernels,
        )
    return max(accounts, key=lambda found: found.peak_bytes, default=None), trained


def _kernels(training: Training, micros: Sequence[MicroBatch]) -> dict[str, int]:
    return kernels_of(lambda: measured_update(training, lambda: micros, Silent()), training.device)


def _account(training: Training, micros: Sequence[MicroBatch]) -> MemoryAccount:
    allocator = allocator_of(training.device)
    inputs = [tensor for micro in micros for tensor in micro.tensors]
    if allocator is not None:
        micros, inputs = ahead(micros, lambda held: held.to(training.device))
    tracker = MemoryTracker(
        model=training.model,
        optimizer=training.optimizer,
        inputs=inputs,
        masters=training.masters,
        grids=[(micro.input_ids.shape[0], micro.input_ids.shape[1]) for micro in micros],
        rounding=1 if allocator is None else CUDA_BLOCK,
        held=None if allocator is None else allocator.read().now,
    )
    with tracker:
        measured_update(training, lambda: micros, tracker)
    return tracker.account()


def ahead(
    micros: Sequence[MicroBatch], move: Callable[[Any], Any]
) -> tuple[list[MicroBatch], list[Tensor]]:
    """The micro-batches of an update on their device, and all tensors that the loop keeps there:
    these, and as many of the next update (`runner.ahead.Copied`)."""
    current, following = ([micro.moved(move) for micro in micros] for _ in range(2))
    return current, [tensor for micro in (*current, *following) for tensor in micro.tensors]


def applied_once(training: Training, micros: Sequence[MicroBatch]) -> bool:
    """Untimed updates until one is applied, TRIES at most; whether one was."""
    return any(_update(training, micros, set()) for _ in range(TRIES))


def _update(training: Training, micros: Sequence[MicroBatch], seen: set[str]) -> bool:
    outcome = measured_update(training, lambda: micros, Silent())
    _note_gradients(training, seen)
    return outcome.figures is not None and not outcome.figures.tolist()[2]


def _note_gradients(training: Training, seen: set[str]) -> None:
    for name, parameter in training.trained.items():
        if parameter.grad is not None and bool(parameter.grad.count_nonzero()):
            seen.add(name)


def _trained(
    training: Training,
    before: dict[str, torch.Tensor],
    seen: set[str],
    applied: bool,
    dispatched: Dispatched,
) -> Trained:
    trainable = list(training.trained.items())
    return Trained(
        parameters=len(trainable),
        no_gradient=tuple(name for name, _ in trainable if name not in seen),
        unchanged=tuple(n for n, p in trainable if torch.equal(p.detach().cpu(), before[n])),
        applied=applied,
        dispatched=dispatched,
        lost_share=lost_share(trainable, before) if applied else None,
    )


def lost_share(
    trained: Sequence[tuple[str, torch.Tensor]], before: Mapping[str, torch.Tensor]
) -> float | None:
    """Of the elements of narrow tensors that have a gradient, the share that is as it was."""
    same = given = 0
    for name, tensor in trained:
        if tensor.element_size() < 4 and tensor.grad is not None:
            reached = tensor.grad != 0
            kept = tensor.detach() == before[name].to(tensor.device)
            given += int(reached.sum())
            same += int((reached & kept).sum())
    return same / given if given else None
