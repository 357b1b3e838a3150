"""The tables of a comparison, as text by rows."""

from __future__ import annotations

from collections.abc import Callable

from runner.comparison.results import METRICS, Comparison, Contrast, ExampleCounts, SetupRow, signed
from runner.reporting import wording

Table = tuple[list[str], list[list[str]]]


def quality_table(comparison: Comparison) -> Table:
    """Verdict and held-out loss of every setup."""
    header = ["setup", "quality", "seeds", "held-out", "difference (interval), nats", "skipped"]
    rows = []
    for row in comparison.setups:
        loss = row.figures.get("eval_loss")
        skipped = row.figures.get("updates_skipped")
        rows.append(
            [
                row.name,
                comparison.verdict_of(row.name).word,
                wording.seeds(row),
                wording.NONE if loss is None else f"{loss:.4f}",
                wording.difference(wording.contrast_of(comparison, row)),
                wording.NONE if skipped is None else f"{skipped:.0f}",
            ]
        )
    return header, rows


def speed_table(comparison: Comparison) -> Table:
    """Step time with its ratio; what rates stand with, where it is not the same for all."""
    varying = [name for name in CONDITIONS if len(_conditions(comparison, name)) > 1]
    header = ["setup", "quality", *varying, "step time", "ratio (interval)", ""]
    rows = []
    for row in comparison.setups:
        found = wording.contrast_of(comparison, row)
        step = wording.seconds(row.figures.get("step_s_median"))
        cells = _ratio_cells(found, "step_s_median", step)
        stands = [CONDITIONS[name](row) for name in varying]
        rows.append([row.name, comparison.verdict_of(row.name).word, *stands, *cells])
    return header, rows


def rate_table(comparison: Comparison) -> Table:
    """Tokens per second on three definitions, the useful one with its ratio."""
    header = ["setup", "quality", "useful/s", "ratio (interval)", "non-pad/s", "slots/s", "padding"]
    rows = []
    for row in comparison.setups:
        found = wording.contrast_of(comparison, row)
        useful, nonpad, slots = (
            wording.per_second(row.figures.get(f"{kind}_tokens_per_s"))
            for kind in ("useful", "nonpad", "slots")
        )
        cells = _ratio_cells(found, "useful_tokens_per_s", useful)[:2]
        word = comparison.verdict_of(row.name).word
        padding = wording.share(row.padding_share)
        rows.append([row.name, word, *cells, nonpad, slots, padding])
    return header, rows


CONDITIONS: dict[str, Callable[[SetupRow], str]] = {
    "global batch": wording.batch,
    "length": lambda row: str(row.conditions.get("seq_len", wording.NONE)),
    "recipe": lambda row: str(row.conditions.get("precision", wording.NONE)),
}
"""What every rate stands with, beside its quality."""


def _conditions(comparison: Comparison, name: str) -> set[str]:
    return {CONDITIONS[name](row) for row in comparison.setups}


def stands_with(comparison: Comparison) -> str:
    """The conditions that all rates share, in words."""
    shared = {name: _conditions(comparison, name) for name in CONDITIONS}
    words = [f"{name} {found.pop()}" for name, found in shared.items() if len(found) == 1]
    return "every rate: " + " · ".join(words) if words else ""


def data_table(comparison: Comparison) -> Table:
    """Examples that were cut or left out; one row where they are the same for all, and none where
    there are none."""
    header = ["setup", "examples", "cut to seq_len", "left out"]
    known = {row.name: row.examples for row in comparison.setups if row.examples}
    if all(found.whole for found in known.values()):
        return header, []
    rows = [[name, *_example_cells(found)] for name, found in known.items()]
    if len(rows) > 1 and all(row[1:] == rows[0][1:] for row in rows):
        rows = [[f"all {len(rows)}", *rows[0][1:]]]
    return header, rows


def _example_cells(found: ExampleCounts) -> list[str]:
    train = "a stream" if found.train is None else f"{found.train:,}"
    held_out = "" if found.held_out is None else f" · {found.held_out:,} held out"
    reasons = [f"{reason} {wording.span(counts)}" for reason, counts in found.dropped.items()]
    return [train + held_out, wording.span(found.truncated), ", ".join(reasons) or "0"]


