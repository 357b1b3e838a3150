"""One job in one fresh process: `python -m runner.worker`, with a run folder on standard input.

The launching process starts it early, so that its imports overlap with other checks, and then
writes the folder's path. Everything the worker has to say goes into that folder: `state.json`
while it runs, `journal.jsonl` per update, `record.json` at the end, its output in `worker.log`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from runner import checks
from runner.ahead import fed
from runner.assemble import (
    Job,
    check_device,
    choose_device,
    compiles,
    load_corpus,
    realised,
)
from runner.compiling import OFF
from runner.contracts import MicroBatch, Unsupported, UserError
from runner.environment import device_id, memory_in_use, other_processes
from runner.journal import Journal
from runner.locking import exclusive
from runner.loop import Diverged, Loop, Stopped
from runner.measure.allocator import Allocator, Peaks, allocator_of, keep_snapshot
from runner.measure.clock import clock_for
from runner.measure.gradients import measured_gradients
from runner.measure.looks import Looks
from runner.measure.probe import probe
from runner.measure.profiling import UPDATES, record_timeline
from runner.measure.shortage import MemoryLimit, account_of_a_part
from runner.outcome.record import record_of
from runner.outcome.run import Run
from runner.outcome.work import ridge_of
from runner.precision.controls import drift, set_controls
from runner.precision.conversion import conversion_of, converted_flops
from runner.records import JOURNAL
from runner.settling import settled
from runner.states import read_ticket
from runner.units import bytes_of
from runner.weights import save_weights


class Contradiction(Exception):
    """The evidence says that the run does not do what its config says."""


def run_folder(folder: Path, stop: Callable[[], bool]) -> str:
    """Run the job of a folder to its record; returns the status and raises nothing."""
    run = Run(folder=folder, ticket=read_ticket(folder))
    status, message = _guarded(run, stop)
    try:
        record_of(run, status, message).write(folder)
    except Exception:
        traceback.print_exc()
        status, message = "error", f"the record could not be written; see {folder}/worker.log"
        bare = Run(folder=folder, ticket=run.ticket)
        record_of(bare, status, message).write(folder)
    return status


def _guarded(run: Run, stop: Callable[[], bool]) -> tuple[str, str]:
    """Status and message of the job, whatever it does."""
    try:
        _work(run, stop)
    except Unsupported as error:
        return "unsupported", str(error)
    except Diverged as error:
        return "diverged", str(error)
    except Stopped as error:
        return "killed", str(error)
    except (UserError, Contradiction) as error:
        return "error", str(error)
    except MemoryLimit as error:
        return "oom", str(error)
    except BaseException as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".strip()
        if not _out_of_memory(error):
            return "error", text
        save_snapshot(run)
        return "oom", text
    return "ok", ""


def looks_of(job: Job, probes: Sequence[Sequence[MicroBatch]]) -> Looks | None:
    """The looks at numerics that the job asks for."""
    every = job.config["numerics"]["every"]
    micros = next((micros for micros in probes if any(m.counts.useful for m in micros)), None)
    if every is None or micros is None:
        return None
    return Looks(training=job.training, recipe=job.parts.precision, micros=micros, every=every)


def limit_memory(run: Run, device: torch.device) -> None:
    """Let torch allocate no more than `memory_limit` on a CUDA device. Raises Unsupported where
    nothing could hold a job to it."""
    limit = run.config["memory_limit"]
    if limit is None:
        return
    if device.type != "cuda":
        if compiles(run.config):
            raise Unsupported(
                f"memory_limit={limit} on a CPU is held against the memory account, which compiled "
                "code has none of; compile=off, or no memory_limit"
            )
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, bytes_of(limit) / total), device)


def hold_to_limit(run: Run) -> None:
    """Raise MemoryLimit on a CPU, whose allocator has no limit, when the account is over it."""
    limit, account = run.config["memory_limit"], run.account
    assert run.device is not None
    if limit is None or account is None or run.device.type == "cuda":
        return
    if account.peak_bytes > bytes_of(limit):
        raise MemoryLimit(f"the account's peak is over memory_limit={limit}")


def free_what_is_left(allocator: Allocator) -> None:
    """Free what a job before this one left in the process, which only `process=inline` has: its
    model may wait for the garbage collector, and would be in this job's peaks."""
    if allocator.read().now:
        gc.collect()
        torch.cuda.empty_cache()


def save_snapshot(run: Run) -> None:
    """Keep what CUDA's allocator held when memory ran out; what fails at that only reaches the
    log, since the shortage is what the job ends with."""
    try:
        if run.device is not None:
            keep_snapshot(run.device, run.folder / "artifacts")
    except Exception:
        traceback.print_exc()


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _work(run: Run, stop: Callable[[], bool]) -> None:
    config = run.config
    parts = checks.build_parts(config)
    device = run.device = choose_device(config["device"])
    check_device(config, device)
    parts, run.emulated = realised(config, parts, device)
    lock = exclusive(
        device_id(device), waiting=lambda: run.say("waiting for the device"), stop=stop
    )
    counted = run.compilations if compiles(config) else nullcontext()
    with lock as held, counted:
        if not held:
            raise Stopped("stopped by a signal while another job held the device")
        _train(run, parts, device, stop)


