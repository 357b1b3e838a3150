"""The report: one self-contained HTML page. Everything that comes from a run is escaped."""

from __future__ import annotations

from html import escape

from runner.comparison.results import Comparison, Contrast, Ratio, SetupRow, Verdict
from runner.reporting import wording
from runner.reporting.looks_section import looks_section
from runner.reporting.marks import all_marks
from runner.reporting.markup import plain_table, variable
from runner.reporting.plots import plots
from runner.reporting.tables import Table, data_table, pair_table, probe_table, stands_with
from runner.reporting.theme import STYLE


def page(comparison: Comparison) -> str:
    """The whole document."""
    against = comparison.baseline or "a baseline that has no run"
    parts = [
        _header(comparison, against),
        _verdicts(comparison),
        _table(comparison),
        plots(comparison),
        _section("Data", DATA, data_table(comparison)),
        _section("Pairs that differ in one key", PAIRS, pair_table(comparison)),
        _section("Gradients against FP32", PROBES, probe_table(comparison)),
        looks_section(comparison),
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
        f' · <span class="{_class(found)}">{found.value:.3g}× {GAINS[metric]}{_note(found)}</span>'
        for metric, found in contrast.ratios.items()
        if metric in GAINS and found.outcome in ("win", "worse", "better")
    ]
    return "".join(words)


def _note(found: Ratio) -> str:
    return f" ({escape(found.note)})" if found.note else ""


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
    return f'<span class="dot" style="background:{variable(colour)}"></span>'


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


# --- the rest ---------------------------------------------------------------------------------


DATA = "Of both splits; of a stream, of what each run has read of its training side."
PAIRS = "A ratio without a word is not distinguishable from 1."
PROBES = (
    "Before the first update, on the same weights and micro-batch. A halved gradient, which "
    "no loss shows under AdamW, has cosine 1 and norm ratio 0.5."
)


def _section(title: str, note: str, table: Table) -> str:
    """A table under its title and a note; nothing where it has no row."""
    header, rows = table
    if not rows:
        return ""
    return (
        f'<section class="card scroll"><h2>{title}</h2><p class="quiet">{escape(note)}</p>'
        f"{plain_table(header, rows)}</section>"
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
    table = plain_table(header, rows)
    return (
        f'<section class="card scroll"><details><summary>All {len(rows)} runs</summary>'
        f"{table}</details></section>"
    )
