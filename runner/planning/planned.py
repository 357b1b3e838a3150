"""A job as a plan sees it: its largest micro-batch, without its corpus and without its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from runner.checks import Parts, build_parts
from runner.contracts import Example, MicroBatch, UserError
from runner.planning.prediction import Prediction, predict
from runner.planning.target import Target


def largest_micro_batch(config: Mapping[str, Any], parts: Parts) -> MicroBatch:
    """A micro-batch of examples that are all as long as `seq_len` allows: none is larger."""
    import numpy as np

    length, rows = config["seq_len"], config["batch"] // config["accum"]
    one = Example(ids=np.zeros(length, dtype=np.int64), loss=np.ones(length, dtype=np.bool_))
    micros = parts.batching.micro_batches([one] * rows, size=rows, pad_id=0, seq_len=length)
    micro: MicroBatch = max(micros, key=lambda found: found.counts.slots)
    weights = parts.objective.weights(micro)
    return micro if weights is None else replace(micro, weights=weights)


def planned(config: Mapping[str, Any], target: Target) -> Prediction:
    """What an update of the job needs on the target.

    Of an update with several micro-batches one that finds gradients there already is traced.
    """
    parts = build_parts(config)
    micro = largest_micro_batch(config, parts)
    accum = config["accum"]
    return predict(config, parts, [micro], target=target, held=accum > 1, times=accum)


def attempted(plan: Callable[[], Prediction]) -> Prediction | str:
    """A plan, or why it could not be made; for a table that goes on."""
    try:
        return plan()
    except UserError as error:
        return error.faults[0].allowed
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
