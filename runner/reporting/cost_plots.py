"""Plots of cost: phases of an update, memory at the peak, three token rates, speed and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from runner.comparison.results import Comparison, LiveBytes
from runner.records import PHASES
from runner.reporting import canvas
from runner.reporting.marks import Mark, marks
from runner.reporting.wording import per_second, seconds, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "saved_activations",
    "inputs",
    "temporaries",
    "unattributed",
)
"""Categories of the memory account, in the order of `runner.measure.account`."""
NAMED = 0.09
"""Share of an update from which a phase has room for its name."""
WIDE = 0.06
"""Share of the longest bar from which a part has room for its percentage."""
GIB = 2**30
MIB = 2**20


def phases(comparison: Comparison) -> str | None:
    """Exposed milliseconds of a mean update by phase, stacked."""
    found = [(m, m.row.phases) for m in marks(comparison) if m.row.phases]
    return _stacked(
        found,
        PHASES,
        scale=1e3,
        unit="milliseconds of a mean update, after warm-up",
        total=lambda t: seconds(t),
        label="Phases of an update by setup",
    )


def memory(comparison: Comparison) -> str | None:
    """Bytes alive at the peak by category, stacked."""
    found = [(m, m.row.memory) for m in marks(comparison) if m.row.memory]
    largest = max((sum(parts.values()) for _, parts in found), default=0)
    scale, unit = (1 / GIB, "GiB") if largest >= GIB else (1 / MIB, "MiB")
    return _stacked(
        found,
        CATEGORIES,
        scale=scale,
        unit=f"{unit} alive at the peak of the memory account",
        total=lambda t: size(t),
        label="Memory at the peak by category and setup",
    )


SHORT = {"forward": "forward", "backward": "backward", "optimizer": "opt."}
"""Phases that are named on the curve of live bytes; the others are short."""


def live_bytes(comparison: Comparison) -> str | None:
    """Bytes alive along one update by category, one curve below the other on one scale."""
    found = [(m, m.row.live) for m in marks(comparison) if m.row.live]
    if not found:
        return None
    highest = max(max(map(sum, zip(*live.categories.values(), strict=True))) for _, live in found)
    scale, unit = (1 / GIB, "GiB") if highest >= GIB else (1 / MIB, "MiB")
    figure, axes = canvas.blank(0.5 + 0.95 * len(found))
    row = 1.5 * highest * scale
    for place, (mark, live) in enumerate(found):
        _one_curve(axes, live, mark.label, base=-place * row, row=row, scale=scale)
    axes.set_xlim(0, 1)
    axes.set_ylim(-(len(found) - 1) * row, 0.93 * row)
    axes.set_xticks([])
    canvas.without_y(axes)
    axes.set_xlabel(f"one update, allocation by allocation; highest {highest * scale:.3g} {unit}")
    return canvas.svg(figure, "Live bytes along an update by category and setup")


def _one_curve(
    axes: Axes, live: LiveBytes, label: str, *, base: float, row: float, scale: float
) -> None:
    count = len(live.phases)
    x = [place / max(1, count - 1) for place in range(count)]
    floor = [base] * count
    for number, name in enumerate(CATEGORIES):
        top = [low + held * scale for low, held in zip(floor, live.categories[name], strict=True)]
        axes.fill_between(x, floor, top, color=canvas.PARTS[number], linewidth=0)
        floor = top
    axes.text(0, base + 0.83 * row, label, va="center", fontsize=8)
    starts = [0, *(i for i in range(1, count) if live.phases[i] != live.phases[i - 1]), count]
    for begin, end in pairwise(starts):
        if begin:
            axes.plot([x[begin]] * 2, [base, base + 0.7 * row], color=canvas.LINE, linewidth=0.6)
        if (end - begin) / count > NAMED and live.phases[begin] in SHORT:
            middle = (x[begin] + x[end - 1]) / 2
            axes.text(
                middle, base + 0.71 * row, SHORT[live.phases[begin]],
                ha="center", va="center", fontsize=7, color=canvas.SOFT,
            )  # fmt: skip


def _stacked(
    found: Sequence[tuple[Mark, Mapping[str, float]]],
    parts: Sequence[str],
    *,
    scale: float,
    unit: str,
    total: object,
    label: str,
) -> str | None:
    if not found:
        return None
    assert callable(total)
    figure, axes = canvas.blank(0.55 + 0.52 * len(found))
    longest = max(sum(values.values()) for _, values in found) * scale
    for place, (mark, values) in enumerate(found):
        left = 0.0
        for number, part in enumerate(parts):
            width = values.get(part, 0.0) * scale
            axes.barh(
                -place, width, left=left, height=0.42, color=canvas.PARTS[number],
                edgecolor=canvas.CARD, linewidth=0.7,
            )  # fmt: skip
            if width > WIDE * longest:
                axes.text(
                    left + width / 2, -place, f"{width / scale / sum(values.values()):.0%}",
                    ha="center", va="center", fontsize=7.5, color=canvas.ON_PARTS[number],
                )  # fmt: skip
            left += width
        _bar_words(axes, -place, left, mark, total(sum(values.values())))
    axes.set_xlim(0, longest * 1.14)
    _finish_bars(axes, len(found), unit)
    return canvas.svg(figure, label)


def _bar_words(axes: Axes, y: float, end: float, mark: Mark, total: str) -> None:
    """The setup's name above its bar and the total behind it."""
    axes.text(0, y + 0.25, mark.label, va="bottom", fontsize=8)
    axes.annotate(
        total, (end, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
    )


def _finish_bars(axes: Axes, rows: int, unit: str) -> None:
    axes.set_ylim(-rows + 0.7, 0.72)
    axes.set_xlabel(unit)
    canvas.without_y(axes)


def rates(comparison: Comparison) -> str | None:
    """Slots, non-pad and useful tokens per second, one inside the other."""
    kinds = ("slots", "nonpad", "useful")
    found = [
        (m, [m.row.figures[f"{k}_tokens_per_s"] for k in kinds])
        for m in marks(comparison)
        if all(f"{k}_tokens_per_s" in m.row.figures for k in kinds)
    ]
    if not found:
        return None
    figure, axes = canvas.blank(0.55 + 0.52 * len(found))
    for place, (mark, values) in enumerate(found):
        for value, height, alpha in zip(values, (0.42, 0.29, 0.16), (0.22, 0.45, 1.0), strict=True):
            axes.barh(-place, value, height=height, color=mark.colour, alpha=alpha, linewidth=0)
        _bar_words(axes, -place, values[0], mark, per_second(values[2]))
    axes.set_xlim(0, max(values[0] for _, values in found) * 1.16)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.locator_params(axis="x", nbins=5)
    _finish_bars(axes, len(found), "tokens per second (the figure is the useful rate)")
    return canvas.svg(figure, "Useful, non-pad and slot tokens per second by setup")


# --- speed against memory ---------------------------------------------------------------------


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Names of the points (rate, bytes) that no other point beats in both, by rising rate."""
    front = [
        name
        for name, (rate, held) in points.items()
        if not any(
            other >= rate and less <= held and (other, less) != (rate, held)
            for other, less in points.values()
        )
    ]
    return sorted(front, key=lambda name: points[name])


def speed_and_memory(comparison: Comparison) -> str | None:
    """Useful rate against peak memory; the front runs through the baseline and what passed."""
    found = {
        m.row.name: (m, f["useful_tokens_per_s"], f["peak_allocated_bytes"])
        for m in marks(comparison)
        if {"useful_tokens_per_s", "peak_allocated_bytes"} <= set(f := m.row.figures)
    }
    if len(found) < 2:
        return None
    figure, axes = canvas.blank(3.0)
    unit, word = (GIB, "GiB") if max(p for _, _, p in found.values()) >= GIB else (MIB, "MiB")
    fit = {
        name: (rate, peak / unit)
        for name, (mark, rate, peak) in found.items()
        if mark.quality in ("baseline", "passed")
    }
    for mark, rate, peak in found.values():
        filled = mark.row.name in fit
        axes.scatter(
            [rate], [peak / unit], s=46, zorder=3, linewidths=1.6,
            marker="s" if mark.quality == "baseline" else "o", edgecolors=mark.colour,
            facecolors=mark.colour if filled else canvas.CARD,
        )  # fmt: skip
    axes.margins(x=0.14, y=0.16)
    _front(axes, [fit[name] for name in pareto(fit)])
    _point_labels(axes, [(m, rate, peak / unit) for m, rate, peak in found.values()])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel("useful tokens per second")
    axes.set_ylabel(f"peak memory, {word}")
    return canvas.svg(figure, "Useful tokens per second against peak memory")


def _front(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """The staircase through the points, with what it beats behind it."""
    if not points:
        return
    left, right = axes.get_xlim()
    low, high = axes.get_ylim()
    x = [left, *(rate for rate, _ in points for _ in range(2))]
    y = [*(held for _, held in points for _ in range(2)), high]
    axes.plot(x, y, color=canvas.SOFT, linewidth=1, zorder=1)
    axes.fill_between(x, y, high, color=canvas.SOFT, alpha=0.07, linewidth=0, zorder=0)
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)


def _point_labels(axes: Axes, points: Sequence[tuple[Mark, float, float]]) -> None:
    """Names beside the points, moved apart; on the left of points in the right half."""
    left, right = axes.get_xlim()
    low, high = axes.get_ylim()
    named = [p for p in points if p[0].coloured]
    moved = canvas.spread([y for _, _, y in named], (high - low) * 0.075, low=low, high=high)
    for (mark, x, _), y in zip(named, moved, strict=True):
        behind = x > (left + right) / 2
        axes.annotate(
            mark.label, (x, y), xytext=(-8 if behind else 8, 0), textcoords="offset points",
            ha="right" if behind else "left", va="center", fontsize=8, color=mark.colour,
        )  # fmt: skip
