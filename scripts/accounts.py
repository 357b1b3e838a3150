"""The memory account against torch's profiler and the prediction against the account, over setups.

    python scripts/accounts.py [--fast]

For every setup of a list that holds every option of every memory lever and every recipe that a CPU
runs, one update is run for real and three figures are set side by side: the most bytes that torch's
profiler saw allocated on top of what was there before (its own events, independent of the
account), the account's peak, and the peak that was predicted before anything ran. Where account and
profiler differ, what no account of operations' results can have is listed by name as it was at the
profiler's peak, and the difference is given again without it: what an operation allocated for
itself, born and freed inside it, and what was made outside operations, as the states of the random
generator are that recomputation keeps. Exit code 1 if an account is off by more than 1 % of the
profiler's figure or a prediction by more than 3 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runner.advice import options
from runner.assemble import realised, training_of
from runner.checks import Parts, build_parts
from runner.compose import command_of
from runner.config import conf_dir
from runner.contracts import MicroBatch, Unsupported, UserError
from runner.door import parser
from runner.measure.probe import probe
from runner.measure.storages import PLAIN, overrides, plain_tensors
from runner.planning.planned import largest_micro_batch
from runner.planning.prediction import predict
from runner.planning.target import CPU
from runner.step import Training, measured_update

ACCOUNT, PREDICTION = 0.01, 0.03
BASE = ("seq_len=128", "batch=16", "accum=2", "model.width=64", "device=cpu")
EXTRA = (
    "accum=1",
    "accum=4 model.layers=6",
    "model.layers=8 memory/checkpointing=full",
    "model.layers=9 memory/checkpointing=every",
    "model.layers=6 precision=bf16",
    "model.layers=6 precision=bf16 memory/checkpointing=full memory/loss=chunked",
    "model.layers=6 memory/optimizer_state=8bit memory/checkpointing=selective",
    "model=llama_tiny",
    "model=llama_tiny precision=bf16 batching=packed",
    "optimizer.implementation=foreach",
    "optimizer.implementation=plain",
    "objective=class_weighted",
)
"""Setups beside the single options: deeper models, two levers at a time, other parts."""
NEEDS = {"memory/optimizer_state=bf16": "optimizer.betas=[0.9,0.95]"}
"""What an option asks of the rest of the job."""


class Phases:
    """Listens to an update and does nothing."""

    def enter(self, phase: str) -> None:
        """Nothing."""


def setups() -> Iterator[str]:
    """Every option of every lever and every recipe on its own, then EXTRA."""
    for option in options():
        yield " ".join(filter(None, (option.words, NEEDS.get(option.words))))
    for path in sorted((conf_dir() / "precision").glob("*.yaml")):
        yield f"precision={path.stem} emulate=true"
    yield from EXTRA


def training_for(config: Mapping[str, Any], parts: Parts) -> Training:
    """The job's training on the CPU; raises what a lever refuses as Unsupported."""
    torch.manual_seed(0)
    device = torch.device("cpu")
    model = parts.precision.prepare(parts.model.build(0))
    for lever in parts.levers.values():
        refused = lever.refusal(parts.model.describe(), parts.precision, device)
        if refused:
            raise Unsupported(refused)
        lever.apply(model)
    return training_of(config, parts, device, model.train(), updates=8)


def resting_bytes(training: Training, micros: Sequence[MicroBatch]) -> int:
    """Bytes of what exists before an update whose gradients are cleared."""
    found = [*training.model.parameters(), *training.model.buffers(), *training.parameters]
    found += [tensor for micro in micros for tensor in micro.tensors]
    found += [training.applied, training.rates, training.one]
    for state in training.optimizer.state.values():
        found += [value for value in state.values() if isinstance(value, torch.Tensor)]
    for group in training.optimizer.param_groups:
        found += [value for value in group.values() if isinstance(value, torch.Tensor)]
    storages = {
        plain.untyped_storage().data_ptr(): plain.untyped_storage().nbytes()
        for tensor in found
        for plain in plain_tensors(tensor)
    }
    return sum(storages.values())


class Named(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks in the profiler's trace where each operation begins and ends that an account sees."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation under its name, as `runner.measure.storages.Follow` would see it."""
        if any(kind not in PLAIN and overrides(kind) for kind in types):
            return NotImplemented
        with torch.profiler.record_function(SEEN + func._schema.name.partition("::")[2]):
            return func(*args, **(kwargs or {}))


SEEN = "seen::"


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """What torch's profiler saw of an update.

    peak: most bytes. unseen: bytes at the peak that are the result of no operation, by name;
    peak_without: most bytes with none of these. Both need an update that was `named`.
    """

    peak: int
    unseen: Mapping[str, int]
    peak_without: int


def profiled(training: Training, micros: Sequence[MicroBatch], *, named: bool) -> Profiled:
    """One update under torch's profiler."""
    training.optimizer.zero_grad(set_to_none=True)
    resting = resting_bytes(training, micros)
    with (
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile,
        Named() if named else nullcontext(),
    ):
        measured_update(training, lambda: micros, Phases())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return of_trace(events, resting)


def of_trace(events: Sequence[Mapping[str, Any]], resting: int) -> Profiled:
    """Peaks of a trace, on top of `resting` bytes that were there before it."""
    memory = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: float(e["ts"]))
    first = memory[0]["args"]
    start = first["Total Allocated"] - first["Bytes"]
    totals = [resting + event["args"]["Total Allocated"] - start for event in memory]
    top = max(range(len(totals)), key=totals.__getitem__)
    spans = [e for e in events if e["name"].startswith(SEEN)]
    without = list(totals)
    at_peak: Counter[str] = Counter()
    for birth, death, size, name in unseen_blocks(memory, spans):
        for place in range(birth, death):
            without[place] -= size
        if birth <= top < death:
            at_peak[name] += size
    return Profiled(peak=totals[top], unseen=at_peak, peak_without=max(without))