def memory_table(comparison: Comparison) -> Table:
    """Peak memory with its ratio."""
    header = ["setup", "quality", "peak", "ratio (interval)", ""]
    rows = []
    for row in comparison.setups:
        found = wording.contrast_of(comparison, row)
        peak = wording.size(row.figures.get("peak_allocated_bytes"))
        cells = _ratio_cells(found, "peak_allocated_bytes", peak)
        rows.append([row.name, comparison.verdict_of(row.name).word, *cells])
    return header, rows


def largest_table(comparison: Comparison) -> Table:
    """The largest live object of every setup; one row where it is the same for all."""
    known = {row.name: row.largest for row in comparison.setups if row.largest}
    if len(set(known.values())) == 1 and len(known) > 1:
        known = {f"all {len(known)}": next(iter(known.values()))}
    return ["setup", "largest live object"], [[name, text] for name, text in known.items()]


def reach_table(comparison: Comparison) -> Table:
    """Seconds to a loss as good as the baseline's final one."""
    kinds = {c.reach.quantity for c in comparison.contrasts if c.reach}
    within = f"within {comparison.quality.margin:g} nats of the baseline's final"
    header = ["setup", "quality", f"seconds to {within} {' or '.join(sorted(kinds))}"]
    rows = [[c.setup, c.verdict.word, wording.reached(c)] for c in comparison.contrasts if c.reach]
    return header, rows


def probe_table(comparison: Comparison) -> Table:
    """What each recipe does to output and gradients, against FP32 on the same weights."""
    header = ["setup", "gradient error", "cosine", "norm ratio", "worst group", "output error"]
    rows = []
    for row in comparison.setups:
        if row.probe:
            whole, worst = row.probe["gradient"], row.probe["groups"][row.probe["worst"]]
            cells = [
                _digits(whole["relative_error"], "{:.2%}"),
                wording.NONE if whole["norm_ratio"] == 0 else _digits(whole["cosine"], "{:.5f}"),
                _digits(whole["norm_ratio"], "{:.4f}"),
                f"{row.probe['worst']} {_digits(worst['relative_error'], '{:.2%}')}",
                _digits(row.probe["output"]["relative_error"], "{:.2%}"),
            ]
            rows.append([row.name, *cells])
    return header, rows


def _digits(value: float | None, form: str) -> str:
    return "not finite" if value is None else form.format(value)


def pair_table(comparison: Comparison) -> Table:
    """Further pairs that differ in one key; no word at a ratio: not distinguishable from 1."""
    header = ["one key changed", "quality", "difference, nats", "step time", "useful", "peak"]
    rows = []
    for pair in comparison.pairs:
        cells = [_pair_cell(pair, metric) for metric in METRICS]
        mean = signed(pair.difference.mean) if pair.difference else wording.NONE
        rows.append([_change(pair), pair.verdict.word, mean, *cells])
    return header, rows


def _change(pair: Contrast) -> str:
    """`precision=fp32 → bf16 at accum=4` for two names that differ in one word."""
    own, other = pair.setup.split(), pair.baseline.split()
    new = " ".join(word.partition("=")[2] for word in own if word not in other)
    old = " ".join(word for word in other if word not in own)
    shared = " ".join(word for word in own if word in other)
    return f"{old} → {new} at {shared}"


def _pair_cell(pair: Contrast, metric: str) -> str:
    found = pair.ratios.get(metric)
    if found is None:
        return wording.NONE
    word = "" if found.outcome == "not distinguishable" else f" {found.outcome}"
    note = f" {found.note}" if found.note else ""
    return f"{found.value:.3f}×{word}{note}"


def _ratio_cells(found: Contrast | None, metric: str, figure: str) -> list[str]:
    """The figure, its ratio with interval, and what may be said of it in a word."""
    result = found.ratios.get(metric) if found else None
    return [figure, wording.ratio(result), result.outcome if result else ""]


TABLES: dict[str, Callable[[Comparison], Table]] = {
    "Quality": quality_table,
    "Speed": speed_table,
    "Tokens per second": rate_table,
    "Data": data_table,
    "Memory": memory_table,
    "Largest live object": largest_table,
    "Time to a loss": reach_table,
    "Pairs that differ in one key": pair_table,
}
