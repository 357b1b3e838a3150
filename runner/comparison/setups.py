"""Runs grouped into setups and ordered; the choice of the baseline."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner import checks
from runner.comparison.runs import ComparedRun
from runner.contracts import Fault, UserError
from runner.forwarding.names import value_text


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """The runs of one setup, one for each seed.

    name: the shortest that tells the setups apart. runs: by seed, ascending.
    repeated: seeds that ran more than once, of which the last run stands in `runs`.
    tuned: the values that this setup chose for itself, by key, and `grid`, what it chose among.
    """

    name: str
    swept: Mapping[str, str]
    runs: Mapping[int, ComparedRun]
    repeated: Sequence[int] = ()
    tuned: Mapping[str, str] = field(default_factory=dict)
    grid: frozenset[tuple[str, ...]] = frozenset()

    @property
    def first(self) -> ComparedRun:
        """The run that stands for what all of them share: an `ok` one if there is one."""
        return next((run for run in self.runs.values() if run.record.status == "ok"), self.any)

    @property
    def any(self) -> ComparedRun:
        """The run of the lowest seed."""
        return next(iter(self.runs.values()))

    def with_status(self, *statuses: str) -> list[ComparedRun]:
        """The runs that ended so."""
        return [run for run in self.runs.values() if run.record.status in statuses]


def is_emulated(setup: Setup) -> bool:
    """Whether the setup's times describe an emulation: what ran, where the record tells it; a
    recipe that is native on its device ignores `emulate`."""
    record = setup.first.record
    ran = record.environment.get("emulated")
    return bool(record.config.get("emulate") if ran is None else ran)


NARROW = ("fp8", "fp4", "int8")
"""Declared compute formats whose rounding and scaling costs much unless it is compiled."""


def is_narrow_and_eager(setup: Setup) -> bool:
    """Whether a setup's products are FP8 or narrower, and its model is not compiled."""
    compute = (setup.first.evidence("formats") or {}).get("compute")
    return compute in NARROW and setup.first.record.config.get("compile", "off") == "off"


# --- grouping ---------------------------------------------------------------------------------


def setups_of(runs: Sequence[ComparedRun], axes: Mapping[str, Sequence[str]]) -> list[Setup]:
    """Runs grouped into setups, in the order of the axes' values, else of their first run.

    A setup is what shares workload and setup identity; keys that are part of neither (`warmup`,
    say) tell setups apart when they are swept. A run that ended before its workload was known
    joins the runs of the same configuration.
    """
    groups: dict[tuple[Any, ...], list[ComparedRun]] = {}
    for run in sorted(runs, key=lambda run: run.record.workload_id is None):
        key = _key(run)
        if run.record.workload_id is None:
            work = _work(run)
            same = (k for k, g in groups.items() if k[1:] == key[1:] and _work(g[0]) == work)
            key = next(same, (work, *key[1:]))
        groups.setdefault(key, []).append(run)
    order = {id(run): place for place, run in enumerate(runs)}
    found = [sorted(group, key=lambda run: order[id(run)]) for group in groups.values()]
    found.sort(key=lambda group: (_place(group[0], axes), order[id(group[0])]))
    names = _names([group[0] for group in found])
    return [_setup(group, name) for group, name in zip(found, names, strict=True)]


def _key(run: ComparedRun) -> tuple[Any, ...]:
    extra = tuple(sorted(item for item in varied(run).items() if _root(item[0]) in checks.NEITHER))
    return run.record.workload_id, run.record.setup_id, extra


def _work(run: ComparedRun) -> str | None:
    """Digest of the configured work alone, the corpus apart; None where it is not known."""
    try:
        return checks.workload_id(run.record.config, "") if run.record.config else None
    except UserError:  # a part of the configuration is not installed here
        return None


def _root(key: str) -> str:
    return key.replace("/", ".").split(".")[0]


def varied(run: ComparedRun) -> dict[str, str]:
    """The swept keys of a run but for `seed`."""
    return {key: value for key, value in run.swept.items() if key != "seed"}


