"""Tables of the looks at the numerics: a cell is a figure and its small print."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

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
KINDS = ("inputs", "weights", "gradients")
"""Operands of the converted layers' products; `gradients` are those of the layers' outputs."""
Rows = list[tuple[str, list[Cell]]]
"""A name and the cells beside it."""


def looked(comparison: Comparison) -> list[tuple[SetupRow, LooksRow]]:
    """The setups that were looked at."""
    return [(row, row.looks) for row in comparison.setups if row.looks is not None]


def notes(comparison: Comparison) -> list[str]:
    """How the figures came about, and what each column is, in words."""
    seeds = sorted({seed for _, looks in looked(comparison) for seed in looks.seeds})
    which = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    shown = whole_table(comparison)[0]
    return [
        "What rounding does, looked at every so many updates (numerics.every): between two "
        f"updates, untimed, on one micro-batch, always the same of a run; {which}. first → last: "
        "means over seeds; the worst: over every look of every seed. A dash: the recipe has no "
        "such figure.",
        "; ".join(f"{name}: {text}" for name, text in MEANINGS.items() if name in shown) + ".",
    ]


MEANINGS = {
    "gradient error": "norm of the difference from FP32's gradient, on the same weights, over "
    "FP32's norm",
    "cosine": "of the angle between the two",
    "norm ratio": "the recipe's norm over FP32's",
    "output error": "the same as gradient error, of the final hidden states",
    "updates lost": "weights that an update was to change and left exactly as they were",
    "loss scale": "over all attempts, of the seed in which it fell lowest",
    "underflow": "gradient that the 16-bit format flushes to zero at the loss scale, the largest "
    "share of any look",
    "overflow": "gradient beyond that format's largest number",
    "predicted amax": "largest magnitude that delayed scaling prepared for against the one that "
    "came; below zero, values were clamped",
}
"""What the columns are."""


# --- gradients and updates --------------------------------------------------------------------


def whole_table(comparison: Comparison) -> tuple[list[str], Rows]:
    """What becomes of gradients and updates, a row a setup; without columns that no setup has."""
    every = {
        name: [make(looks) for _, looks in looked(comparison)] for name, make in COLUMNS.items()
    }
    columns = {name: cells for name, cells in every.items() if any(c != Cell() for c in cells)}
    rows = [
        (row.name, [cells[place] for cells in columns.values()])
        for place, (row, _) in enumerate(looked(comparison))
    ]
    return ["setup", *columns], rows


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


COLUMNS: dict[str, Callable[[LooksRow], Cell]] = {
    "looks": _looks,
    "gradient error": _gradient_error,
    "cosine": _cosine,
    "norm ratio": _norm_ratio,
    "output error": _output_error,
    "updates lost": _lost,
    "loss scale": _scale,
    "underflow": _under,
    "overflow": _over,
    "predicted amax": _predicted,
}


# --- operands ---------------------------------------------------------------------------------


def operands_table(comparison: Comparison) -> tuple[list[str], Rows]:
    """What rounding makes of the converted layers' operands; only setups that have such layers."""
    rows = [
        (row.name, [_operand(looks, kind) for kind in KINDS])
        for row, looks in looked(comparison)
        if any(f"{kind}_error" in looks.figures for kind in KINDS)
    ]
    return ["setup", *KINDS], rows


def operands_note() -> str:
    """What the operands' figures are, in words."""
    return (
        "What rounding changes in the operands of the converted layers, norm of the change over "
        "norm of the operands, and where it is largest; saturated: elements that were clamped; "
        "amax: the largest magnitude. gradients: of the layers' outputs."
    )


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
