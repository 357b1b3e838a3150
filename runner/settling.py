"""`accum=auto`: the largest micro-batch that fits, predicted first and confirmed by a trial."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from runner.accounting import divisors
from runner.assemble import Job, assemble, feed_of, planned_updates
from runner.checks import AUTO, Parts
from runner.contracts import Corpus
from runner.measure.probe import probe
from runner.outcome.run import Run
from runner.planning.fitting import room_of, smallest
from runner.planning.prediction import predict
from runner.planning.target import target_of


def settled(run: Run, parts: Parts, device: torch.device, corpus: Corpus) -> Job:
    """The job of a run. Where it leaves its accumulation open, with the smallest that fits; the
    number stands in the run's config from then on, and the global batch stays what it is.

    Where no prediction fits the smallest micro-batch is taken, to fail with its account.
    """
    config = run.config
    if config["accum"] != AUTO:
        return assemble(config, parts, device, corpus)
    run.say("finding the largest micro-batch")
    room = room_of(config["memory_limit"], device)
    accums = divisors(config["batch"])
    first = smallest(accums, lambda accum: predicted(config, parts, device, corpus, accum), room)
    for accum in accums[accums.index(first or accums[-1]) : -1]:
        run.settle(accum)
        job = assemble(run.config, parts, device, corpus)
        if tried(job, room):
            return job
        del job
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    run.settle(accums[-1])
    return assemble(run.config, parts, device, corpus)


def predicted(
    config: Mapping[str, Any], parts: Parts, device: torch.device, corpus: Corpus, accum: int
) -> int:
    """Peak bytes of the largest updates of the job's order with this accumulation."""
    chosen = {**config, "accum": accum}
    feed = replace(feed_of(chosen, parts, corpus), pin=False)
    probes = feed.probes(planned_updates(chosen, len(corpus.train)))
    target = target_of(device)
    return max(predict(chosen, parts, m, target=target).peak_bytes for m in probes)


def tried(job: Job, room: int) -> bool:
    """Whether the largest updates of the order really fit."""
    try:
        account, _ = probe(job.training, job.feed.probes(job.updates))
    except torch.OutOfMemoryError:
        return False
    return account is None or account.peak_bytes <= room
