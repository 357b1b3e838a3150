"""Counts of examples, tokens, parameters and updates of a run."""

from __future__ import annotations

from typing import Any

from runner import accounting
from runner.assemble import Job
from runner.contracts import Counts
from runner.loop import Loop
from runner.outcome.run import Run
from runner.outcome.work import optimizer_bytes, timed_work


def sizes_of(run: Run) -> dict[str, Any]:
    """Counts of examples, tokens, parameters and micro-batches."""
    job, loop = run.job, run.loop
    if job is None:
        return {}
    shapes = job.description
    sizes: dict[str, Any] = {
        "global_batch": run.config["batch"],
        "micro_batch": job.feed.micro,
        "updates_planned": job.updates,
        "examples_train": None if job.corpus.stream else len(job.corpus.train),
        "examples_eval": len(job.corpus.eval),
        "examples_truncated": (job.corpus.stream or job.corpus).truncated,
        "examples_dropped": dict(job.corpus.dropped),
        "params": shapes.params,
        "params_trainable": sum(p.numel() for p in job.training.parameters),
        "params_by_decay": {
            str(group["weight_decay"]): sum(p.numel() for p in group["params"])
            for group in job.training.optimizer.param_groups
        },
    }
    if loop is not None and loop.records:
        sizes |= _work_sizes(job, loop)
        if run.emulated:
            sizes = {name: value for name, value in sizes.items() if name not in CLOCK_SIZES}
    return sizes


CLOCK_SIZES = ("step_s", "phase_shares", "marked", "model_flops_per_s")
"""Sizes that a clock gave; an emulated run has none."""


def _work_sizes(job: Job, loop: Loop) -> dict[str, Any]:
    total: Counts = accounting.total_counts(loop.records)
    counted = accounting.timed(loop.records)
    flops, seconds = timed_work(loop, job)
    return {
        "tokens": {"useful": total.useful, "nonpad": total.nonpad, "slots": total.slots},
        "padding_share": accounting.padding_share(total),
        "updates_timed": len(counted),
        "step_s": accounting.statistics([u.total for u in counted]),
        "phase_shares": accounting.phase_shares(counted),
        "marked": accounting.marked(loop.records),
        "model_flops_per_s": accounting.rate(flops, seconds),
        "optimizer_bytes_per_update": optimizer_bytes(job),
    }