def _place(run: ComparedRun, axes: Mapping[str, Sequence[str]]) -> tuple[int, ...]:
    """Where a run stands in the order of the axes; unknown values come last."""
    return tuple(
        list(values).index(run.swept[key]) if run.swept.get(key) in values else len(values)
        for key, values in axes.items()
        if key != "seed"
    )


def _setup(group: Sequence[ComparedRun], name: str) -> Setup:
    runs: dict[int, ComparedRun] = {}
    repeated = []
    for run in group:
        if run.seed in runs:
            repeated.append(run.seed)
        if run.seed not in runs or run.record.status != "killed":
            runs[run.seed] = run
    return Setup(
        name=name,
        swept=varied(group[0]),
        runs=dict(sorted(runs.items())),
        repeated=sorted(set(repeated)),
    )


def _names(firsts: Sequence[ComparedRun]) -> list[str]:
    """The shortest name of each setup: its swept keys, or the words that not all share."""
    words = [
        [f"{key}={value}" for key, value in varied(run).items()] or run.setup.split()
        for run in firsts
    ]
    shared = set.intersection(*map(set, words)) if len(words) > 1 else set()
    names = [
        " ".join(w for w in own if w not in shared) or run.setup
        for own, run in zip(words, firsts, strict=True)
    ]
    return [
        name if names.count(name) == 1 else f"{name} ({names[:place].count(name) + 1})"
        for place, name in enumerate(names)
    ]


def axes_of(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """The axes of all the runs' sweeps together, in the order first typed.

    Where a run does not know its sweep's axes, its own values join in the order of the runs: a
    sweep's jobs run in the order typed.
    """
    axes: dict[str, list[str]] = {}
    for run in runs:
        own = run.axes or {key: [value] for key, value in run.swept.items()}
        for key, values in own.items():
            known = axes.setdefault(key, [])
            known.extend(value for value in values if value not in known)
    return axes


# --- baseline ---------------------------------------------------------------------------------


def baseline_of(
    setups: Sequence[Setup], axes: Mapping[str, Sequence[str]], wanted: str | None
) -> Setup | None:
    """The setup that the others are held against.

    wanted: words `key=value` that it must carry; by default the first value of every swept key
    as typed, or the first setup where no axes are known. None when the default has no run.
    Raises UserError when no setup carries the wanted words.
    """
    if wanted is not None:
        words = shlex.split(wanted)
        found = [setup for setup in setups if all(carries(setup, word) for word in words)]
        if not words or not found:
            raise UserError(_baseline_fault(setups, wanted))
        return found[0]
    firsts = {key: values[0] for key, values in axes.items() if key != "seed" and values}
    for setup in setups:
        if all(setup.swept.get(key) == value for key, value in firsts.items()):
            return setup
    return None


def carries(setup: Setup, word: str) -> bool:
    """Whether a setup has `key=value`: swept, typed, or in its resolved configuration."""
    key, _, value = word.partition("=")
    if setup.swept.get(key) == value or word in setup.any.setup.split():
        return True
    node: Any = setup.any.record.config
    for name in key.replace("/", ".").split("."):
        if not isinstance(node, Mapping) or name not in node:
            return False
        node = node[name]
    return not isinstance(node, Mapping) and value_text(node) == value


def _baseline_fault(setups: Iterable[Setup], wanted: str) -> Fault:
    names = [setup.name for setup in setups]
    return Fault(
        key="baseline",
        given=wanted,
        allowed="; ".join(names),
        next_step=f"baseline={shlex.quote(names[0])}" if names else "name runs that exist",
    )


def neighbours(
    setups: Sequence[Setup], axes: Mapping[str, Sequence[str]], baseline: Setup | None
) -> list[tuple[Setup, Setup]]:
    """Pairs (reference, setup) that differ in one swept key only, whose reference has that key's
    first value and is not the baseline; none with fewer than two axes."""
    keys = [key for key in axes if key != "seed"]
    if len(keys) < 2:
        return []
    pairs = []
    for setup in setups:
        for key in keys:
            wanted = {**setup.swept, key: axes[key][0]}
            if wanted == dict(setup.swept):
                continue
            for other in setups:
                if other is not setup and other is not baseline and dict(other.swept) == wanted:
                    pairs.append((other, setup))
    return pairs
