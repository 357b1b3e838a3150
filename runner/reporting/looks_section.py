"""The page's section on the looks at the numerics: its tables and the plots below them."""

from __future__ import annotations

from html import escape

from runner.comparison.results import Comparison
from runner.reporting import looks_plots
from runner.reporting.looks_tables import TABLES, TITLE, Rows, looked, note
from runner.reporting.looks_words import Cell
from runner.reporting.plots import Plot, figure

PLOTS = (
    Plot(
        title="Gradient error while training",
        caption="How far the recipe's gradient is from FP32's, on the same weights and "
        "micro-batch. A cross at the top: not a finite number.",
        draw=looks_plots.gradient_error,
    ),
    Plot(
        title="Updates rounded away",
        caption="Weights that an update was to change and left exactly as they were.",
        draw=looks_plots.lost_share,
    ),
    Plot(
        title="Gradient underflow",
        caption="Elements of the FP32 gradient that the 16-bit format would flush to zero at the "
        "loss scale of the moment.",
        draw=looks_plots.underflow_share,
    ),
)


def looks_section(comparison: Comparison) -> str:
    """The section; empty where no run was looked at."""
    if not looked(comparison):
        return ""
    tables = [(table.note, table.drawn(comparison)) for table in TABLES]
    inner = "".join(
        f'<p class="quiet above">{escape(words)}</p>{_table(header, rows)}'
        for words, (header, rows) in tables
        if rows
    )
    drawn = [found for plot in PLOTS if (found := figure(comparison, plot))]
    columns = "".join(f'<div class="column">{"".join(drawn[side::2])}</div>' for side in (0, 1))
    return (
        f'<section class="card scroll"><h2>{TITLE}</h2>'
        f'<p class="quiet">{escape(note(comparison))}</p>{inner}</section>'
        f'<div class="grid">{columns}</div>'
    )


def _table(header: list[str], rows: Rows) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        f'<tr><td><span class="name">{escape(name)}</span></td>{"".join(map(_cell, cells))}</tr>'
        for name, cells in rows
    )
    return f'<table class="looks"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(cell: Cell) -> str:
    lines = "".join(f'<span class="under">{escape(words)}</span>' for words in cell.under)
    return f'<td><span class="keep">{escape(cell.text)}</span>{lines}</td>'