def _train(run: Run, parts: checks.Parts, device: torch.device, stop: Callable[[], bool]) -> None:
    begin = perf_counter()
    config = run.config
    run.others |= set(other_processes(device))
    allocator = allocator_of(device)
    if allocator is not None:
        free_what_is_left(allocator)
        run.in_use["before"] = memory_in_use(device, allocator.read().now)
    run.controls = set_controls(parts.precision.controls())
    limit_memory(run, device)
    run.say("preparing data")
    corpus = load_corpus(config, parts)
    run.timings["data_s"] = perf_counter() - begin
    run.workload_id = checks.workload_id(config, corpus.fingerprint)
    job = run.job = settled(run, parts, device, corpus)
    config = run.config
    run.say(
        "started",
        workload_id=run.workload_id,
        updates=job.updates,
        device=str(device),
        accum=config["accum"],
        emulated=run.emulated is not None,
    )
    before = perf_counter()
    eager = config["compile"] == OFF
    probes = job.feed.probes(job.updates)
    if eager and config["plan"]["predict"]:
        run.foretell(probes)
    run.timings["predict_s"] = perf_counter() - before
    before = perf_counter()
    try:
        run.account, run.trained = probe(job.training, probes, account=eager)
    except torch.OutOfMemoryError:
        save_snapshot(run)
        run.account = account_of_a_part(job.training, probes)
        raise
    hold_to_limit(run)
    run.timings["probe_s"] = perf_counter() - before
    compute = parts.precision.formats["compute"]
    seen = run.trained.dispatched
    lost = parts.precision.may_round_away
    found = [run.trained.contradiction(may_round_away=lost)]
    found += [lever.contradiction(seen) for lever in parts.levers.values()]
    if conversion_of(job.training.model) is None:
        found.append(seen.contradiction(compute))
    expected = converted_flops(job.training.model, run.trained.tokens.slots)
    found.append(seen.conversion_contradiction(expected))
    against = [text for text in found if text]
    if against:
        raise Contradiction(f"evidence: {'; '.join(against)}")
    if config["numerics"]["probe"] and parts.precision.numerics == "close":
        begin_s = perf_counter()
        run.gradients = measured_gradients(job.training, parts.precision, probes[-1])
        run.timings["gradients_s"] = perf_counter() - begin_s
    if config["profile"]:
        profiled = [next(job.feed.draws(start)) for start in range(UPDATES)]
        artifacts = run.folder / "artifacts"
        run.timeline = record_timeline(job.training, profiled, artifacts, ridge=ridge_of(run))
    journal = Journal(run.folder / JOURNAL, timed=run.emulated is None)
    draws = fed(job.feed, device)
    known = None if run.account is None else run.account.peak_bytes
    try:
        run.loop = Loop(
            training=job.training,
            draws=draws,
            clock=clock_for(device),
            journal=journal,
            evaluation=job.evaluation,
            updates=job.updates,
            warmup=config["warmup"],
            eval_every=config["eval"]["every"],
            stop=stop,
            compiled=lambda: run.compilations.graphs,
            looks=looks_of(job, probes),
            peaks=None if allocator is None else Peaks(allocator, known),
        )
        run.loop.run()
    finally:
        draws.close()
        journal.close()
    run.others |= set(other_processes(device))
    if allocator is not None:
        run.in_use["after"] = memory_in_use(device, allocator.read().now)
    drifted = drift(run.controls)
    if drifted:
        raise Contradiction(f"evidence: {drifted}")
    if config["checkpoint"]["final"]:
        facts = {"workload_id": run.workload_id, "setup_id": checks.setup_id(config)}
        with parts.precision.evaluation(job.training.model):  # in FP32, masters where there are
            save_weights(job.training.model, run.folder, facts, merged_weights(job))
    run.timings["job_s"] = perf_counter() - begin


def merged_weights(job: Job) -> Mapping[str, Tensor] | None:
    """What a lever has made of the model's weights for the plain architecture, if one has."""
    found = [lever.merged(job.training.model) for lever in job.parts.levers.values()]
    return next((weights for weights in found if weights is not None), None)


# --- the process ------------------------------------------------------------------------------


class StopFlag:
    """Remembers that a signal asked the job to stop."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    def listen(self) -> None:
        """Turn SIGTERM and SIGINT into a request, honoured before the next update."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.asked = True


def die_with_parent() -> None:
    """Ask Linux for SIGTERM when the launching process dies, so that no worker is orphaned."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def main() -> int:
    """Wait for a folder on standard input, run its job; 0 when its record was written."""
    die_with_parent()
    stop = StopFlag()
    stop.listen()
    line = sys.stdin.readline().strip()
    if not line:
        return 0
    folder = Path(line)
    log = os.open(folder / "worker.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    run_folder(folder, stop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
