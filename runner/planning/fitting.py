"""What fits: the largest micro-batch, and what each lever would save."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from runner.accounting import divisors
from runner.advice import Option, options
from runner.config import build, levers_of
from runner.contracts import UserError
from runner.environment import device_bytes
from runner.planning.planned import attempt, planned
from runner.planning.prediction import Prediction
from runner.planning.target import Target, target_of
from runner.units import bytes_of

PROCESSES = 2
"""Most processes that trace at the same time."""
WITHOUT_WEIGHTS = "model.init"
"""Key whose faults a plan does not mind."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of a job, as it is typed, and the whole config with it."""

    words: str
    config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What a change does to the peak.

    peak: with it, bytes; None where it cannot be had, and then `reason`. saved: bytes less than
    without it. work: hardware FLOPs over those without it.
    """

    words: str
    peak: int | None = None
    saved: int = 0
    work: float = 1.0
    reason: str = ""


Refusal = Callable[[Option], str | None]
"""Why an option cannot be had on the device, or None."""


def changes(
    config: Mapping[str, Any], refusal: Refusal, *, to_run: bool
) -> Iterator[Change | Saving]:
    """Every other option of every lever, and the next accumulation; as a Saving what the rest of
    the job or the device does not admit. to_run: whether weights to start from must be there."""
    for option in options():
        if option.node == config["memory"].get(option.group):
            continue
        changed = option.within(config)
        reason = conflict(changed, to_run=to_run) or refusal(option) or ""
        yield (
            Saving(words=option.words, reason=reason)
            if reason
            else Change(words=option.words, config=changed)
        )
    more = [n for n in divisors(config["batch"]) if n > config["accum"]]
    if more:
        yield Change(words=f"accum={more[0]}", config={**config, "accum": more[0]})


def conflict(changed: Mapping[str, Any], *, to_run: bool) -> str:
    """Why the job cannot have the option, or nothing."""
    try:
        levers = [build(n, key=k, allow=changed["allow"]) for k, n in levers_of(changed["memory"])]
    except UserError as error:
        return error.faults[0].allowed
    faults = [fault for lever in levers for fault in lever.conflicts(changed)]
    hard = [fault for fault in faults if to_run or fault.key != WITHOUT_WEIGHTS]
    return f"needs {hard[0].next_step}" if hard else ""


def savings(
    config: Mapping[str, Any],
    target: Target,
    base: Prediction,
    *,
    refusal: Refusal = lambda option: None,
    to_run: bool = False,
    processes: int = PROCESSES,
) -> list[Saving]:
    """What each change would save, most first; what cannot be had last.

    Traced in processes of their own, forked from this one; here where only one is allowed.
    """
    found = list(changes(config, refusal, to_run=to_run))
    wanted = [change for change in found if isinstance(change, Change)]
    tried = _attempts(wanted, target, processes)
    done = [saving_of(c, p, base) for c, p in zip(wanted, tried, strict=True)]
    done += [saving for saving in found if isinstance(saving, Saving)]
    return sorted(done, key=lambda saving: (saving.peak is None, -saving.saved))


def saving_of(change: Change, tried: Prediction | str, base: Prediction) -> Saving:
    """The saving of a change that was traced, or why it was not."""
    if isinstance(tried, str):
        return Saving(words=change.words, reason=tried)
    return Saving(
        words=change.words,
        peak=tried.peak_bytes,
        saved=base.peak_bytes - tried.peak_bytes,
        work=tried.flops / base.flops if base.flops else 1.0,
    )


def _attempts(wanted: Sequence[Change], target: Target, processes: int) -> list[Prediction | str]:
    """Tries of all changes, in their order. Options of one lever share a process, which loads
    what they need once."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for change in wanted:
        groups.setdefault(change.words.partition("=")[0], []).append(change.config)
    # The largest groups first, so that none of them is left to the end.
    order = sorted(groups, key=lambda name: -len(groups[name]))
    ordered = [groups[name] for name in order]
    run = partial(_in_turn, target=target)
    processes = min(processes, len(os.sched_getaffinity(0)), len(groups))
    if processes < 2:
        tried = [run(configs) for configs in ordered]
    else:
        with ProcessPoolExecutor(
            processes,
            mp_context=get_context("fork"),
            initializer=torch.set_num_threads,
            initargs=(1,),
        ) as pool:
            tried = list(pool.map(run, ordered))
    found = dict(zip(order, tried, strict=True))
    return [one for name in groups for one in found[name]]


def _in_turn(configs: Sequence[Mapping[str, Any]], target: Target) -> list[Prediction | str]:
    return [attempt(config, target) for config in configs]


def enough(config: Mapping[str, Any], target: Target, room: int, refusal: Refusal) -> list[Saving]:
    """The changes with which the job would fit into `room` bytes, least work first."""
    base = planned(config, target)
    rows = savings(config, target, base, refusal=refusal, to_run=True, processes=1)
    fit = [row for row in rows if row.peak is not None and row.peak <= room and row.saved > 0]
    return sorted(fit, key=lambda row: (row.work, -row.saved))


def room_of(limit: str | None, device: torch.device) -> int:
    """Bytes that an update may take: a limit, else what the device has for it."""
    if limit is not None:
        return bytes_of(limit)
    target = target_of(device)
    return (target.memory or device_bytes(device)) - target.context


# --- micro-batches ----------------------------------------------------------------------------


def smallest_accum(config: Mapping[str, Any], target: Target, room: int) -> int | None:
    """The smallest accumulation, that is the largest micro-batch, whose peak is within `room`
    bytes; None where not even one example fits. The global batch stays what it is.

    Raises what planning raises.
    """
    return smallest(
        divisors(config["batch"]), lambda accum: needs({**config, "accum": accum}, target), room
    )


def smallest(accums: Sequence[int], peak: Callable[[int], int], room: int) -> int | None:
    """The first of ascending accumulations whose peak is within `room`; peaks fall along them."""
    low, high = 0, len(accums)
    while low < high:
        middle = (low + high) // 2
        if peak(accums[middle]) <= room:
            high = middle
        else:
            low = middle + 1
    return accums[low] if low < len(accums) else None


def needs(config: Mapping[str, Any], target: Target) -> int:
    """Peak bytes of a job on a target."""
    return planned(config, target).peak_bytes