def unseen_blocks(
    memory: Sequence[Mapping[str, Any]], spans: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[int, int, int, str]]:
    """Blocks that were allocated and freed inside one operation, or outside any: numbers of the two
    events (that of the death past the last where there is none), bytes, name. `memory` is in order
    of time."""
    order = sorted(spans, key=lambda span: float(span["ts"]))
    now: list[Mapping[str, Any]] = []
    live: dict[int, tuple[int, int, Mapping[str, Any] | None]] = {}
    for number, event in enumerate(memory):
        at, place, size = float(event["ts"]), event["args"]["Addr"], event["args"]["Bytes"]
        while order and float(order[0]["ts"]) <= at:
            now.append(order.pop(0))
        now = [span for span in now if float(span["ts"]) + float(span["dur"]) >= at]
        if size > 0:
            live[place] = (number, size, now[0] if now else None)
        elif place in live:
            birth, held, span = live.pop(place)
            if span is None:
                yield birth, number, held, outside(held)
            elif any(span is other for other in now):
                yield birth, number, held, str(span["name"]).removeprefix(SEEN)
    for birth, held, span in live.values():
        if span is None:
            yield birth, len(memory), held, outside(held)


def outside(size: int) -> str:
    """What a block of this size is called that was allocated outside operations."""
    generator = size == torch.get_rng_state().nbytes
    return "state of the random generator" if generator else "outside operations"


def row(words: str) -> tuple[Profiled, int, int] | str:
    """What the profiler saw, the account's and the predicted peak; or why the setup cannot be had
    here."""
    args = parser().parse_args([*BASE, *words.split()])
    try:
        config = dict(command_of(args, Path("/"), to_run=False).jobs[0].config)
        parts, _ = realised(config, build_parts(config), torch.device("cpu"))
        micros = [largest_micro_batch(config, parts)] * min(2, config["accum"])
        training = training_for(config, parts)
    except (UserError, Unsupported) as error:
        return f"{words}: refused: {str(error).partition(chr(10))[0]}"
    foreseen = predict(config, parts, micros, target=CPU).peak_bytes
    account, _ = probe(training, [micros])
    assert account is not None
    training = training_for(config, parts)
    for _ in range(4):  # a loss scale comes down, and the optimizer's state appears
        measured_update(training, lambda: micros, Phases())
    plain = profiled(training, micros, named=False)
    if plain.peak == account.peak_bytes:
        return plain, account.peak_bytes, foreseen
    seen = profiled(training, micros, named=True)
    return replace(seen, peak=plain.peak), account.peak_bytes, foreseen


def unseen_words(seen: Profiled, account: int) -> str:
    """What no account can have of the peak, and the difference without it."""
    if seen.peak == account:
        return "equal to the byte"
    listed = ", ".join(f"{name} {size:,} B" for name, size in Counter(seen.unseen).most_common(3))
    rest = account - seen.peak_without
    return f"{listed or 'nothing'}; without it {f'{rest:+,} B' if rest else 'equal to the byte'}"


def main() -> int:
    """Print the table."""
    arguments = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    arguments.add_argument("--fast", action="store_true", help="only every fourth setup")
    chosen = list(setups())[:: 4 if arguments.parse_args().fast else 1]
    torch.set_num_threads(1)
    bad = 0
    print("| setup | profiler MiB | account MiB | off | in no result | predicted MiB | off |")
    print("|---|---|---|---|---|---|---|")
    refused = []
    for words in chosen:
        found = row(words)
        if isinstance(found, str):
            refused.append(found)
            continue
        seen, account, foreseen = found
        off, error = account / seen.peak - 1, foreseen / account - 1
        bad += abs(off) > ACCOUNT or abs(error) > PREDICTION
        print(
            f"| {words} | {seen.peak / 2**20:.3f} | {account / 2**20:.3f} | {off:+.2%} "
            f"| {unseen_words(seen, account)} | {foreseen / 2**20:.3f} | {error:+.2%} |",
            flush=True,
        )
    print(f"\n{bad} beyond {ACCOUNT:.0%} and {PREDICTION:.0%}; refused here:")
    print("\n".join(f"- {line}" for line in refused))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
