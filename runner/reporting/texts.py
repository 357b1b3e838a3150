"""A comparison as text: lines for a terminal or a log, Markdown, CSV."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Sequence

from runner.comparison.results import METRICS, Comparison, SetupRow
from runner.reporting import looks_tables, wording
from runner.reporting.tables import TABLES, stands_with

WIDTH = 120


def lines(comparison: Comparison, width: int = WIDTH) -> list[str]:
    """The comparison for a terminal or a log, at most `width` columns wide.

    Commands are never broken, so that they can be copied.
    """
    against = comparison.baseline or "nothing: the baseline has no run"
    found = [f"comparison against {against}"]
    for line in (*wording.head(comparison), stands_with(comparison)):
        found += _wrapped(line, width, "  ")
    for make in TABLES.values():
        header, rows = make(comparison)
        if rows:
            found += ["", *_drawn(header, rows, width)]
    found.append("")
    for line in reasons_of(comparison):
        found += [line] if line.startswith("  ") else _wrapped(line, width, "")
    return found


def _wrapped(line: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        line, width, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )


def _drawn(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, name in enumerate(header):
        table.add_column(name, overflow="fold", no_wrap=place > 0 and name != header[-1])
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, markup=False, highlight=False).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def reasons_of(comparison: Comparison) -> list[str]:
    """Every verdict's reason, the commands that settle it, and the notes; a line each."""
    found = []
    for contrast in (*comparison.contrasts, *comparison.pairs):
        against = f" against {contrast.baseline}" if contrast in comparison.pairs else ""
        verdict = contrast.verdict
        found.append(f"{contrast.setup}{against}: {verdict.word} — {verdict.reason}")
        found += [f"  {command}" for command in verdict.commands]
    return found + [f"note: {note}" for note in comparison.notes]


# --- files ------------------------------------------------------------------------------------


def markdown(comparison: Comparison) -> str:
    """The comparison as a Markdown document."""
    found = [f"# Comparison against {comparison.baseline or 'a baseline that has no run'}", ""]
    found += [f"- {line}" for line in (*wording.head(comparison), stands_with(comparison)) if line]
    for title, make in TABLES.items():
        header, rows = make(comparison)
        if rows:
            found += ["", f"## {title}", "", *_markdown_table(header, rows)]
    found += _markdown_looks(comparison)
    found += ["", "## Reasons", "", *_markdown_reasons(comparison)]
    return "\n".join(found) + "\n"


def _markdown_looks(comparison: Comparison) -> list[str]:
    """The looks at the numerics; nothing where no run was looked at."""
    if not looks_tables.looked(comparison):
        return []
    found = ["", f"## {looks_tables.TITLE}", "", looks_tables.note(comparison)]
    for table in looks_tables.TABLES:
        header, rows = table.drawn(comparison)
        if rows:
            plain = [[name, *(cell.plain() for cell in cells)] for name, cells in rows]
            found += ["", table.note, "", *_markdown_table(header, plain)]
    return found


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(header), line(["---"] * len(header)), *(line(row) for row in rows)]


def _markdown_reasons(comparison: Comparison) -> list[str]:
    return [
        f"      {line.strip()}" if line.startswith("  ") else f"- {line}"
        for line in reasons_of(comparison)
    ]


def comma_separated(comparison: Comparison) -> str:
    """One row a setup, plain numbers with their units in the header; unknown is empty."""
    out = io.StringIO()
    records = [_record(comparison, row) for row in comparison.setups]
    writer = csv.DictWriter(out, fieldnames=list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


FIGURES = (
    "step_s_median",
    "step_s_p95",
    "useful_tokens_per_s",
    "nonpad_tokens_per_s",
    "slots_tokens_per_s",
    "mfu",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "eval_loss",
    "train_loss",
    "updates_applied",
    "updates_skipped",
)


def _record(comparison: Comparison, row: SetupRow) -> dict[str, object]:
    verdict = comparison.verdict_of(row.name)
    found = wording.contrast_of(comparison, row)
    paired = found.difference if found else None
    record: dict[str, object] = {
        "setup": row.name,
        "quality": verdict.word,
        "reason": verdict.reason,
        "seeds": " ".join(str(run.seed) for run in row.runs if run.status == "ok"),
        "device": comparison.device,
        **{key: row.conditions.get(key) for key in ("global_batch", "micro_batch", "seq_len")},
        "precision": row.conditions.get("precision"),
        **{name: row.figures.get(name) for name in FIGURES},
        "padding_share": row.padding_share,
        "largest_live_object": row.largest,
        "difference_nats": paired.mean if paired else None,
        "difference_low": paired.low if paired else None,
        "difference_high": paired.high if paired else None,
        "difference_upper_one_sided": paired.upper if paired else None,
    }
    for metric in METRICS:
        result = found.ratios.get(metric) if found else None
        for part in ("value", "low", "high", "outcome", "note"):
            record[f"{metric}_ratio_{part}"] = getattr(result, part) if result else None
    reach = found.reach if found else None
    record["seconds_to_baseline_loss"] = reach.seconds if reach else None
    return record | _look_figures(comparison, row)


def _look_figures(comparison: Comparison, row: SetupRow) -> dict[str, object]:
    """Figures of the looks at the numerics; no column where no run was looked at."""
    names = {n: None for _, looks in looks_tables.looked(comparison) for n in looks.figures}
    found: dict[str, object] = {}
    for name in names:
        own = row.looks.figures.get(name) if row.looks else None
        known = own.extremes if own else None
        found[f"numerics_{name}_first"] = own.first if own else None
        found[f"numerics_{name}_last"] = own.last if own else None
        found[f"numerics_{name}_least"] = known.least if known else None
        found[f"numerics_{name}_most"] = known.most if known else None
        found[f"numerics_{name}_nonfinite_looks"] = known.nonfinite if known else None
    return found
