"""Small pieces of HTML that the page is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from runner.reporting import canvas


def variable(colour: str) -> str:
    """The CSS variable that a plot's colour stands for."""
    name = next(name for name, value in canvas.COLOURS.items() if value == colour)
    return f"var(--{name})"


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def chips(colours: Mapping[str, str]) -> str:
    """A legend: a square of its colour before each name."""
    squares = "".join(
        f'<span><i style="background:{variable(colour)}"></i>{escape(name)}</span>'
        for name, colour in colours.items()
    )
    return f'<div class="chips">{squares}</div>'
