"""One update of a job on fake tensors, watched by the same tracker as a real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from runner.assemble import training_of
from runner.checks import Parts
from runner.contracts import MicroBatch
from runner.measure.account import MemoryTracker
from runner.measure.derive import category
from runner.measure.evidence import Watch
from runner.measure.live import Event, Log
from runner.planning.arithmetic import CudaArithmetic, again
from runner.planning.faked import fake_micro_batch, faking, state_only
from runner.planning.target import Target
from runner.step import Training, measured_update


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """What one update would do. layers: of the model that was traced. flops: hardware FLOPs."""

    log: Log
    layers: int
    flops: int


@dataclass(frozen=True, kw_only=True)
class OfOne:
    """Stands for a job's objective: a trace needs no divisor."""

    def denominator(self, micros: Sequence[MicroBatch]) -> float:
        """1."""
        return 1.0

    def weights(self, micro: MicroBatch) -> None:
        """The micro-batches of a trace have their weights already."""


class Both:
    """Tells several listeners of an update's phases."""

    def __init__(self, *listeners: Any) -> None:
        self._listeners = listeners

    def enter(self, phase: str) -> None:
        """From now on the update is in `phase`."""
        for listener in self._listeners:
            listener.enter(phase)


def trace(
    config: Mapping[str, Any],
    parts: Parts,
    micros: Sequence[MicroBatch],
    *,
    target: Target,
    layers: int | None = None,
    held: bool = False,
) -> Trace:
    """Trace the second update of a job, over `micros`, with a model of `layers` blocks or its own.

    held: leave the gradients where they are, as if another micro-batch had come before.

    Nothing is computed and nothing large allocated. The random state stays as it is.
    """
    spec = parts.model if layers is None else replace(parts.model, layers=layers)
    arithmetic = CudaArithmetic() if target.cuda else nullcontext()
    with faking() as mode:
        training = fake_training(config, replace(parts, model=spec), target)
        if held:
            training.clear_gradients = lambda optimizer: None
        faked = [fake_micro_batch(micro, mode) for micro in micros]
        tracker = MemoryTracker(
            model=training.model,
            optimizer=training.optimizer,
            inputs=[tensor for micro in faked for tensor in micro.tensors],
            masters=training.masters,
            rounding=target.rounding,
        )
        with arithmetic, Watch() as watch, tracker:
            measured_update(training, lambda: faked, Both(tracker, watch))
    log = on_device(tracker.log, parts) if target.cuda else tracker.log
    return Trace(log=log, layers=spec.describe().layers, flops=watch.result().total)


def fake_training(config: Mapping[str, Any], parts: Parts, target: Target) -> Training:
    """The job's training as it is after its first update, on fake tensors."""
    model: nn.Module = parts.model.build(config["seed"])
    model = parts.precision.prepare(model)
    if target.cuda:
        for block in model.blocks:  # type: ignore[union-attr]
            block.forward = again(block.forward)
    for lever in parts.levers.values():
        lever.apply(model)
    eager = {**config, "compile": "off"}
    training = training_of(eager, parts, torch.device("cpu"), model.train(), updates=1)
    training.objective = OfOne()
    for parameter in training.parameters:
        parameter.grad = torch.empty_like(parameter)
    with state_only():
        training.optimizer.step()
    # The gradients stay, as the update before leaves them.
    return training


def on_device(log: Log, parts: Parts) -> Log:
    """The log without what a lever keeps in host memory."""
    levers = list(parts.levers.values())
    hosted = {
        life
        for life in {event.life for event in log}
        if life is not None
        and any(lever.in_host_memory(category(life, log), life.label) for lever in levers)
    }

    def left(events: Sequence[Event]) -> list[Event]:
        return [event for event in events if event.life not in hosted]

    return Log(stretches=log.stretches, before=left(log.before), events=left(log.events))
