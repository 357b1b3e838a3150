"""Tables of the looks at the numerics: a cell is a figure and its small print."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial

from runner.comparison.results import Comparison, LooksRow, SetupRow
from runner.numerics import not_finite
from runner.reporting.looks_words import (
    Cell,
    at,
    cell_of,
    largest,
    lines,
    most,
    named,
    percent,
    signed,
    span,
)
from runner.reporting.wording import NONE

TITLE = "Numerics while training"
Rows = list[tuple[str, list[Cell]]]
"""A name and the cells beside it."""


def looked(comparison: Comparison) -> list[tuple[SetupRow, LooksRow]]:
    """The setups that were looked at."""
    return [(row, row.looks) for row in comparison.setups if row.looks is not None]


def note(comparison: Comparison) -> str:
    """How the figures came about, in words."""
    seeds = sorted({seed for _, looks in looked(comparison) for seed in looks.seeds})
    which = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    return (
        "What rounding does, looked at every so many updates (numerics.every): between two "
        f"updates, untimed, on one micro-batch, always the same of a run; {which}. first → last: "
        "means over seeds; the worst: over every look of every seed. A dash: the recipe has no "
        "such figure."
    )


# --- cells ------------------------------------------------------------------------------------


def _looks(looks: LooksRow) -> Cell:
    return Cell(
        text=f"{looks.count}",
        under=(
            f"updates {looks.first_update} to {looks.last_update}",
            f"seed {', '.join(map(str, looks.seeds))}",
        ),
    )


def _gradient_error(looks: LooksRow) -> Cell:
    return most(looks, "gradient_error", "worst")


def _cosine(looks: LooksRow) -> Cell:
    figure = looks.figures.get("gradient_cosine")
    if figure is None:
        return Cell()
    found = figure.extremes
    worst = at("worst", found.least, found.least_update, "{:.5f}".format)
    return cell_of(figure, "{:.5f}".format, worst)


def _norm_ratio(looks: LooksRow) -> Cell:
    """The ratio; its range, whose farther end from 1 is the worst."""
    figure = looks.figures.get("gradient_norm_ratio")
    if figure is None:
        return Cell()
    return cell_of(figure, "{:.4f}".format, span(figure.extremes, "{:.4f}".format))


def _output_error(looks: LooksRow) -> Cell:
    return most(looks, "output_error", "worst")


def _lost(looks: LooksRow) -> Cell:
    return most(looks, "lost_share", "largest")


def _under(looks: LooksRow) -> Cell:
    return largest(looks, "underflow_share")


def _over(looks: LooksRow) -> Cell:
    return largest(looks, "overflow_share")


def _scale(looks: LooksRow) -> Cell:
    """From every attempt."""
    found = looks.loss_scale
    if found is None:
        return Cell()
    return Cell(
        text=f"{found.first:,.6g} → {found.last:,.6g}",
        under=(f"lowest {found.lowest:,.6g}", f"{found.skipped} skipped"),
    )


def _predicted(looks: LooksRow) -> Cell:
    """How far delayed scaling's predicted amax was off, over all tensors of all looks."""
    lower, upper = (looks.figures.get(f"amax_error_{end}") for end in ("least", "most"))
    if lower is None or upper is None:
        return Cell()
    low, high = lower.extremes.least, upper.extremes.most
    text = NONE if low is None or high is None else f"{signed(low)} to {signed(high)}"
    return Cell(text=text, under=lines(not_finite(asdict(upper.extremes))))


def _operand(looks: LooksRow, kind: str) -> Cell:
    figure = looks.figures.get(f"{kind}_error")
    if figure is None:
        return Cell()
    words = [at("worst", figure.extremes.most, figure.extremes.most_update, percent)]
    worst = looks.worst.get(f"{kind}_error")
    if worst is not None:
        size = "not finite" if worst.error is None else percent(worst.error)
        words.append(f"most in {worst.group}: {size}")
    saturated = looks.figures.get(f"{kind}_saturated_share")
    if saturated is not None:
        words.append(named("saturated up to", saturated.extremes, percent))
    amax = looks.figures.get(f"{kind}_amax")
    if amax is not None:
        words.append(named("amax up to", amax.extremes, "{:.3g}".format))
    return cell_of(figure, percent, *words)


# --- tables -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LookTable:
    """A table with a row for each setup. note: what its columns are, in words."""

    note: str
    columns: Mapping[str, Callable[[LooksRow], Cell]]

    def drawn(self, comparison: Comparison) -> tuple[list[str], Rows]:
        """Header and rows, without columns and rows that have dashes only."""
        made = [
            (row.name, [make(looks) for make in self.columns.values()])
            for row, looks in looked(comparison)
        ]
        rows = [(name, cells) for name, cells in made if any(c != Cell() for c in cells)]
        shown = [p for p in range(len(self.columns)) if any(c[p] != Cell() for _, c in rows)]
        names = list(self.columns)
        header = ["setup", *(names[place] for place in shown)]
        return header, [(name, [cells[place] for place in shown]) for name, cells in rows]


TABLES = (
    LookTable(
        note="Gradients and final hidden states against FP32's, on the same weights: error is the "
        "norm of the difference over FP32's norm, the norm ratio has its range below.",
        columns={
            "looks": _looks,
            "gradient error": _gradient_error,
            "cosine": _cosine,
            "norm ratio": _norm_ratio,
            "output error": _output_error,
        },
    ),
    LookTable(
        note="Updates lost: weights that an update was to change and left exactly as they were. "
        "Loss scale: over all attempts, of the seed in which it fell lowest. Underflow and "
        "overflow: gradient that the 16-bit format would flush to zero at the loss scale, or not "
        "hold; the largest share of any look.",
        columns={
            "updates lost": _lost,
            "loss scale": _scale,
            "underflow": _under,
            "overflow": _over,
        },
    ),
    LookTable(
        note="What rounding changes in the operands of the converted layers, norm of the change "
        "over norm of the operands, and where most; gradients are those of the layers' outputs. "
        "Saturated: elements that were clamped. Amax: the largest magnitude; predicted amax: what "
        "delayed scaling prepared for against what came, below zero where it clamped.",
        columns={
            **{kind: partial(_operand, kind=kind) for kind in ("inputs", "weights", "gradients")},
            "predicted amax": _predicted,
        },
    ),
)
