"""Plots as inline SVG whose colours and fonts are the page's own, so that they follow its theme.

matplotlib lays out axes, ticks and text; every colour it is given is a marker that becomes a CSS
variable in the SVG. It is imported when a plot is made: the launching process must stay light.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = (
    *("ink", "soft", "line", "card", "bad"),
    *(f"s{place}" for place in range(8)),
    *(f"p{place}" for place in range(7)),
)
"""CSS variables: text, quiet text, rules, background, warning, setups (s0: baseline), parts."""
COLOURS = {name: f"#fe01{place:02x}" for place, name in enumerate(NAMES)}
INK, SOFT, LINE, CARD, BAD = (COLOURS[name] for name in NAMES[:5])
SETUPS = tuple(COLOURS[f"s{place}"] for place in range(8))
PARTS = tuple(COLOURS[f"p{place}"] for place in range(7))
ON_PARTS = ("#1d2127", "#1d2127", "#ffffff", "#ffffff", "#ffffff", "#1d2127", "#1d2127")
"""Text on the parts, whose colours are the same on light and dark."""
WIDTH = 5.4
"""Inches of a plot; it is scaled to its column, where 1 inch is about 95 CSS pixels."""


@contextmanager
def settings(plot: str) -> Iterator[None]:
    """matplotlib's settings while a plot is drawn; `plot` keeps ids apart on one page."""
    import matplotlib

    with matplotlib.rc_context({**style(), "svg.hashsalt": plot}):
        yield


def style() -> dict[Any, Any]:
    """matplotlib settings of every plot."""
    return {
        "svg.fonttype": "none",
        "text.parse_math": False,
        "font.size": 8.5,
        "text.color": INK,
        "axes.edgecolor": LINE,
        "axes.labelcolor": SOFT,
        "axes.labelsize": 8.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.unicode_minus": False,
        "grid.color": LINE,
        "grid.linewidth": 0.6,
        "xtick.color": LINE,
        "ytick.color": LINE,
        "xtick.labelcolor": SOFT,
        "ytick.labelcolor": SOFT,
        "ytick.major.size": 0,
        "lines.linewidth": 1.6,
        "lines.solid_capstyle": "round",
    }


def blank(height: float, width: float = WIDTH) -> tuple[Figure, Axes]:
    """An empty figure with one pair of axes; to be used within `settings`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def svg(figure: Figure, label: str) -> str:
    """The figure as an inline SVG element; `label` says what it shows to those who cannot see."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def without_y(axes: Axes) -> None:
    """Remove the y axis: its rows are labelled directly."""
    axes.grid(False, axis="y")
    axes.set_yticks([])


def spread(
    places: Sequence[float], gap: float, *, low: float = -math.inf, high: float = math.inf
) -> list[float]:
    """The places moved apart so that neighbours are at least `gap` from each other.

    Their order is kept; groups that collide are centred on where they were, then pushed to lie
    between `low` and `high` where there is room.
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    groups: list[tuple[float, list[int]]] = []
    for index in order:
        groups.append((places[index], [index]))
        while len(groups) > 1 and _overlap(groups[-2], groups[-1], gap):
            members = groups[-2][1] + groups[-1][1]
            groups[-2:] = [(sum(places[i] for i in members) / len(members), members)]
    moved = list(places)
    for centre, members in groups:
        for rank, index in enumerate(members):
            moved[index] = centre + gap * (rank - (len(members) - 1) / 2)
    floor = low
    for index in order:
        moved[index] = max(moved[index], floor)
        floor = moved[index] + gap
    ceiling = high
    for index in reversed(order):
        moved[index] = min(moved[index], ceiling)
        ceiling = moved[index] - gap
    return moved


def _overlap(lower: tuple[float, list[int]], upper: tuple[float, list[int]], gap: float) -> bool:
    half = gap * (len(lower[1]) + len(upper[1])) / 2
    return upper[0] - lower[0] < half
