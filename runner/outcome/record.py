"""The record of a run, from whatever is known of it when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner import accounting, checks
from runner.data.stats import target_counts
from runner.environment import environment
from runner.numerics import summed_up
from runner.outcome.diagnosed import diagnosis_of
from runner.outcome.evidence import evidence_of
from runner.outcome.memory import memory_of, shortage_of
from runner.outcome.run import Run
from runner.outcome.sizes import sizes_of
from runner.outcome.summary import finite_only, summary_of
from runner.records import RunRecord, finite, nonfinite
from runner.states import place_of


def record_of(run: Run, status: str, message: str) -> RunRecord:
    """The record of a run, from whatever is known of it."""
    summary, dropped = finite_only(summary_of(run))
    return RunRecord(
        status=status,
        message="; ".join([message, *shortage_of(run)]) if status == "oom" else message,
        command=run.ticket["command"],
        workload_id=run.workload_id,
        setup_id=checks.setup_id(run.config),
        config=run.config,
        summary=summary,
        environment=_environment(run),
        sizes=sizes_of(run),
        memory=memory_of(run),
        evidence=evidence_of(run),
        numerics=numerics_found(run, dropped),
        evaluation=evaluation_of(run),
        diagnosis=diagnosis_of(run),
        job=place_of(run.ticket),
    )


def numerics_found(run: Run, dropped: Mapping[str, str]) -> dict[str, Any]:
    """What the formats did to the numbers; what of the summary was not finite."""
    found: dict[str, Any] = {"nonfinite_summary": dropped} if dropped else {}
    if run.gradients is not None:
        found["gradient_probe"] = run.gradients.to_json()
    if run.loop is not None and run.loop.looked:
        found["looks"] = summed_up(run.loop.looked)
    return found


def _environment(run: Run) -> dict[str, Any]:
    if run.device is None:
        return {}
    found = environment(run.device, Path(run.ticket["launch"]))
    found["device"]["other_processes"] = sorted(run.others)
    found |= {"process": run.config["process"], "emulated": run.emulated is not None}
    return found if run.emulated else {**found, "timings": run.timings}


def evaluation_of(run: Run) -> dict[str, Any]:
    """Held-out losses, and the entropy that a model without context could reach."""
    job, loop = run.job, run.loop
    if job is None or loop is None or not loop.evaluations:
        return {}
    count = min(run.config["eval"]["examples"], len(job.corpus.eval))
    targets = target_counts([job.corpus.eval[i] for i in range(count)])
    first, last = loop.evaluations[0], loop.evaluations[-1]
    return {
        "before": finite(first.eval_loss),
        "last": finite(last.eval_loss),
        "last_nonfinite": nonfinite(last.eval_loss),
        "last_update": last.update,
        "perplexity": math.exp(last.eval_loss) if last.eval_loss < 50 else None,
        "tokens": last.eval_tokens,
        "unigram_entropy": accounting.unigram_entropy(targets),
        "format": "fp32",
    }
