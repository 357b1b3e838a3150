"""The plots of the page with their words: learning on the left, cost on the right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from runner.comparison.results import Comparison
from runner.records import PHASES
from runner.reporting import canvas, cost_plots, loss_plots
from runner.reporting.marks import MOST, marks
from runner.reporting.markup import chips, plain_table
from runner.reporting.tables import reach_table, stands_with


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A plot of the page: what draws it, its words, and what stands above and below it."""

    title: str
    caption: str
    draw: Callable[[Comparison], str | None]
    above: str = ""
    below: str = ""


def plots(comparison: Comparison) -> str:
    """Learning on the left, cost on the right; only what has something to show."""
    sides = (_learning(comparison), _cost(comparison))
    columns = "".join(
        f'<div class="column">{"".join(figure(comparison, plot) for plot in side)}</div>'
        for side in sides
    )
    count = len(comparison.setups)
    note = f"Plots show {MOST} of {count} setups; the table has all." if count > MOST else ""
    return f'<p class="stands">{note}</p><div class="grid">{columns}</div>'


def figure(comparison: Comparison, plot: Plot) -> str:
    """The plot as a card of the page; empty where it has nothing to show."""
    with canvas.settings(plot.title):
        drawn = plot.draw(comparison)
    if drawn is None:
        return ""
    return (
        f'<figure class="card"><h2>{plot.title}</h2><figcaption>{escape(plot.caption)}</figcaption>'
        f"{plot.above}{drawn}{plot.below}</figure>"
    )


def _learning(comparison: Comparison) -> Sequence[Plot]:
    return (
        Plot(
            title="Is the quality kept?",
            caption="Held-out loss against the baseline's. Small dots are seeds, the line is the "
            f"{comparison.quality.confidence:.0%} interval of their mean.",
            draw=loss_plots.differences,
        ),
        Plot(
            title="Loss by update",
            caption="Training loss over the last 20 updates (all of a shorter run), weighted by "
            "useful tokens. Bands hold all seeds; the scale leaves out the first fall.",
            draw=loss_plots.by_update,
        ),
        Plot(
            title="Distance from the baseline",
            caption="The same loss minus the baseline's of the same seed, on the same examples.",
            draw=loss_plots.gaps,
        ),
        Plot(
            title="Loss by second",
            caption="Seconds of training, warm-up and everything else included.",
            draw=loss_plots.by_second,
            above=_setup_chips(comparison),
            below=_reach(comparison),
        ),
    )


def _cost(comparison: Comparison) -> Sequence[Plot]:
    rates = stands_with(comparison)
    rates = f" {rates[0].upper()}{rates[1:]}." if rates else ""
    categories = [name.replace("_", " ") for name in cost_plots.CATEGORIES]
    return (
        Plot(
            title="Speed against memory",
            caption="Filled: the baseline and what passed, with their Pareto front. Further right "
            f"and further down is better.{rates}",
            draw=cost_plots.speed_and_memory,
        ),
        Plot(
            title="Useful against processed tokens",
            caption="Dark: tokens that carry loss. Lighter: real tokens, then slots with padding."
            f"{rates}",
            draw=cost_plots.rates,
        ),
        Plot(
            title="Where an update's time goes",
            caption="Exposed time by phase: what overlaps useful work counts nowhere.",
            draw=cost_plots.phases,
            above=chips(dict(zip(PHASES, canvas.PARTS, strict=False))),
        ),
        Plot(
            title="What fills memory at the peak",
            caption="Live bytes by category, from the memory account.",
            draw=cost_plots.memory,
            above=chips(dict(zip(categories, canvas.PARTS, strict=True))),
        ),
        Plot(
            title="Memory along an update",
            caption="The same categories over one update of the largest micro-batch, by phase.",
            draw=cost_plots.live_bytes,
        ),
    )


def _setup_chips(comparison: Comparison) -> str:
    found = [mark for mark in marks(comparison) if mark.coloured and mark.row.train is not None]
    return chips({mark.name: mark.colour for mark in found})


def _reach(comparison: Comparison) -> str:
    """When each setup reached the baseline's final loss."""
    header, rows = reach_table(comparison)
    return plain_table(header, rows) if rows else ""
