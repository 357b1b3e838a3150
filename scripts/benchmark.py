"""What a complete update costs in this runner, beside a bare loop and two other frameworks.

`python -m scripts.benchmark` (with the extra `bench`) times all of them in alternating blocks of
one run, each in a process of its own, and prints a table; `--write README.md` also puts it
between the markers there. Before anything is timed, every contestant's losses must equal the
bare loop's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from runner.compose import Plan, command_of
from runner.door import parser
from scripts.overhead.figures import BARE, LABELS, rows_of, table, write_between
from scripts.overhead.rounds import Round


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and a batch, as overrides of the runner's configuration.

    check: updates whose losses are compared. turn: updates of one contestant in one block; of
    several the first is not counted. blocks: of each round: the shorter a block, the more alike
    is the machine to all contestants in it, and the more blocks are needed. rounds: of fresh
    processes.
    """

    name: str
    overrides: Sequence[str]
    check: int
    turn: int
    blocks: int
    rounds: int

    def plan(self) -> Plan:
        """The job; more updates than anybody will have the patience for."""
        return command_of(parser().parse_args([*COMMON, *self.overrides]), Path.cwd()).jobs[0]


COMMON = (
    "batch=8",
    "accum=4",
    "schedule=constant",
    "optimizer.lr=1e-3",
    "updates=100_000",
    "warmup=0",
    "device=cpu",
)
WORKLOADS = (
    Workload(
        name="2 layers, width 64; 4 micro-batches of 2 x 64 tokens",
        overrides=("seq_len=64",),
        check=12,
        turn=21,
        blocks=12,
        rounds=12,
    ),
    Workload(
        name="4 layers, width 256; 4 micro-batches of 2 x 128 tokens",
        overrides=(
            "seq_len=128",
            "model.layers=4",
            "model.heads=4",
            "model.width=256",
            "model.vocab=2048",
            "model.init_std=0.02",
        ),
        check=4,
        turn=1,
        blocks=40,
        rounds=24,
    ),
    Workload(
        name="6 layers, width 384; 4 micro-batches of 2 x 128 tokens",
        overrides=(
            "seq_len=128",
            "model.layers=6",
            "model.heads=6",
            "model.width=384",
            "model.vocab=4096",
            "model.init_std=0.02",
        ),
        check=4,
        turn=1,
        blocks=16,
        rounds=12,
    ),
)


def conditions(*, blocks: int, taken: int, rounds: int, threads: int, quiet: float | None) -> str:
    """The machine and the method, in words."""
    names = ("torch", "transformers", "lightning", "mlflow")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    gate = "" if quiet is None else f", kept when other processes used at most {quiet:g} cores"
    return (
        f"{cpu_name()}, {os.cpu_count()} cores; FP32, {threads} thread{'s' * (threads > 1)} per "
        f"contestant, all with a heap that keeps what is freed, in huge pages. {rounds} rounds of "
        f"fresh processes, {blocks} blocks in all of {taken} taken{gate}; in a block every "
        "contestant once, in random order. Over the bare loop: of each round the median of its "
        "blocks' ratios of median updates; of the rounds their median, with its 95 % interval, "
        "then the least and the largest. Processor time: all threads, total over total. "
        f"{versions}."
    )


def cpu_name() -> str:
    """The processor as Linux names it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"


def measure(workload: Workload, given: argparse.Namespace) -> str:
    """A workload's table and the conditions it was taken under."""
    one = Round(
        plan=workload.plan(),
        names=[BARE, *given.only],
        check=workload.check,
        turn=workload.turn,
        blocks=given.blocks or workload.blocks,
        threads=given.threads,
        quiet=given.quiet,
    )
    rounds, taken = [], 0
    for seed in range(given.rounds or workload.rounds):
        kept, tried = one.run(seed)
        rounds.append(kept)
        taken += tried
    words = conditions(
        blocks=sum(map(len, rounds)),
        taken=taken,
        rounds=len(rounds),
        threads=given.threads,
        quiet=given.quiet,
    )
    return f"{table(workload.name, rows_of(rounds))}\n\n{words}"


def options() -> argparse.ArgumentParser:
    """The command line."""
    others = list(LABELS)[1:]
    made = argparse.ArgumentParser(prog="python -m scripts.benchmark", description=__doc__)
    made.add_argument("--rounds", type=int, help="rounds of fresh processes")
    made.add_argument("--blocks", type=int, help="blocks of each round")
    made.add_argument("--threads", type=int, default=1, help="threads of each contestant")
    made.add_argument("--quiet", type=float, help="repeat blocks that others disturbed more, cores")
    made.add_argument("--only", nargs="+", choices=others, default=others, metavar="NAME")
    made.add_argument("--workload", nargs="+", type=int, default=range(len(WORKLOADS)))
    made.add_argument("--write", type=Path, metavar="FILE", help="put the table in this file")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run what the command line asks for."""
    given = options().parse_args(arguments)
    parts = []
    for number in given.workload:
        parts.append(measure(WORKLOADS[number], given))
        print(parts[-1], flush=True)
    if given.write:
        write_between(given.write, "\n\n".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
