"""Contestants in processes of their own, taking turns. No torch in this process."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from runner.compose import Plan
from scripts.overhead.figures import RUNNER, Block, Turn, difference
from scripts.overhead.launching import launched

POLL_S = 0.05
WAIT_S = 600.0
STEADY = {
    "GLIBC_TUNABLES": ":".join(
        (
            "glibc.malloc.hugetlb=1",
            "glibc.malloc.mmap_max=0",
            f"glibc.malloc.trim_threshold={1 << 36}",
            f"glibc.malloc.top_pad={1 << 28}",
        )
    )
}
"""Environment of every contestant: a heap that keeps what is freed and asks for huge pages.
Otherwise processes of the same contestant differ by up to 4 %, by the thousands of pages an
update that their heaps happen to give back and take again."""


def compete(
    name: str, config: Mapping[str, Any], folder: Path, pipe: Connection, threads: int
) -> None:
    """A contestant's process: what it prints goes to its folder."""
    log = os.open(folder / "output.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from scripts.overhead.contestants import compete as run

    run(name, config, folder, pipe, threads)


@contextmanager
def within(environment: Mapping[str, str]) -> Iterator[None]:
    """This process' environment with these variables, for a while."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Contestant:
    """A contestant's process, seen from here."""

    def __init__(self, name: str, plan: Plan, folder: Path, threads: int) -> None:
        self.name = name
        self._folder = folder
        folder.mkdir(parents=True)
        self._pipe, theirs = multiprocessing.Pipe()
        start = multiprocessing.get_context("spawn").Process
        arguments = (name, plan.config, folder, theirs, threads)
        self._process = start(target=compete, args=arguments, daemon=True)
        with within(STEADY):
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process number."""
        assert self._process.pid is not None
        return self._process.pid

    def turn(self, updates: int, meanwhile: Callable[[], None] = lambda: None) -> Turn:
        """Let it make so many updates and wait for them. Raises RuntimeError if it ended."""
        limit = time.monotonic() + WAIT_S
        try:
            self._pipe.send(updates)
            while not self._pipe.poll(POLL_S):
                meanwhile()
                if time.monotonic() > limit:
                    raise RuntimeError(f"{self.name} did not answer in {WAIT_S:.0f} s")
            found: Turn = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join(WAIT_S)
            raise RuntimeError(f"{self.name} ended early:\n{self._output()}") from None
        return found

    def end(self) -> None:
        """Tell it that there are no more turns. Raises RuntimeError unless it ends well."""
        self._pipe.send(0)
        self._process.join(WAIT_S)
        if self._process.exitcode != 0:
            raise RuntimeError(f"{self.name} ended badly:\n{self._output()}")

    def kill(self) -> None:
        """End it in any case."""
        self._process.kill()
        self._process.join()

    def _output(self) -> str:
        return (self._folder / "output.log").read_text(encoding="utf-8", errors="replace")


# --- other processes on the machine -----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Load:
    """Seconds: the clock; processor time of the whole machine; of the processes asked about."""

    at: float
    machine: float
    own: float

    @classmethod
    def now(cls, pids: Sequence[int]) -> Load:
        """From Linux's counters, since the machine's start."""
        tick = os.sysconf("SC_CLK_TCK")
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n")[0].split()[1:9]
        user, nice, system, _, _, irq, softirq, steal = map(int, fields)
        machine = user + nice + system + irq + softirq + steal
        return cls(at=time.monotonic(), machine=machine / tick, own=sum(map(ticks, pids)) / tick)

    def others_since(self, before: Load) -> float:
        """Processor time of all other processes per second, in cores."""
        passed = self.at - before.at
        return (self.machine - before.machine - (self.own - before.own)) / passed


def ticks(pid: int) -> int:
    """User and system time of a living process, all threads."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    fields = stat.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


# --- rounds -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Round:
    """How a round goes.

    check: updates before anything is timed, whose losses are compared. turn: updates of a turn.
    blocks: wanted. quiet: cores that other processes may use (None: any): a block in which they
    used more is taken again once they use no more. patience: seconds for all of it.
    """

    plan: Plan
    names: Sequence[str]
    check: int
    turn: int
    blocks: int
    threads: int = 1
    quiet: float | None = None
    patience: float = 7200.0

    def run(self, seed: int) -> tuple[list[Block], int]:
        """Fresh processes, equal losses, then the timed blocks and how many were taken.

        Raises ValueError for unequal losses, RuntimeError for a contestant that fails, for
        points that do not arrive in the store, or when the machine is never quiet.
        """
        folder = Path(tempfile.mkdtemp(prefix="benchmark-"))
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, folder)
            contestants = {}
            for name in self.names:
                one = Contestant(name, self.plan, folder / name, self.threads)
                stack.callback(one.kill)
                contestants[name] = one
            with self._launched(folder) as meanwhile:
                first = {name: one.turn(self.check) for name, one in contestants.items()}
                difference({name: turn.losses for name, turn in first.items()}, self.check)
                found = self._blocks(contestants, random.Random(seed), meanwhile)
                for one in contestants.values():
                    one.end()
        return found

    def _launched(self, folder: Path) -> AbstractContextManager[Callable[[], None]]:
        if RUNNER in self.names:
            return launched(self.plan, folder / RUNNER)
        return nullcontext(lambda: None)

    def _blocks(
        self,
        contestants: Mapping[str, Contestant],
        order: random.Random,
        meanwhile: Callable[[], None],
    ) -> tuple[list[Block], int]:
        pids = [os.getpid(), *(one.pid for one in contestants.values())]
        limit = time.monotonic() + self.patience
        kept: list[Block] = []
        taken = 0
        self._wait(pids, limit)
        while len(kept) < self.blocks:
            before = Load.now(pids)
            names = order.sample(list(contestants), len(contestants))
            turns = {name: self._turn(contestants[name], meanwhile) for name in names}
            taken += 1
            if self.quiet is None or Load.now(pids).others_since(before) <= self.quiet:
                kept.append({name: turns[name] for name in contestants})
            else:
                self._wait(pids, limit)
        return kept, taken

    def _wait(self, pids: Sequence[int], limit: float) -> None:
        """Until other processes use no more than `quiet` cores for a second."""
        while self.quiet is not None:
            before = Load.now(pids)
            time.sleep(1.0)
            if Load.now(pids).others_since(before) <= self.quiet:
                return
            if time.monotonic() > limit:
                raise RuntimeError(f"other processes kept using over {self.quiet:g} cores")

    def _turn(self, contestant: Contestant, meanwhile: Callable[[], None]) -> Turn:
        """One turn; what the launching process does falls into the runner's own."""
        if contestant.name == RUNNER:
            return contestant.turn(self.turn, meanwhile)
        return contestant.turn(self.turn)
