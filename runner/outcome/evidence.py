"""What shows that a run did what its config says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import torch

from runner.assemble import Job, compiles
from runner.measure.clock import mark_cost, marks_per_update
from runner.outcome.run import Run
from runner.outcome.work import flops_of
from runner.precision.conversion import conversion_of, converted_flops
from runner.records import UpdateRecord


def evidence_of(run: Run) -> dict[str, Any]:
    """What shows that the run did what its config says, each item with how it is known."""
    job, loop = run.job, run.loop
    found: dict[str, Any] = {}

    def note(name: str, value: Any, how: str) -> None:
        found[name] = {"value": value, "how": how}

    note("controls", dict(run.controls), "read_back")
    if run.config["emulate"] and run.device is not None:
        words = f"ignored: {run.device} does this recipe's arithmetic itself; times are its own"
        note("emulation", run.emulated or words, "observed")
    if job is None:
        return found
    precision = job.parts.precision
    note("formats", dict(precision.formats), "declared")
    note("numerics", numerics_of(job), "declared")
    conversion = conversion_of(job.training.model)
    if conversion is not None:
        seen_how = "observed" if conversion.visible else "declared"
        note("converted_layers", conversion.to_json(), seen_how)
    note("accumulation", precision.formats["accumulate"], _accumulation_known(run))
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in job.training.parameters})
    note("parameter_dtypes", dtypes, "observed")
    note("frozen", frozen_of(job.training.model), "observed")
    group = job.training.optimizer.param_groups[0]
    note("optimizer_fused", bool(group.get("fused")), "read_back")
    reads_flag = job.device.type == "cuda" and not job.training.skips_on_device
    waits = ["one flag after the last backward pass"] if reads_flag else []
    note("host_waits_per_update", waits, "declared")
    if run.timeline is not None:
        note("timeline", asdict(run.timeline), "observed")
    if compiles(run.config):
        counted = run.compilations
        counts: dict[str, float] = {"graphs": counted.graphs, "recompilations": counted.again}
        if not run.emulated:
            counts["seconds"] = counted.seconds
        note("compilations", counts, "observed")
    note("corpus_fingerprint", job.corpus.fingerprint, "observed")
    if job.initial_weights:
        note("initial_weights", job.initial_weights, "observed")
    if run.trained is not None:
        note("tensors_trainable", run.trained.parameters, "observed")
        note("tensors_without_gradient", list(run.trained.no_gradient), "observed")
        note("tensors_unchanged", list(run.trained.unchanged), "observed")
        if run.trained.lost_share is not None:
            note("updates_lost_share", run.trained.lost_share, "observed")
        seen = run.trained.dispatched
        note("product_flops_by_operands", dict(seen.flops), "observed")
        if run.trained.kernels:
            note("kernels", dict(run.trained.kernels), "observed")
        note("attention_operators", list(seen.attention_operators), "observed")
        expected = converted_flops(job.training.model, run.trained.tokens.slots)
        if expected:
            note("converted_product_shares", seen.shares_of(expected), "observed")
        model = flops_of(job, run.trained.lengths, run.trained.tokens)
        work = {"model": model, "hardware": seen.total}
        note("update_flops", {**work, "recomputed": seen.recomputed}, "observed")
    if loop is not None and loop.records:
        steps = sum(record.total for record in loop.records)
        if not run.emulated:
            note("loop_wall_s", loop.wall_s, "observed")
            note("sum_of_steps_s", steps, "observed")
            note("marks_per_update", marks_per_update(run.config["accum"]), "declared")
            note("mark_s", mark_cost(job.device), "observed")
        scales = [r.loss_scale for r in loop.records if r.loss_scale is not None]
        if scales:
            note("loss_scale", scale_history(loop.records), "observed")
    return found


def frozen_of(model: torch.nn.Module) -> dict[str, Any]:
    """Bytes of the tensors that are not trained, by format; buffers of quantized layers too."""
    bytes_by_dtype: dict[str, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.requires_grad:
            name = str(tensor.dtype).removeprefix("torch.")
            bytes_by_dtype[name] = bytes_by_dtype.get(name, 0) + tensor.nbytes
    return {"bytes_by_dtype": bytes_by_dtype}


def scale_history(records: Sequence[UpdateRecord]) -> dict[str, Any]:
    """First and last loss scale, and every change as (attempt from which it holds, scale)."""
    known = [(r.attempt, r.loss_scale) for r in records if r.loss_scale is not None]
    changes = [new for old, new in pairwise(known) if old[1] != new[1]]
    return {"first": known[0][1], "last": known[-1][1], "changes": changes}


def _accumulation_known(run: Run) -> str:
    """How the format of sums is known: an emulation adds in FP32 itself; of a GPU's kernels the
    switches for reduced sums are read back."""
    if run.emulated:
        return "observed"
    on_gpu = run.device is not None and run.device.type == "cuda"
    switches = any("reduced_precision_reduction" in name for name in run.controls)
    return "read_back" if on_gpu and switches else "declared"


def numerics_of(job: Job) -> dict[str, str]:
    """What each part that varies declares to do to the loss curve, levers by their key."""
    parts = {"precision": job.parts.precision, "batching": job.parts.batching}
    return {key: part.numerics for key, part in {**parts, **job.parts.levers}.items()}
