"""Plots of the looks at the numerics, over the updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from runner.comparison.results import Comparison, Curve
from runner.reporting import canvas
from runner.reporting.looks_words import percent
from runner.reporting.loss_plots import curve_line, end_labels
from runner.reporting.marks import Mark, marks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Found = Sequence[tuple[Mark, Curve]]
TOP = 0.97
"""Height, as a share of the plot's, of the crosses at what was not finite."""
LEAST_SPAN = 4.0
"""Least factor between the ends of a logarithmic scale, so that it has ticks."""


def gradient_error(comparison: Comparison) -> str | None:
    """Relative error of the gradient against FP32's, on a logarithmic scale."""
    return _by_update(comparison, "gradient_error", "relative error of the gradient", log=True)


def lost_share(comparison: Comparison) -> str | None:
    """Share of the weights whose update was rounded away; None where that is 0 everywhere."""
    return _by_update(comparison, "lost_share", "share of the weights", log=False)


def underflow_share(comparison: Comparison) -> str | None:
    """Share of the gradient that a 16-bit format would flush; None where that is 0 everywhere."""
    return _by_update(comparison, "underflow_share", "share of the gradient", log=False)


def _by_update(comparison: Comparison, name: str, words: str, *, log: bool) -> str | None:
    known = _curves(comparison, name)
    found = [(mark, curve) for mark, curve in known if not _is_zero(curve)]
    if not found:
        return None
    figure, axes = canvas.blank(2.9)
    _scale(axes, found, log=log)
    drawn = [(mark, _without_zeros(curve) if log else curve) for mark, curve in found]
    for mark, curve in drawn:
        curve_line(axes, mark, curve, timed=False, band=0.22 / len(found) ** 0.5, dots=True)
    for mark, curve in found:
        _crosses(axes, mark, curve, name)
    axes.margins(x=0.03)
    end_labels(axes, [(mark, *_end(axes, curve)) for mark, curve in drawn if mark.coloured])
    zero = [mark.name for mark, curve in known if _is_zero(curve)]
    if zero:
        named = ", ".join(zero[:3]) + (f" and {len(zero) - 3} more" if len(zero) > 3 else "")
        axes.set_title(f"0 at every look: {named}", fontsize=8, color=canvas.SOFT, loc="left")
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("update")
    axes.set_ylabel(words)
    return canvas.svg(figure, f"{words} against update: {name.replace('_', ' ')}")


def _curves(comparison: Comparison, name: str) -> list[tuple[Mark, Curve]]:
    found = []
    for mark in marks(comparison):
        figure = mark.row.looks.figures.get(name) if mark.row.looks else None
        if figure is not None and figure.curve is not None:
            found.append((mark, figure.curve))
    return found


def _is_zero(curve: Curve) -> bool:
    return all(value == 0 for value in curve.high)


def _without_zeros(curve: Curve) -> Curve:
    """A gap where a value is 0, for which a logarithmic scale has no place."""
    mean, low, high = (
        [value or None for value in column] for column in (curve.mean, curve.low, curve.high)
    )
    return replace(curve, mean=mean, low=low, high=high)


def _scale(axes: Axes, found: Found, *, log: bool) -> None:
    """Limits that hold every finite value, and ticks in percent."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    values = [v for _, curve in found for v in (*curve.low, *curve.high) if v]
    low, high = (min(values), max(values)) if values else (0.01, 0.1)
    if not log:
        axes.set_ylim(0, 1.08 * high)
    else:
        room = max(1.2, (LEAST_SPAN * low / high) ** 0.5)
        axes.set_yscale("log")
        axes.set_ylim(low / room, high * room)
        wide = math.log10(high / low) > 1.5
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="y", which="minor", size=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))


def _crosses(axes: Axes, mark: Mark, curve: Curve, name: str) -> None:
    """A cross at the top edge for every update at which a seed's value was not finite."""
    lost = [u for u, value in zip(curve.update, curve.mean, strict=True) if value is None]
    if lost:
        axes.plot(
            lost, [TOP] * len(lost), color=mark.colour, marker="x", markersize=5, linestyle="",
            transform=axes.get_xaxis_transform(), zorder=4, gid=f"not-finite-{name}-{mark.name}",
        )  # fmt: skip


def _end(axes: Axes, curve: Curve) -> tuple[float, float]:
    """Where the last value that is drawn lies; at the top where there is none."""
    known = [(u, v) for u, v in zip(curve.update, curve.mean, strict=True) if v is not None]
    return known[-1] if known else (curve.update[-1], axes.get_ylim()[1])
