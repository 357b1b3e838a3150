"""How setups look in every plot: one colour each, the same short name, the quality beside it."""

from __future__ import annotations

from dataclasses import dataclass

from runner.comparison.results import Comparison, SetupRow
from runner.reporting.canvas import SETUPS, SOFT

MOST = 16
"""Setups in a plot; the table has all of them."""
LONGEST = 34
"""Characters of a name in a plot; the table has all of it."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A setup as plots draw it. coloured: whether its colour is its own (only seven have one)."""

    row: SetupRow
    name: str
    colour: str
    quality: str
    coloured: bool

    @property
    def label(self) -> str:
        """Name and quality: `precision=bf16 · passed`."""
        return f"{self.name} · {self.quality}"


def marks(comparison: Comparison) -> list[Mark]:
    """The marks of the setups that plots show, in their order; the baseline is grey.

    Of more than MOST setups, plots show the baseline and the first others.
    """
    every = all_marks(comparison)
    first = [mark for mark in every if mark.row.name != comparison.baseline]
    shown = {mark.row.name for mark in first[: MOST - 1]} | {comparison.baseline}
    return [mark for mark in every if mark.row.name in shown]


def all_marks(comparison: Comparison) -> list[Mark]:
    """Every setup's mark, in the order of the comparison."""
    others = [row.name for row in comparison.setups if row.name != comparison.baseline]
    found = []
    for row in comparison.setups:
        place = 0 if row.name == comparison.baseline else others.index(row.name) + 1
        coloured = place < len(SETUPS)
        found.append(
            Mark(
                row=row,
                name=shortened(row.name),
                colour=SETUPS[place] if coloured else SOFT,
                quality=comparison.verdict_of(row.name).word,
                coloured=coloured,
            )
        )
    return found


def shortened(name: str) -> str:
    """A name within LONGEST characters; its end tells setups apart, so its middle goes."""
    if len(name) <= LONGEST:
        return name
    head = LONGEST // 3
    return f"{name[:head]}…{name[head + 1 - LONGEST :]}"
