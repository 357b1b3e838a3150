"""Figures in words: one way to write each of them, in the terminal, in files and on the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.comparison.results import Comparison, Contrast, Ratio, SetupRow, signed
from runner.terminal import human_bytes, human_seconds

NONE = "–"
OUTCOMES = {
    "win": "win",
    "better": "no win: quality not passed",
    "worse": "worse",
    "not distinguishable": "not distinguishable",
    "one seed": "one seed, no interval",
}


def seconds(value: float | None) -> str:
    """A time, or a dash."""
    return NONE if value is None else human_seconds(value)


def per_second(value: float | None) -> str:
    """A rate, or a dash."""
    return NONE if value is None else f"{value:,.0f}"


def size(value: float | None) -> str:
    """Bytes, or a dash."""
    return NONE if value is None else human_bytes(value)


def share(value: float | None) -> str:
    """A share in percent, or a dash."""
    return NONE if value is None else f"{value:.0%}"


def span(counts: tuple[int, int]) -> str:
    """The least and the most of a count, as one number where they are: `1,204`, or `3–5`."""
    least, most = counts
    return f"{most:,}" if least == most else f"{least:,}–{most:,}"


def ratio(found: Ratio | None) -> str:
    """`0.51× (0.48–0.54)` and its note, or a dash."""
    if found is None:
        return NONE
    return " ".join(filter(None, (_interval(found), found.note)))


def _interval(found: Ratio) -> str:
    if found.low is None or found.high is None:
        return f"{_times(found.value)}×"
    if found.low == found.high:
        return f"{_times(found.value)}× (no spread)"
    return f"{_times(found.value)}× ({_times(found.low)}–{_times(found.high)})"


def _times(value: float) -> str:
    """Three decimals, or three figures where that is more."""
    return f"{value:.3g}" if value >= 10 or value < 0.1 else f"{value:.3f}"


def difference(contrast: Contrast | None) -> str:
    """`+0.0020 (-0.0005 to +0.0045)` nats, or a dash."""
    found = contrast.difference if contrast else None
    if found is None:
        return NONE
    if found.low is None or found.high is None:
        return f"{signed(found.mean)}"
    return f"{signed(found.mean)} ({signed(found.low)} to {signed(found.high)})"


def reached(contrast: Contrast | None) -> str:
    """Seconds to the baseline's final loss beside the baseline's own, or a dash."""
    found = contrast.reach if contrast else None
    if found is None or found.baseline_seconds is None:
        return NONE
    if found.seconds is None:
        return f"not reached (baseline {seconds(found.baseline_seconds)})"
    seeds = "" if found.reached == found.seeds else f", {found.reached} of {found.seeds} seeds"
    return f"{seconds(found.seconds)} (baseline {seconds(found.baseline_seconds)}{seeds})"


def batch(row: SetupRow) -> str:
    """Global batch and its division: `32 = 4 × 8`."""
    whole, micro = row.conditions.get("global_batch"), row.conditions.get("micro_batch")
    if whole is None:
        return NONE
    return f"{whole} = {whole // micro} × {micro}" if micro else str(whole)


def conditions(row: SetupRow) -> str:
    """What every rate of a setup stands with, its quality apart."""
    words = [f"global batch {batch(row)}", f"length {row.conditions.get('seq_len', NONE)}"]
    if row.conditions.get("precision"):
        words.append(str(row.conditions["precision"]))
    return " · ".join(words)


def seeds(row: SetupRow) -> str:
    """Finished seeds of all: `3`, or `2 of 3`."""
    done = sum(run.status == "ok" for run in row.runs)
    return str(done) if done == len(row.runs) else f"{done} of {len(row.runs)}"


def contrast_of(comparison: Comparison, row: SetupRow) -> Contrast | None:
    """The contrast of a setup with the baseline; None for the baseline itself."""
    return next((c for c in comparison.contrasts if c.setup == row.name), None)


def head(comparison: Comparison) -> list[str]:
    """What is compared, on which work, where, and by which rule: a line each."""
    work = comparison.workload
    named: list[tuple[str, Any]] = [
        ("", work.get("model")),
        ("parameters", work.get("parameters")),
        ("data", work.get("data")),
        ("length", work.get("seq_len")),
        ("global batch", work.get("global_batch")),
        ("updates", work.get("updates")),
        ("epochs", work.get("epochs")),
        ("workload", work.get("workload_id")),
    ]
    texts = [
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}".strip()
        for name, value in named
        if value is not None
    ]
    return [" · ".join(texts), comparison.device, rule(comparison)]


def rule(comparison: Comparison) -> str:
    """The quality rule in a sentence."""
    wanted = comparison.quality
    return (
        f"passed: held-out loss at most {wanted.margin:g} nats above the baseline's, at "
        f"{wanted.confidence:.0%} confidence over seeds (one-sided; intervals two-sided); "
        f"a win: passed, interval clear of 1, and at least {wanted.min_effect:.0%}"
    )


def plain(words: Sequence[str]) -> str:
    """Words joined by commas with an `and`."""
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words)
