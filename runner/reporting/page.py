"""The report: one self-contained HTML page. Everything that comes from a run is escaped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from runner.comparison.results import Comparison, Contrast, Ratio, SetupRow, Verdict
from runner.records import PHASES
from runner.reporting import canvas, cost_plots, loss_plots, wording
from runner.reporting.marks import MOST, all_marks, marks
from runner.reporting.tables import pair_table, reach_table, stands_with
from runner.reporting.theme import STYLE


def page(comparison: Comparison) -> str:
    """The whole document."""
    against = comparison.baseline or "a baseline that has no run"
    parts = [
        _header(comparison, against),
        _verdicts(comparison),
        _table(comparison),
        _plots(comparison),
        _pairs(comparison),
        _notes(comparison),
        _runs(comparison),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Comparison against {escape(against)}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _header(comparison: Comparison, against: str) -> str:
    work, device, rule = (escape(line) for line in wording.head(comparison))
    kind = "cpu" if comparison.device.startswith("CPU") else "gpu"
    figures = " · CPU figures: they say nothing about a GPU" if kind == "cpu" else ""
    runs = [run.status for row in comparison.setups for run in row.runs]
    count = f"{len(comparison.setups)} setups, {runs.count('ok')} of {len(runs)} runs finished"
    return (
        f"<header><h1>Compared with {escape(against)} <em>· {count}</em></h1>"
        f'<p class="work">{work}<br>{rule}</p>'
        f'<span class="device {kind}">{device}{figures}</span></header>'
    )


# --- verdicts ---------------------------------------------------------------------------------


def _verdicts(comparison: Comparison) -> str:
    """A sentence for each setup, and the commands that settle what is open."""
    items = []
    for contrast in comparison.contrasts:
        verdict = contrast.verdict
        commands = "".join(f"<pre>{escape(command)}</pre>" for command in verdict.commands)
        gains = _gains(contrast)
        items.append(
            f"<li><span>{_badge(verdict)}</span><div><strong>{escape(contrast.setup)}</strong>"
            f"{gains} <span class=quiet>— {escape(verdict.reason)}</span>{commands}</div></li>"
        )
    if not items:
        return ""
    return f'<section class="card"><ul class="heads">{"".join(items)}</ul></section>'


def _badge(verdict: Verdict) -> str:
    return f'<span class="badge {verdict.word}">{verdict.word}</span>'


GAINS = {"useful_tokens_per_s": "useful tokens/s", "peak_allocated_bytes": "peak memory"}


def _gains(contrast: Contrast) -> str:
    """Clear ratios in words: wins, and what is worse."""
    words = [
        f' · <span class="{_class(found)}">{found.value:.3g}× {GAINS[metric]}</span>'
        for metric, found in contrast.ratios.items()
        if metric in GAINS and found.outcome in ("win", "worse", "better")
    ]
    return "".join(words)


def _class(found: Ratio) -> str:
    return found.outcome if found.outcome in ("win", "worse") else "quiet"


# --- the table --------------------------------------------------------------------------------


def _table(comparison: Comparison) -> str:
    header = (
        "setup",
        "quality",
        "held-out loss",
        "step time",
        "tokens per second",
        "peak memory",
        "skipped",
    )
    head = "".join(f"<th>{name}</th>" for name in header)
    colours = {mark.row.name: mark.colour for mark in all_marks(comparison)}
    body = "".join(_row(comparison, row, colours[row.name]) for row in comparison.setups)
    under = stands_with(comparison)
    return (
        f'<section class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}'
        f'</tbody></table><p class="stands">{escape(under)}</p></section>'
    )


def _row(comparison: Comparison, row: SetupRow, colour: str) -> str:
    contrast = wording.contrast_of(comparison, row)
    verdict = comparison.verdict_of(row.name)
    figures = row.figures
    loss = figures.get("eval_loss")
    skipped = figures.get("updates_skipped")
    rates = [wording.per_second(figures.get(f"{k}_tokens_per_s")) for k in ("nonpad", "slots")]
    cells = [
        f'<span class="name">{_dot(colour)}{escape(row.name)}</span>'
        + _phrases(wording.conditions(row), f"seeds {wording.seeds(row)}"),
        _badge(verdict),
        (wording.NONE if loss is None else f"{loss:.4f}") + _difference(contrast),
        wording.seconds(figures.get("step_s_median"))
        + _ratio(contrast, "step_s_median")
        + _under("emulated: no time" if row.emulated else ""),
        wording.per_second(figures.get("useful_tokens_per_s"))
        + " useful"
        + _ratio(contrast, "useful_tokens_per_s")
        + _phrases(
            f"non-pad {rates[0]} · slots {rates[1]} · padding {wording.share(row.padding_share)}"
        ),
        wording.size(figures.get("peak_allocated_bytes"))
        + _ratio(contrast, "peak_allocated_bytes")
        + _under(row.largest or ""),
        wording.NONE if skipped is None else f"{skipped:.0f}",
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _dot(colour: str) -> str:
    return f'<span class="dot" style="background:{_variable(colour)}"></span>'


def _variable(colour: str) -> str:
    name = next(name for name, value in canvas.COLOURS.items() if value == colour)
    return f"var(--{name})"


def _under(text: str) -> str:
    return f'<span class="under">{escape(text)}</span>' if text else ""


def _phrases(*texts: str) -> str:
    """Small print that breaks between its phrases only."""
    phrases = " · ".join(texts).split(" · ")
    return _under(" · ".join(phrase.replace(" ", "\N{NO-BREAK SPACE}") for phrase in phrases))


def _difference(contrast: Contrast | None) -> str:
    if contrast is None or contrast.difference is None:
        return ""
    mean, _, interval = wording.difference(contrast).partition(" ")
    return f'<span class="under">{mean}<br><span class="keep">{interval}</span></span>'


def _ratio(contrast: Contrast | None, metric: str) -> str:
    found = contrast.ratios.get(metric) if contrast else None
    if found is None:
        return ""
    word = wording.OUTCOMES[found.outcome]
    return (
        f'<span class="under"><span class="keep">{wording.ratio(found)}</span><br>'
        f'<span class="{_class(found)}">{word}</span></span>'
    )


# --- plots ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A plot of the page: what draws it, its words, and what stands above and below it."""

    title: str
    caption: str
    draw: Callable[[Comparison], str | None]
    above: str = ""
    below: str = ""


