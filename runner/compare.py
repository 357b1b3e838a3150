"""`python -m runner.compare`: compares stored runs again, at any time, and writes the report.

Runs come from the tracking store (a sweep, runs by id, a whole experiment) or from run folders.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner.comparison import sources
from runner.comparison.judge import compare
from runner.comparison.results import Comparison
from runner.comparison.runs import ComparedRun
from runner.contracts import Fault, UserError
from runner.records import Unreadable
from runner.terminal import print_faults

USAGE = """python -m runner.compare [sweep=latest|ID] [runs=ID,ID] [experiment=NAME] [uri=URI]
                         [folder=RUNS_DIR] [baseline="KEY=VALUE ..."] [out=DIR]
                         [compare.tune=KEY,KEY]
                         [quality.margin=NATS] [quality.confidence=P] [quality.min_effect=SHARE]

  sweep       a sweep of the tracking store; `latest` (the default) is the newest
  runs        runs of the store by their ids, in this order
  experiment  the store's experiment, by default `runner`; alone, all of its runs are compared
  uri         the store, by default mlflow.db in this folder
  folder      run folders instead of a store: every run at or below it
  baseline    what the others are held against: baseline=precision=fp32
  compare.tune  swept keys of which each setup gets its best value: compare.tune=optimizer.lr
  out         where comparison.md, .csv, .json and report.html go, by default ./comparison"""
OPTIONS = ("sweep", "runs", "experiment", "uri", "folder", "baseline", "out", "compare.tune")
FAILED = {"diverged": "diverged", "killed": "unchecked"}
"""Quality of a run of the baseline that did not end ok; `error` for every other status."""
RULES = ("quality.margin", "quality.confidence", "quality.min_effect")


def compare_sweep(
    results: Sequence[sources.ResultLike], *, launch: Path, axes: Mapping[str, Sequence[str]]
) -> Comparison:
    """The comparison of a sweep that just ended.

    results: how every planned job ended, failed and unsupported ones too. launch: the folder that
    the plans' folders count from. axes: swept keys with their values as typed.
    """
    runs = [sources.of_result(result, launch=launch, axes=axes) for result in results]
    return compare(runs, axes=axes)


def qualities(comparison: Comparison) -> dict[str, str]:
    """The quality verdict of every run, by run id: what its tag `quality` is to say.

    It is its setup's, but for runs of the baseline that did not end ok: those say so. Runs of
    tuned values that were not chosen are not judged.
    """
    passed_over = {run_id: "unchecked" for row in comparison.tuning for run_id in row.passed_over}
    return passed_over | {
        run.run_id: FAILED.get(run.status, "error")
        if row.name == comparison.baseline and run.status != "ok"
        else comparison.verdict_of(row.name).word
        for row in comparison.setups
        for run in row.runs
    }


# --- the command ------------------------------------------------------------------------------


def parse(words: Sequence[str]) -> dict[str, str]:
    """Options as typed, each split on its first `=`. Raises UserError naming what is wrong."""
    options: dict[str, str] = {}
    faults = []
    for word in words:
        key, mark, value = word.partition("=")
        if not mark or not value or key not in (*OPTIONS, *RULES):
            faults.append(_fault(key, word, ", ".join(f"{k}=..." for k in (*OPTIONS, *RULES))))
        options[key] = value
    store = [key for key in ("sweep", "runs", "experiment", "uri") if key in options]
    if "folder" in options and store:
        allowed = "run folders, or a store with " + ", ".join(store)
        faults.append(_fault("folder", f"folder={options['folder']}", allowed))
    if "sweep" in options and "runs" in options:
        faults.append(_fault("runs", f"runs={options['runs']}", "one of sweep and runs"))
    if faults:
        raise UserError(*faults)
    return options


def _fault(key: str, given: str, allowed: str) -> Fault:
    return Fault(key=key, given=given, allowed=allowed, next_step="python -m runner.compare --help")


def rule_of(options: Mapping[str, str]) -> dict[str, float]:
    """The values of the rule that the options state."""
    ranges = {"margin": (0.0, float("inf")), "confidence": (0.5, 1.0), "min_effect": (0.0, 1.0)}
    values: dict[str, float] = {}
    for name, (low, high) in ranges.items():
        text = options.get(f"quality.{name}")
        if text is None:
            continue
        try:
            values[name] = float(text)
        except ValueError:
            values[name] = low
        if not low < values[name] < high:
            raise UserError(_fault(f"quality.{name}", text, f"above {low:g} and below {high:g}"))
    return values


def tune_of(options: Mapping[str, str]) -> list[str] | None:
    """The tuned keys that the options state, with or without brackets; None where they do not."""
    text = options.get("compare.tune")
    if text is None:
        return None
    return [key for word in text.strip("[]").split(",") if (key := word.strip())]


def runs_of(options: Mapping[str, str], launch: Path) -> list[ComparedRun]:
    """The runs that the options name. Raises UserError where there are none."""
    if "folder" not in options:
        from runner.comparison.stored import stored_runs

        return stored_runs(options, launch)
    root = Path(options["folder"])
    runs, faults = [], []
    for folder in sources.folders_under(root):
        try:
            runs.append(sources.of_folder(folder))
        except Unreadable as error:
            faults.append(damaged("folder", error))
    if faults:
        raise UserError(*faults)
    if not runs:
        fault = _fault("folder", str(root.absolute()), "a folder with run folders at or below it")
        raise UserError(fault)
    return runs


def damaged(key: str, error: Unreadable) -> Fault:
    """A run that is there and cannot be read: it is not left out in silence."""
    return Fault(
        key=key,
        given=str(error),
        allowed="runs whose files are as they were written",
        next_step="restore the file, or move its run folder away",
    )


def main(words: Sequence[str]) -> int:
    """Exit code: 0 compared, 2 the command is wrong."""
    if any(word in ("-h", "--help") for word in words):
        print(USAGE)
        return 0
    try:
        # A million live objects: collecting cycles among them costs a fifth of the time.
        gc.disable()
        options = parse(words)
        rule = rule_of(options)
        runs = runs_of(options, Path.cwd())
        found = compare(runs, baseline=options.get("baseline"), quality=rule, tune=tune_of(options))
    except UserError as error:
        print_faults(sys.stderr, error.faults, "nothing was compared or written")
        return 2
    from runner import report

    print("\n".join(report.lines(found)))
    out = Path(options.get("out", "comparison"))
    try:
        for path in report.write(found, out):
            print(f"wrote {path}")
    except OSError as error:
        fault = _fault("out", f"{out}: {error.strerror or error}", "a folder that can be written")
        print_faults(sys.stderr, [fault], "the comparison above was not written")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
