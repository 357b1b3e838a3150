"""Plots of quality: held-out differences against the margin, loss by update and by second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from runner.comparison.results import Comparison, Curve
from runner.reporting import canvas
from runner.reporting.marks import Mark, marks
from runner.reporting.wording import contrast_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

START = 0.1
"""Share of a long curve whose heights do not set the scale: the fall from random weights."""
LONG = 40
"""Points from which a curve counts as long."""
Drawn = Sequence[tuple[Mark, Curve]]


def differences(comparison: Comparison) -> str | None:
    """Held-out loss minus the baseline's: mean, interval and seeds, with the margin."""
    rows = [(m, contrast_of(comparison, m.row)) for m in marks(comparison)]
    found = [(m, c) for m, c in rows if c is not None and c.difference is not None]
    if not found:
        return None
    figure, axes = canvas.blank(max(2.0, 0.85 + 0.34 * len(found)))
    axes.axvline(0, color=canvas.SOFT, linewidth=1)
    for place, (mark, contrast) in enumerate(found):
        paired, y = contrast.difference, -place
        assert paired is not None
        if paired.low is not None and paired.high is not None:
            axes.plot([paired.low, paired.high], [y, y], color=mark.colour, linewidth=2)
        seeds = list(contrast.values.values())
        axes.scatter(seeds, [y] * len(seeds), s=9, color=mark.colour, alpha=0.45, linewidths=0)
        axes.scatter([paired.mean], [y], s=30, color=mark.colour, zorder=3)
    axes.set_ylim(-len(found) + 0.4, 0.9)
    _margin(axes, comparison.quality.margin)
    axes.set_yticks([-place for place in range(len(found))], [mark.label for mark, _ in found])
    for text, (mark, _) in zip(axes.get_yticklabels(), found, strict=True):
        text.set_color(mark.colour)
    axes.grid(False, axis="y")
    axes.locator_params(axis="x", nbins=6)
    axes.set_xlabel("held-out loss minus the baseline's, nats per token")
    return canvas.svg(figure, "Held-out differences with intervals and the margin")


def _margin(axes: Axes, margin: float) -> None:
    """The margin as a broken line with its value."""
    colour = canvas.BAD
    axes.axvline(margin, color=colour, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.annotate(
        f"margin {margin:g}", (margin, 1), xytext=(4, -1), xycoords=("data", "axes fraction"),
        textcoords="offset points", va="top", fontsize=8, color=colour,
    )  # fmt: skip


# --- curves -----------------------------------------------------------------------------------


def by_update(comparison: Comparison) -> str | None:
    """Smoothed training loss by update, with the band of the seeds."""
    found = [(m, m.row.train) for m in marks(comparison) if m.row.train is not None]
    return _curves(found, "update", "training loss, nats per token", timed=False)


def by_second(comparison: Comparison) -> str | None:
    """The same by seconds of training; None where no setup has times."""
    found = [
        (m, m.row.train)
        for m in marks(comparison)
        if m.row.train is not None and m.row.train.seconds
    ]
    name = "seconds of training, everything included"
    return _curves(found, name, "training loss, nats per token", timed=True)


def gaps(comparison: Comparison) -> str | None:
    """Smoothed training loss minus the baseline's of the same seed, by update."""
    rows = [(m, contrast_of(comparison, m.row)) for m in marks(comparison)]
    found = [(m, c.gap) for m, c in rows if c is not None and c.gap is not None]
    return _curves(
        found, "update", "loss minus the baseline's, nats", timed=False, around_zero=True
    )


def _curves(
    found: Drawn, x_name: str, y_name: str, *, timed: bool, around_zero: bool = False
) -> str | None:
    if not found:
        return None
    figure, axes = canvas.blank(2.9)
    for mark, curve in found:
        curve_line(axes, mark, curve, timed=timed, band=0.22 / len(found) ** 0.5)
    if around_zero:
        axes.axhline(0, color=canvas.SOFT, linewidth=1)
    axes.set_ylim(*_heights(found))
    axes.margins(x=0.01)
    if not timed:
        ends = [(m, c.update[-1], c.mean[-1]) for m, c in found if m.coloured]
        end_labels(axes, [(m, x, y) for m, x, y in ends if y is not None])
    others = sum(not m.coloured for m, _ in found)
    if others:
        axes.set_title(f"grey: {others} further setups", fontsize=8, color=canvas.SOFT, loc="right")
    axes.set_xlabel(x_name)
    axes.set_ylabel(y_name)
    return canvas.svg(figure, f"{y_name} against {x_name}")


def curve_line(
    axes: Axes, mark: Mark, curve: Curve, *, timed: bool, band: float, dots: bool = False
) -> None:
    """One setup, its band as opaque as `band`; a value that is not finite breaks the line. dots:
    whether each point is marked; a curve of one point always is."""
    baseline = mark.quality == "baseline"
    nan = float("nan")
    mean, low, high = (
        [nan if value is None else value for value in column]
        for column in (curve.mean, curve.low, curve.high)
    )
    x = curve.seconds if timed else curve.update
    order = 2 if baseline else 3
    axes.plot(x, mean, color=mark.colour, linewidth=2.6 if baseline else 1.5, zorder=order)
    if curve.seeds > 1:
        axes.fill_between(x, low, high, color=mark.colour, alpha=band, linewidth=0, zorder=1)
    if dots or len(curve.update) == 1:
        size = 4 if len(curve.update) == 1 else 2.5
        axes.plot(x, mean, color=mark.colour, marker="o", markersize=size, zorder=order)


def _heights(found: Drawn) -> tuple[float, float]:
    """Limits that show the curves after their first fall, with their bands; what diverged may
    leave the plot, where its label points to it."""
    values = []
    settled = [item for item in found if item[0].quality not in ("diverged", "error")]
    for _, curve in settled or found:
        start = int(START * len(curve.update)) if len(curve.update) >= LONG else 0
        for column in (curve.low, curve.high):
            values += [value for value in column[start:] if value is not None]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def end_labels(axes: Axes, ends: Sequence[tuple[Mark, float, float]]) -> None:
    """Names at the right of the lines' ends, which are x and y, moved apart; an end above the plot
    is pointed to. To be called when the axes have their limits and scale."""
    high = axes.get_ylim()[1]
    place = axes.transScale + axes.transLimits
    heights = [float(place.transform((x, min(y, high)))[1]) for _, x, y in ends]
    moved = canvas.spread(heights, 0.068, low=0.0, high=1.0)
    for (mark, x, y), height in zip(ends, moved, strict=True):
        words = f"{mark.name} ↑" if y > high else mark.name
        axes.annotate(
            words, (x, min(y, high)), xytext=(1.025, height), textcoords="axes fraction",
            va="center", fontsize=8, color=mark.colour, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": mark.colour, "linewidth": 0.6, "alpha": 0.6},
        )  # fmt: skip
