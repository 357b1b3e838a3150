"""What fits: the largest micro-batch, and what each lever would save."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from multiprocessing import get_context
from typing import Any

import torch

from runner.accounting import divisors
from runner.advice import Option, options
from runner.config import build, levers_of
from runner.contracts import Lever
from runner.environment import device_bytes
from runner.planning.planned import attempted, planned
from runner.planning.prediction import Prediction
from runner.planning.target import Target, target_of
from runner.units import bytes_of

PROCESSES = 2
"""Most processes that trace at the same time."""
WITHOUT_WEIGHTS = "model.init"
"""Key whose faults a plan does not mind."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of a job, as it is typed, and the whole config with it.

    libraries: large ones that tracing it imports.
    """

    words: str
    config: Mapping[str, Any]
    libraries: tuple[str, ...] = ()


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
    """Every other option of every lever; as a Saving what the rest of the job or the device does
    not admit. to_run: whether weights to start from must be there."""
    pulled = {
        key: build(n, key=key, allow=config["allow"]) for key, n in levers_of(config["memory"])
    }
    for option in options():
        if option.node == config["memory"].get(option.group):
            continue
        changed = option.within(config)
        levers = {**pulled, f"memory.{option.group}": option.lever}
        reason = conflict(levers.values(), changed, to_run=to_run) or refusal(option) or ""
        yield (
            Saving(words=option.words, reason=reason)
            if reason
            else Change(words=option.words, config=changed, libraries=option.lever.libraries)
        )


def conflict(levers: Iterable[Lever], changed: Mapping[str, Any], *, to_run: bool) -> str:
    """Why the job that is changed cannot have these levers, or nothing."""
    faults = [fault for lever in levers for fault in lever.conflicts(changed)]
    hard = [fault for fault in faults if to_run or fault.key != WITHOUT_WEIGHTS]
    return f"needs {hard[0].next_step}" if hard else ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Plans:
    """Predictions of a job with one accumulation or another, each traced once."""

    config: Mapping[str, Any]
    target: Target
    found: dict[int, Prediction] = field(default_factory=dict)

    def at(self, accum: int) -> Prediction:
        """The prediction with an accumulation. Raises what planning raises."""
        if accum not in self.found:
            self.found[accum] = planned({**self.config, "accum": accum}, self.target)
        return self.found[accum]


def savings(
    config: Mapping[str, Any],
    target: Target,
    *,
    refusal: Refusal = lambda option: None,
    to_run: bool = False,
    processes: int = PROCESSES,
) -> list[Saving]:
    """What each change would save, most first; what cannot be had last."""
    plans = Plans(config=config, target=target)
    with begun(config, plans, refusal=refusal, to_run=to_run, processes=processes) as rows:
        return rows()


@contextmanager
def begun(
    config: Mapping[str, Any],
    plans: Plans,
    *,
    refusal: Refusal,
    to_run: bool = False,
    processes: int = PROCESSES,
) -> Iterator[Callable[[], list[Saving]]]:
    """Begin to trace what each change of a job would save; yields what waits for the savings.

    Options are traced in processes of their own, forked from this one when it has traced the job
    as it is, and other accumulations in this one; all of it here where only one is allowed.
    """
    base = plans.at(config["accum"])
    found = list(changes(config, refusal, to_run=to_run))
    wanted = [change for change in found if isinstance(change, Change)]
    more = [n for n in divisors(config["batch"]) if n > config["accum"]]
    with forked(min(processes, len(os.sched_getaffinity(0)))) as pool:
        tried = in_background(wanted, plans.target, pool)

        def rows() -> list[Saving]:
            pairs = [(f"accum={n}", attempted(partial(plans.at, n))) for n in more[:1]]
            pairs = [*tried(), *pairs]
            done = [saving_of(words, prediction, base) for words, prediction in pairs]
            done += [saving for saving in found if isinstance(saving, Saving)]
            return sorted(done, key=lambda saving: (saving.peak is None, -saving.saved))

        yield rows


def saving_of(words: str, tried: Prediction | str, base: Prediction) -> Saving:
    """The saving of a change that was traced, or why it was not."""
    if isinstance(tried, str):
        return Saving(words=words, reason=tried)
    return Saving(
        words=words,
        peak=tried.peak_bytes,
        saved=base.peak_bytes - tried.peak_bytes,
        work=tried.flops / base.flops if base.flops else 1.0,
    )


@contextmanager
def forked(processes: int) -> Iterator[Executor | None]:
    """Processes that trace, one thread each; None where there would be only one."""
    if processes < 2:
        yield None
        return
    pool = ProcessPoolExecutor(
        processes,
        mp_context=get_context("fork"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    )
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def in_background(
    wanted: Sequence[Change], target: Target, pool: Executor | None
) -> Callable[[], Iterator[tuple[str, Prediction | str]]]:
    """Begin to try all changes; returns what waits for the tries, by their words, in the order of
    the changes.

    Changes that import the same large libraries share a process, which imports them once, and
    begin first, since they take longest.
    """
    tasks: dict[Any, list[Change]] = {}
    for change in wanted:
        tasks.setdefault(change.libraries or change.words, []).append(change)
    order = sorted(tasks.values(), key=lambda task: not task[0].libraries)
    run = partial(_in_turn, target=target)
    configs = [[change.config for change in task] for task in order]
    results = (pool.map if pool else map)(run, configs)

    def tried() -> Iterator[tuple[str, Prediction | str]]:
        words = [change.words for task in order for change in task]
        found = dict(zip(words, chain.from_iterable(results), strict=True))
        return ((change.words, found[change.words]) for change in wanted)

    return tried


def _in_turn(configs: Sequence[Mapping[str, Any]], target: Target) -> list[Prediction | str]:
    return [attempted(partial(planned, config, target)) for config in configs]


def enough(config: Mapping[str, Any], target: Target, room: int, refusal: Refusal) -> list[Saving]:
    """The changes with which the job would fit into `room` bytes, least work first."""
    rows = savings(config, target, refusal=refusal, to_run=True, processes=1)
    fit = [row for row in rows if row.peak is not None and row.peak <= room and row.saved > 0]
    return sorted(fit, key=lambda row: (row.work, -row.saved))


def room_of(limit: str | None, device: torch.device) -> int:
    """Bytes that an update may take: a limit, else what the device has for it."""
    if limit is not None:
        return bytes_of(limit)
    target = target_of(device)
    return (target.memory or device_bytes(device)) - target.context


# --- micro-batches ----------------------------------------------------------------------------


def smallest_accum(plans: Plans, room: int) -> int | None:
    """The smallest accumulation, that is the largest micro-batch, whose peak is within `room`
    bytes; None where not even one example fits. The global batch stays what it is.

    Raises what planning raises.
    """
    accums = divisors(plans.config["batch"])
    return smallest(accums, lambda accum: plans.at(accum).peak_bytes, room)


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
