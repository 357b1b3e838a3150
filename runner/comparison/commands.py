"""The command that adds seeds to a comparison."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import count

from runner.comparison.runs import ComparedRun
from runner.comparison.setups import Setup

HYDRA_FLAGS = ("-m", "--multirun")
LONG = 8
"""More seeds than this are written as a range."""


def new_seeds(base: Setup, setup: Setup, wanted: int) -> list[int]:
    """Seeds to run so that `wanted` seeds are paired: first those that one side lacks."""
    done = [
        {s for s, run in side.runs.items() if run.record.status == "ok"} for side in (base, setup)
    ]
    both, either = done[0] & done[1], done[0] | done[1]
    missing = sorted(either - both)
    fresh = (seed for seed in count(0) if seed not in either)
    need = max(0, wanted - len(both))
    return (missing + [next(fresh) for _ in range(need)])[:need]


def adding(base: Setup, setup: Setup, seeds: Sequence[int]) -> list[str]:
    """Commands that run these seeds of both setups: one sweep where they differ in one key.

    The run's own command is taken, with its swept keys cut down to the two setups.
    """
    if not seeds or not setup.first.record.command:
        return []
    keys = [key for key in setup.swept if base.swept.get(key) != setup.swept[key]]
    if len(keys) > 1 or set(base.swept) != set(setup.swept):
        return [
            _command(s.first, {k: [v] for k, v in s.swept.items()}, seeds) for s in (base, setup)
        ]
    values = {
        key: list(dict.fromkeys((base.swept[key], value))) for key, value in setup.swept.items()
    }
    return [_command(setup.first, values, seeds)]


def _command(run: ComparedRun, values: dict[str, list[str]], seeds: Sequence[int]) -> str:
    program, typed = _split(run.record.command)
    words = []
    for word in typed:
        key = word.partition("=")[0].lstrip("+")
        if key in values and "=" in word:
            words.append(f"{word.partition('=')[0]}={','.join(values[key])}")
        elif key != "seed" and word not in HYDRA_FLAGS and not _is_place(key):
            words.append(word)
    return shlex.join([*program, "-m", *words, f"seed={_values(seeds)}"])


def _split(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that start the program, and those that the user typed behind them."""
    words = list(command)
    end = words.index("runner") + 1 if "runner" in words else 1
    return words[:end], words[end:]


def _values(seeds: Sequence[int]) -> str:
    """Seeds as a sweep takes them; a long unbroken row of them as a range."""
    first, behind = seeds[0], seeds[-1] + 1
    if len(seeds) > LONG and list(seeds) == list(range(first, behind)):
        return f"range({first},{behind})"
    return ",".join(map(str, seeds))


def _is_place(key: str) -> bool:
    """Folders of the former run, which must not be used twice."""
    return key in ("hydra.sweep.dir", "hydra.run.dir", "hydra.sweep.subdir")
