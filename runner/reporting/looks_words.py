"""A figure of the looks at the numerics in words: first → last, the worst, what was not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from runner.comparison.results import LookFigure, LooksRow
from runner.numerics import Extremes, not_finite
from runner.reporting.wording import NONE

Form = Callable[[float], str]
"""How a number is written."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A figure, and what stands below it in small print, line by line."""

    text: str = NONE
    under: Sequence[str] = ()

    def plain(self) -> str:
        """In one line."""
        return f"{self.text} ({'; '.join(self.under)})" if self.under else self.text


def percent(value: float) -> str:
    """Three figures: `0.0312%`, `12.3%`, `1,230%`."""
    size = 100 * value
    return f"{size:,.0f}%" if abs(size) >= 100 else f"{size:.3g}%"


def signed(value: float) -> str:
    """A difference in percent, with its sign."""
    return f"{100 * value:+,.0f}%" if abs(value) >= 1 else f"{100 * value:+.3g}%"


def most(looks: LooksRow, name: str, word: str) -> Cell:
    """First and last, and the largest of any look."""
    figure = looks.figures.get(name)
    if figure is None:
        return Cell()
    found = figure.extremes
    return cell_of(figure, percent, at(word, found.most, found.most_update, percent))


def largest(looks: LooksRow, name: str) -> Cell:
    """The largest of any look alone."""
    figure = looks.figures.get(name)
    if figure is None:
        return Cell()
    found = figure.extremes
    text = NONE if found.most is None else percent(found.most)
    where = f"at update {found.most_update}" if found.most else ""
    return Cell(text=text, under=lines(where, not_finite(asdict(found))))


def cell_of(figure: LookFigure, form: Form, *small: str) -> Cell:
    """First → last, with the small print and what was not finite."""
    if figure.curve is None:
        text = NONE
    else:
        text = " → ".join(
            "not finite" if value is None else form(value) for value in (figure.first, figure.last)
        )
    return Cell(text=text, under=lines(*small, not_finite(asdict(figure.extremes))))


def lines(*words: str) -> tuple[str, ...]:
    """Those that are not empty."""
    return tuple(filter(None, words))


def at(word: str, value: float | None, update: int | None, form: Form) -> str:
    """`worst 4% at update 10`; empty where there is no value, or nothing at all."""
    return "" if not value else f"{word} {form(value)} at update {update}"


def named(word: str, found: Extremes, form: Form) -> str:
    """The largest value after a word, or what was not finite."""
    words = [] if found.most is None else [f"{word} {form(found.most)}"]
    if found.nonfinite:
        words.append(f"{word.split()[0]} {not_finite(asdict(found))}")
    return "; ".join(words)


def span(found: Extremes, form: Form) -> str:
    """From the smallest to the largest."""
    if found.least is None or found.most is None:
        return ""
    return f"{form(found.least)} to {form(found.most)}"
