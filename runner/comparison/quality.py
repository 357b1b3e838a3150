"""The quality check of a setup: may it be called as good as the baseline?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runner.comparison import commands
from runner.comparison.comparability import confounding, declared, workload_faults
from runner.comparison.curves import SAME, largest_gap
from runner.comparison.results import Contrast, Quality, Verdict, signed
from runner.comparison.runs import ComparedRun
from runner.comparison.setups import Setup
from runner.comparison.statistics import MOST_SEEDS, Paired, paired, settling_seeds
from runner.records import finite

BROKEN = {"error": "error", "oom": "out of memory", "unsupported": "not supported here"}
ALWAYS_SAME = ("accum", "process", "optimizer.implementation")
"""Setup keys that change nothing but float rounding, by the design's words."""


def contrast(base: Setup, setup: Setup, quality: Quality) -> Contrast:
    """A setup judged against a baseline, without ratios."""
    unequal = inequality(base, setup)
    values = {} if unequal else differences(base, setup)
    found = paired(list(values.values()), quality.confidence) if values else None
    refused = failure(base, setup) or unequal
    return Contrast(
        baseline=base.name,
        setup=setup.name,
        verdict=refused or check(base, setup, values, found, quality),
        difference=found,
        values=values,
    )


def final_loss(run: ComparedRun) -> float | None:
    """The held-out loss of a run that ended ok, or None."""
    return run.record.summary.get("eval_loss") if run.record.status == "ok" else None


def differences(base: Setup, setup: Setup) -> dict[int, float]:
    """Held-out loss, setup minus baseline, for every seed that both finished."""
    found = {}
    for seed, run in setup.runs.items():
        own, other = final_loss(run), final_loss(base.runs[seed]) if seed in base.runs else None
        if own is not None and other is not None:
            found[seed] = own - other
    return found


# --- reasons not to judge ---------------------------------------------------------------------


def failure(base: Setup, setup: Setup) -> Verdict | None:
    """The verdict of a setup of which a run did not get to its end, or None."""
    broken = setup.with_status(*BROKEN)
    if broken:
        return Verdict(word="error", reason=_each(broken))
    diverged = [run for run in setup.runs.values() if has_diverged(run)]
    if diverged:
        return Verdict(word="diverged", reason=_diverged(base, diverged))
    return None


def inequality(base: Setup, setup: Setup) -> Verdict | None:
    """The verdict of a setup that did other work, or varied more than it declares, or None."""
    pairs = [(base.runs.get(seed, base.first), run) for seed, run in setup.runs.items()]
    finished = [p for p in pairs if {run.record.status for run in p} == {"ok"}]
    if base.grid != setup.grid:
        text = f"tuned over another grid than the baseline: {_grid(setup)} against {_grid(base)}"
        return Verdict(word="incomparable", reason=text)
    faults = [
        fault for other, run in finished for fault in workload_faults(other, run, setup.tuned)
    ]
    if faults:
        text = "other work than the baseline: " + "; ".join(dict.fromkeys(faults))
        return Verdict(word="incomparable", reason=text)
    found = confounding(base, setup)
    if found:
        text = "differs from the baseline in what it does not declare: " + "; ".join(found)
        return Verdict(word="confounded", reason=text)
    return None


def _grid(setup: Setup) -> str:
    return ", ".join(sorted("/".join(values) for values in setup.grid)) or "nothing"


def has_diverged(run: ComparedRun) -> bool:
    """Whether a run diverged, or ended with a held-out loss that is not a number."""
    lost = run.record.evaluation.get("last_nonfinite") is not None
    loss = run.record.summary.get("eval_loss")
    return run.record.status == "diverged" or lost or (loss is not None and finite(loss) is None)


def _each(runs: Sequence[ComparedRun]) -> str:
    """Every run's end, runs with equal ends together."""
    ends: dict[str, list[int]] = {}
    for run in runs:
        word = BROKEN[run.record.status]
        text = f"{word}: {run.record.message}" if run.record.message else word
        ends.setdefault(text, []).append(run.seed)
    return "; ".join(f"{text} ({_seeds(seeds)})" for text, seeds in ends.items())


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _diverged(base: Setup, runs: Sequence[ComparedRun]) -> str:
    also = [run.seed for run in runs if run.seed in base.runs and has_diverged(base.runs[run.seed])]
    first = runs[0].record.message or "the held-out loss is not finite"
    text = f"{_seeds([run.seed for run in runs])}: {first}"
    return text + (f"; the baseline diverged too with {_seeds(also)}" if also else "")


# --- the check --------------------------------------------------------------------------------


