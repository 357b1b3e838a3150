"""Runs made up for comparisons: every figure is chosen by the test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from runner import checks
from runner.comparison.runs import ComparedRun
from runner.contracts import Counts
from runner.measure.live import CATEGORIES
from runner.records import PHASES, EvaluationRecord, JournalLine, RunRecord, UpdateRecord

CONFIG: dict[str, Any] = {
    **dict.fromkeys(checks.SETUP_KEYS),
    "model": {"_target_": "models.gpt.GPT", "layers": 1, "dropout": 0.0},
    "data": {"_target_": "runner.data.pydocs.PyDocs", "name": "pydocs"},
    "batching": {"_target_": "runner.data.padded.Padded"},
    "objective": {"_target_": "runner.objective.TokenMean"},
    "precision": {"_target_": "runner.precision.fp32.Fp32"},
    "optimizer": {"_target_": "runner.optimizer.AdamW", "lr": 0.002, "implementation": "fused"},
    "schedule": {"_target_": "runner.schedule.Constant"},
    "tracking": {"_target_": "runner.tracking.Off"},
    "memory": {"loss": {"_target_": "runner.memory.loss.Full"}},
    "batch": 8,
    "accum": 1,
    "updates": 4,
    "epochs": None,
    "warmup": 1,
    "seed": 0,
    "seq_len": 32,
    "device": "auto",
    "process": "fresh",
    "cache": "~/.cache/fullstep",
    "clip": 1.0,
    "allow": [],
    "eval": {"every": None, "examples": 64},
    "quality": {"margin": 0.01, "confidence": 0.95, "min_effect": 0.01},
}
BF16 = {"precision": {"_target_": "runner.precision.autocast.Autocast", "dtype": "bfloat16"}}
FP32_FORMATS = {"storage": "fp32", "compute": "fp32", "accumulate": "fp32", "state": "fp32"}
COMMAND = ("python", "-m", "runner", "-m", "precision=fp32,bf16", "seed=0,1,2", "batch=8")


def update(number: int, *, loss: float = 2.0, total: float = 0.1, **changes: Any) -> UpdateRecord:
    """An applied update of 8 examples and 100 useful tokens."""
    share = {phase: total / len(PHASES) for phase in PHASES}
    settings: dict[str, Any] = {
        "update": number,
        "attempt": number,
        "applied": True,
        "skipped_reason": None,
        "loss": loss,
        "grad_norm": 1.0,
        "lr": 0.001,
        "loss_scale": None,
        "tokens": Counts(useful=100, nonpad=108, slots=120),
        "examples": 8,
        "time": share,
        "total": total,
        "host": {"data": 0.0, "transfer": 0.0},
        "memory": None,
    }
    return UpdateRecord(**{**settings, **changes})


def evaluation(number: int, loss: float) -> EvaluationRecord:
    """A held-out loss over 500 targets."""
    return EvaluationRecord(update=number, eval_loss=loss, eval_tokens=500)


def run(
    setup: str,
    seed: int,
    loss: float | None = 3.0,
    *,
    status: str = "ok",
    message: str = "",
    step: float = 0.1,
    peak: float = 1e9,
    config: Mapping[str, Any] | None = None,
    evidence: Mapping[str, Any] | None = None,
    sizes: Mapping[str, Any] | None = None,
    journal: Sequence[JournalLine] | None = None,
    corpus: str = "c0ffee",
    swept: Mapping[str, str] | None = None,
    axes: Mapping[str, Sequence[str]] | None = None,
    **changes: Any,
) -> ComparedRun:
    """One run. `setup`: words `key=value`, also what was swept unless that is given."""
    resolved = {**deepcopy(CONFIG), **(config or {}), "seed": seed}
    summary = {"updates_applied": 4.0, "updates_attempted": 4.0, "updates_skipped": 0.0}
    if status == "ok":
        summary |= {
            "step_s_median": step,
            "step_s_p95": step * 1.1,
            "useful_tokens_per_s": 100 / step,
            "nonpad_tokens_per_s": 108 / step,
            "slots_tokens_per_s": 120 / step,
            "peak_allocated_bytes": peak,
            "train_loss": 2.0,
        }
        if loss is not None:
            summary["eval_loss"] = loss
    noted = {
        "controls": {"cuda.matmul.fp32_precision": "ieee"},
        "formats": FP32_FORMATS,
        "corpus_fingerprint": corpus,
        "optimizer_fused": True,
        **(evidence or {}),
    }
    record = {
        "status": status,
        "message": message,
        "command": COMMAND,
        "workload_id": checks.workload_id(resolved, corpus),
        "setup_id": checks.setup_id(resolved),
        "config": resolved,
        "summary": summary,
        "environment": {
            "packages": {"torch": "2.13.0"},
            "device": {"type": "cpu", "name": "Test CPU", "threads": 2},
        },
        "sizes": {
            "global_batch": 8,
            "micro_batch": 8,
            "params": 1000,
            "params_trainable": 1000,
            "padding_share": 0.1,
            "step_s": {"mean": step, "median": step, "count": 3.0, "spread": 0.01},
            "phase_shares": dict.fromkeys(PHASES, 1 / len(PHASES)),
            **(sizes or {}),
        },
        "memory": {
            "at_peak": {"parameters": peak * 0.25, "saved_activations": peak * 0.75},
            "curve": [[0, peak * 0.25, "optimizer"], [1, peak, "forward"], [2, peak, "backward"]],
            "by_category": {
                **{name: [0, 0, 0] for name in CATEGORIES},
                "parameters": [peak * 0.25] * 3,
                "saved_activations": [0, peak * 0.75, peak * 0.75],
            },
            "largest_live_object": "saved_activations: log_softmax (256, 272) float32 in head",
        },
        "evidence": {name: {"value": value, "how": "observed"} for name, value in noted.items()},
        "evaluation": {"last": loss, "tokens": 500},
        **changes,
    }
    words = dict(word.split("=", 1) for word in setup.split())
    return ComparedRun(
        run_id=f"{setup}/{seed}",
        setup=setup,
        seed=seed,
        record=RunRecord(**record),
        journal=[update(n, total=step) for n in range(1, 5)] if journal is None else journal,
        swept={"seed": str(seed), **words} if swept is None else swept,
        axes=axes or {},
    )


def pairs(baseline: Sequence[float], variant: Sequence[float], **changes: Any) -> list[ComparedRun]:
    """fp32 runs with these held-out losses by seed, and bf16 runs with those, so changed."""
    config = {**BF16, **changes.pop("config", {})}
    return [
        *(run("precision=fp32", seed, loss) for seed, loss in enumerate(baseline)),
        *(
            run("precision=bf16", seed, loss, config=config, **changes)
            for seed, loss in enumerate(variant)
        ),
    ]
