"""The work of a run: FLOPs and bytes that its updates must do and move."""

from __future__ import annotations

from typing import Any

import torch

from runner import accounting
from runner.assemble import Job
from runner.contracts import Counts
from runner.loop import Loop
from runner.measure.peaks import peak_bytes_per_s, peak_flops_per_s
from runner.measure.storages import plain_tensors
from runner.outcome.run import Run


def device_name(device: torch.device) -> str:
    """The name that the table of peaks knows a device by."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def timed_work(loop: Loop, job: Job) -> tuple[float, float]:
    """Model FLOPs and seconds over the updates without a mark."""
    flops, seconds = 0.0, 0.0
    for record, lengths in zip(loop.records, loop.lengths, strict=True):
        if not record.marks:
            flops += flops_of(job, lengths, record.tokens)
            seconds += record.total
    return flops, seconds


def flops_of(job: Job, lengths: Any, tokens: Counts) -> int:
    """Model FLOPs of an update over documents of these lengths; where the head is applied at
    targets only, the other real tokens have none."""
    shapes = job.description
    targets_only = getattr(job.parts.batching, "head_on_targets", False)
    return accounting.model_flops(
        matmul_params=shapes.matmul_params,
        layers=shapes.layers,
        heads=shapes.heads,
        head_width=shapes.head_width,
        lengths=lengths,
        head_params=shapes.vocab * shapes.width,
        headless=tokens.nonpad - tokens.useful if targets_only else 0,
        frozen_params=shapes.frozen_matmul_params,
    )


def ridge_of(run: Run) -> float | None:
    """Peak FLOP/s over peak bytes/s of the device in the recipe's format, or None."""
    assert run.job is not None and run.device is not None
    name = device_name(run.device)
    flops = peak_flops_per_s(name, run.job.parts.precision.formats["compute"])
    moved = peak_bytes_per_s(name)
    return flops / moved if flops and moved else None


def optimizer_bytes(job: Job) -> int:
    """Bytes that one parameter update must move, see `accounting.optimizer_traffic`."""
    state = job.training.optimizer.state
    return accounting.optimizer_traffic(
        parameters=sum(p.nbytes for p in job.training.parameters),
        gradients=sum(p.nbytes for p in job.training.parameters),
        moments=sum(
            sum(plain.nbytes for plain in plain_tensors(value))
            for parameter in job.training.parameters
            for value in state.get(parameter, {}).values()
            if isinstance(value, torch.Tensor) and value.numel() == parameter.numel() > 1
        ),
    )
