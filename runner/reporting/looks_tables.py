"""Tables of the looks at the numerics: a cell is a figure and its small print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from runner.comparison.results import Comparison, LookFigure, LooksRow, SetupRow
from runner.numerics import Extremes, not_finite
from runner.reporting.wording import NONE

TITLE = "Numerics while training"
KINDS = ("inputs", "weights", "gradients")
"""Operands of the converted layers' products; `gradients` are those of the layers' outputs."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A figure, and what stands below it in small print, line by line."""

    text: str = NONE
    under: Sequence[str] = ()

    def plain(self) -> str:
        """In one line."""
        return f"{self.text} ({'; '.join(self.under)})" if self.under else self.text


Rows = list[tuple[str, list[Cell]]]
"""A name and the cells beside it."""


def looked(comparison: Comparison) -> list[tuple[SetupRow, LooksRow]]:
    """The setups that were looked at."""
    return [(row, row.looks) for row in comparison.setups if row.looks is not None]


def note(comparison: Comparison) -> str:
    """What the figures are, in words."""
    seeds = sorted({seed for _, looks in looked(comparison) for seed in looks.seeds})
    which = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    return (
        f"Every so many updates (numerics.every) what rounding does is looked at, of {which}: "
        "between two updates, untimed, on one micro-batch, always the same of a run. first → last: "
        "means over seeds; the worst is over every look of every seed. A dash: the recipe has no "
        "such figure."
    )


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
    span = f"{looks.first_update} to {looks.last_update}"
    return Cell(
        text=f"{looks.count}",
        under=(f"updates {span}", f"seed {', '.join(map(str, looks.seeds))}"),
    )


def _gradient_error(looks: LooksRow) -> Cell:
    return _most(looks, "gradient_error", "worst")


def _cosine(looks: LooksRow) -> Cell:
    figure = looks.figures.get("gradient_cosine")
    if figure is None:
        return Cell()
    found = figure.extremes
    worst = _at("worst", found.least, found.least_update, "{:.5f}".format)
    return _cell(figure, "{:.5f}".format, worst)


def _norm_ratio(looks: LooksRow) -> Cell:
    """The ratio; its range, whose farther end from 1 is the worst."""
    figure = looks.figures.get("gradient_norm_ratio")
    if figure is None:
        return Cell()
    return _cell(figure, "{:.4f}".format, _range(figure.extremes, "{:.4f}".format))


def _output_error(looks: LooksRow) -> Cell:
    return _most(looks, "output_error", "worst")


def _lost(looks: LooksRow) -> Cell:
    return _most(looks, "lost_share", "largest")


def _under(looks: LooksRow) -> Cell:
    return _largest(looks, "underflow_share")


def _over(looks: LooksRow) -> Cell:
    return _largest(looks, "overflow_share")


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
    least, most = (looks.figures.get(f"amax_error_{end}") for end in ("least", "most"))
    if least is None or most is None:
        return Cell()
    low, high = least.extremes.least, most.extremes.most
    text = NONE if low is None or high is None else f"{_signed(low)} to {_signed(high)}"
    return Cell(text=text, under=_lines(not_finite(asdict(most.extremes))))


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
    words = [_at("worst", figure.extremes.most, figure.extremes.most_update, percent)]
    worst = looks.worst.get(f"{kind}_error")
    if worst is not None:
        size = "not finite" if worst.error is None else percent(worst.error)
        words.append(f"most in {worst.group}: {size}")
    saturated = looks.figures.get(f"{kind}_saturated_share")
    if saturated is not None:
        words.append(_named("saturated up to", saturated.extremes, percent))
    amax = looks.figures.get(f"{kind}_amax")
    if amax is not None:
        words.append(_named("amax up to", amax.extremes, "{:.3g}".format))
    return _cell(figure, percent, *words)


# --- words ------------------------------------------------------------------------------------


def percent(value: float) -> str:
    """Three figures: `0.0312%`, `12.3%`, `1,230%`."""
    size = 100 * value
    return f"{size:,.0f}%" if abs(size) >= 100 else f"{size:.3g}%"


def _signed(value: float) -> str:
    return f"{100 * value:+,.0f}%" if abs(value) >= 1 else f"{100 * value:+.3g}%"


def _most(looks: LooksRow, name: str, word: str) -> Cell:
    """First and last, and the largest of any look."""
    figure = looks.figures.get(name)
    if figure is None:
        return Cell()
    found = figure.extremes
    return _cell(figure, percent, _at(word, found.most, found.most_update, percent))


def _largest(looks: LooksRow, name: str) -> Cell:
    """The largest of any look alone."""
    figure = looks.figures.get(name)
    if figure is None:
        return Cell()
    found = figure.extremes
    text = NONE if found.most is None else percent(found.most)
    where = f"at update {found.most_update}" if found.most else ""
    return Cell(text=text, under=_lines(where, not_finite(asdict(found))))


def _cell(figure: LookFigure, form: Callable[[float], str], *small: str) -> Cell:
    """First → last, with the small print and what was not finite."""
    if figure.curve is None:
        text = NONE
    else:
        text = " → ".join(
            "not finite" if value is None else form(value) for value in (figure.first, figure.last)
        )
    return Cell(text=text, under=_lines(*small, not_finite(asdict(figure.extremes))))


def _lines(*words: str) -> tuple[str, ...]:
    return tuple(filter(None, words))


def _at(word: str, value: float | None, update: int | None, form: Callable[[float], str]) -> str:
    return "" if value is None else f"{word} {form(value)} at update {update}"


def _named(word: str, found: Extremes, form: Callable[[float], str]) -> str:
    """The largest value after a word, or what was not finite."""
    words = [] if found.most is None else [f"{word} {form(found.most)}"]
    if found.nonfinite:
        words.append(f"{word.split()[0]} {not_finite(asdict(found))}")
    return "; ".join(words)


def _range(found: Extremes, form: Callable[[float], str]) -> str:
    if found.least is None or found.most is None:
        return ""
    return f"{form(found.least)} to {form(found.most)}"