def _plots(comparison: Comparison) -> str:
    """Learning on the left, cost on the right; only what has something to show."""
    sides = (_learning(comparison), _cost(comparison))
    columns = "".join(
        f'<div class="column">{"".join(_figure(comparison, plot) for plot in side)}</div>'
        for side in sides
    )
    count = len(comparison.setups)
    note = f"Plots show {MOST} of {count} setups; the table has all." if count > MOST else ""
    return f'<p class="stands">{note}</p><div class="grid">{columns}</div>'


def _figure(comparison: Comparison, plot: Plot) -> str:
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
            caption="Training loss over the last 20 updates, weighted by useful tokens. Bands hold "
            "all seeds; the scale leaves out the first fall.",
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
            above=_chips(dict(zip(PHASES, canvas.PARTS, strict=False))),
        ),
        Plot(
            title="What fills memory at the peak",
            caption="Live bytes by category, from the memory account.",
            draw=cost_plots.memory,
            above=_chips(dict(zip(categories, canvas.PARTS, strict=True))),
        ),
    )


def _setup_chips(comparison: Comparison) -> str:
    found = [mark for mark in marks(comparison) if mark.coloured and mark.row.train is not None]
    return _chips({mark.name: mark.colour for mark in found})


def _chips(colours: Mapping[str, str]) -> str:
    """A legend: a square of its colour before each name."""
    chips = "".join(
        f'<span><i style="background:{_variable(colour)}"></i>{escape(name)}</span>'
        for name, colour in colours.items()
    )
    return f'<div class="chips">{chips}</div>'


def _reach(comparison: Comparison) -> str:
    """When each setup reached the baseline's final loss."""
    header, rows = reach_table(comparison)
    return _plain_table(header, rows) if rows else ""


# --- the rest ---------------------------------------------------------------------------------


def _pairs(comparison: Comparison) -> str:
    header, rows = pair_table(comparison)
    if not rows:
        return ""
    note = "A ratio without a word is not distinguishable from 1."
    return _section("Pairs that differ in one key", note, _plain_table(header, rows))


def _plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _section(title: str, note: str, content: str) -> str:
    return (
        f'<section class="card scroll"><h2>{title}</h2><p class="quiet">{escape(note)}</p>'
        f"{content}</section>"
    )


def _notes(comparison: Comparison) -> str:
    if not comparison.notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in comparison.notes)
    return f'<section class="card"><h2>Notes</h2><ul class="notes">{items}</ul></section>'


def _runs(comparison: Comparison) -> str:
    """Every run, folded away."""
    header = ["setup", "seed", "status", "held-out", "step time", "useful/s", "peak", "run"]
    rows = []
    for row in comparison.setups:
        for run in row.runs:
            loss = run.figures.get("eval_loss")
            rows.append(
                [
                    row.name,
                    str(run.seed),
                    run.status + (f": {run.message}" if run.message else ""),
                    wording.NONE if loss is None else f"{loss:.4f}",
                    wording.seconds(run.figures.get("step_s_median")),
                    wording.per_second(run.figures.get("useful_tokens_per_s")),
                    wording.size(run.figures.get("peak_allocated_bytes")),
                    run.run_id,
                ]
            )
    table = _plain_table(header, rows)
    return (
        f'<section class="card scroll"><details><summary>All {len(rows)} runs</summary>'
        f"{table}</details></section>"
    )