def check(
    base: Setup, setup: Setup, values: dict[int, float], found: Paired | None, quality: Quality
) -> Verdict:
    """The verdict from paired held-out losses, and for `same` numerics from the curves."""
    if found is None:
        return _nothing_paired(base, setup, quality)
    if declares_same(base, setup):
        return _same(base, setup, values)
    if _no_repeats(base, list(values)):
        text = f"{_seeds(list(values))} gave the same baseline loss to the last digit: no repeats"
        return Verdict(word="unknown", reason=text)
    return judge(base, setup, found, quality)


def judge(base: Setup, setup: Setup, found: Paired, quality: Quality) -> Verdict:
    """Non-inferiority by one-sided t bounds of the mean difference."""
    margin, percent = quality.margin, f"{quality.confidence:.0%}"
    seen = f"d = {signed(found.mean)} nats over {found.count} seed{'s' if found.count > 1 else ''}"
    if found.upper is not None and found.upper < margin:
        text = f"{seen}; at most {signed(found.upper)} at {percent}, margin {margin:g}"
        return Verdict(word="passed", reason=text)
    if found.lower is not None and found.lower > margin:
        text = f"{seen}; at least {signed(found.lower)} at {percent}, margin {margin:g}"
        return Verdict(word="failed", reason=text)
    seeds = settling_seeds(found, margin=margin, confidence=quality.confidence)
    if found.lower is None or found.upper is None:
        text = f"{seen}: one seed has no spread"
    else:
        text = (
            f"{seen}; the bounds {signed(found.lower)} and {signed(found.upper)} ({percent} each)"
        )
        text += f" enclose the margin {margin:g}"
    if seeds is None:
        text += f"; more than {MOST_SEEDS} seeds would be needed"
        return Verdict(word="unknown", reason=text)
    text += f"; {seeds} seeds should settle it"
    new = commands.new_seeds(base, setup, seeds)
    return Verdict(
        word="unknown", reason=text, seeds=seeds, commands=commands.adding(base, setup, new)
    )


def _nothing_paired(base: Setup, setup: Setup, quality: Quality) -> Verdict:
    """No seed has a held-out loss on both sides."""
    sides = [[run for run in s.runs.values() if final_loss(run) is not None] for s in (base, setup)]
    if not sides[0]:
        return Verdict(word="unchecked", reason="no run of the baseline has a held-out loss")
    if not sides[1]:
        ends = sorted({run.record.status for run in setup.runs.values()})
        text = f"no run of this setup has a held-out loss ({', '.join(ends)})"
        return Verdict(word="unchecked" if ends == ["ok"] else "unknown", reason=text)
    text = "no seed ran on both sides: baseline {}, this setup {}".format(
        *(_seeds([run.seed for run in side]) for side in sides)
    )
    new = commands.new_seeds(base, setup, 3)
    return Verdict(word="unknown", reason=text, seeds=3, commands=commands.adding(base, setup, new))


def _no_repeats(base: Setup, seeds: Sequence[int]) -> bool:
    losses = {final_loss(base.runs[seed]) for seed in seeds}
    return len(seeds) > 1 and len(losses) == 1


# --- numerics that are declared the same ------------------------------------------------------


def declares_same(base: Setup, setup: Setup) -> bool:
    """Whether every key that differs declares `same` numerics, in fp32 with dropout 0.

    Parts declare it in the record (evidence `numerics`: by group, levers by `memory.NAME`); what
    is not recorded is taken as `close`.
    """
    if base.tuned != setup.tuned:
        return False
    keys = declared(base, setup)
    runs = (base.first, setup.first)
    known = [run.evidence("numerics") or {} for run in runs]
    same = all(
        key in ALWAYS_SAME or all(noted.get(_part(key)) == "same" for noted in known)
        for key in keys
    )
    return bool(keys) and same and all(_exact(run) for run in runs)


def _part(key: str) -> str:
    words = key.split(".")
    return ".".join(words[:2]) if words[0] == "memory" else words[0]


def _exact(run: ComparedRun) -> bool:
    formats = run.evidence("formats") or {}
    dropout = run.record.config.get("model", {}).get("dropout", 0)
    return bool(formats) and set(formats.values()) == {"fp32"} and dropout == 0


def _same(base: Setup, setup: Setup, values: Mapping[int, float]) -> Verdict:
    """Every update's loss, and the held-out loss after the last one, within SAME."""
    gaps = [(*largest_gap(base.runs[seed], setup.runs[seed]), seed) for seed in values]
    gaps += [
        (abs(d), int(setup.runs[seed].record.summary["updates_applied"]), seed)
        for seed, d in values.items()
    ]
    gap, update, seed = max(gaps)
    text = f"declared to change nothing but rounding: losses differ by at most {gap:.2g}"
    text += f" (update {update}, seed {seed}); allowed {SAME:g}"
    return Verdict(word="passed" if gap <= SAME else "failed", reason=text)
