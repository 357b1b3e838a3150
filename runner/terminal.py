"""What a person sees: a progress bar while a job runs, a summary at its end, lists of faults.

On a terminal one bar is redrawn; elsewhere a plain line appears every few seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from runner import accounting
from runner.contracts import Fault
from runner.numerics import not_finite
from runner.records import (
    JOURNAL,
    PHASES,
    EvaluationRecord,
    RunRecord,
    UpdateRecord,
    follow_journal,
)

if TYPE_CHECKING:
    from runner.compose import Plan

REDRAW_S = 0.25
PLAIN_S = 5.0
WINDOW = 20
"""Updates that the rates of the progress bar are over."""


def human_bytes(count: float) -> str:
    """Bytes with a binary unit; GiB is 2**30 bytes."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def human_seconds(seconds: float) -> str:
    """Seconds with a unit that leaves three digits."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def print_faults(out: IO[str], faults: Sequence[Fault], consequence: str) -> None:
    """Every fault on its own line under one heading."""
    count = f"{len(faults)} mistake{'s' if len(faults) != 1 else ''}"
    print(f"error: {count} in the command; {consequence}", file=out)
    for fault in faults:
        print(f"  {fault}", file=out)


class Progress:
    """The progress of one job, read from its journal."""

    def __init__(self, out: IO[str], *, plan: Plan, jobs: int, folder: Path) -> None:
        self._out = out
        self._folder = folder
        self._title = f"[{plan.number + 1}/{jobs}] {plan.setup}" if jobs > 1 else plan.setup
        self._setup = plan.setup
        self._config = plan.config
        self._live = out.isatty()
        self._offset = 0
        self._window: list[UpdateRecord] = []
        self._since: list[UpdateRecord] = []
        self._evaluation: EvaluationRecord | None = None
        self._shown = 0.0
        self._stage = ""
        self._bar: Any = None

    def say(self, text: str) -> None:
        """One plain line."""
        print(text, file=self._out, flush=True)

    def show(self, state: Mapping[str, Any]) -> None:
        """Bring the display up to date, at most every so often."""
        now = time.monotonic()
        if now - self._shown < (REDRAW_S if self._live else PLAIN_S):
            return
        self._shown = now
        self._read()
        if self._live:
            self._draw(state)
        else:
            self._plain(state)

    def _read(self) -> None:
        for line, offset in follow_journal(self._folder / JOURNAL, self._offset):
            self._offset = offset
            if isinstance(line, EvaluationRecord):
                self._evaluation = line
            elif isinstance(line, UpdateRecord):
                self._window = [*self._window, line][-WINDOW:]
                self._since.append(line)

    def _figures(self, updates: Sequence[UpdateRecord]) -> str:
        """Loss, step time and useful rate over the given updates, totals over totals."""
        loss = accounting.window_loss(updates)
        seconds = sum(u.total for u in updates)
        useful = accounting.rate(accounting.total_counts(updates).useful, seconds)
        words = ["loss not defined" if loss is None else f"loss {loss:.4f}"]
        if math.isfinite(seconds):  # an emulated run tells no times
            words.append(f"step {human_seconds(seconds / len(updates))}")
            words.append(f"{useful or 0:,.0f} useful tokens/s")
        if self._evaluation is not None:
            words.append(f"held-out {self._evaluation.eval_loss:.4f}")
        return " · ".join(words)

    def _plain(self, state: Mapping[str, Any]) -> None:
        total = state.get("updates")
        if self._since:
            last = self._since[-1].update
            self.say(f"{self._title}: update {last}/{total} · {self._figures(self._since)}")
            self._since = []
        elif state.get("state") and state["state"] != self._stage:
            self._stage = state["state"]
            self.say(f"{self._title}: {self._stage}")

    def _draw(self, state: Mapping[str, Any]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        if self._bar is None:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=Console(file=self._out),
                auto_refresh=False,
                transient=True,
            )
            self._bar.start()
            self._bar.add_task(self._title, total=None, figures="")
        figures = self._figures(self._window) if self._window else state.get("state", "starting")
        done = self._window[-1].update if self._window else 0
        self._bar.update(0, total=state.get("updates"), completed=done, figures=figures)
        self._bar.refresh()

    def close(self, record: RunRecord) -> None:
        """Remove the bar, print the last partial window and the summary."""
        self._read()
        if self._bar is not None:
            self._bar.stop()
        elif self._since:
            total = record.sizes.get("updates_planned")
            last = self._since[-1].update
            self.say(f"{self._title}: update {last}/{total} · {self._figures(self._since)}")
        self.say("\n".join(summary_lines(record, title=self._title, folder=self._folder)))


def summary_lines(record: RunRecord, *, title: str, folder: Path) -> list[str]:
    """The end summary of a run, a line per subject; a subject that is unknown is left out."""
    lines = [f"{title}: {record.status}" + (f" — {record.message}" if record.message else "")]
    sections = (
        ("device", _device_line(record)),
        ("emulate", _emulation_line(record)),
        ("step time", _step_line(record)),
        ("phases", _phase_line(record)),
        ("tokens/s", _rate_line(record)),
        ("memory", _memory_line(record)),
        ("allocator", _allocator_line(record)),
        ("account", _account_line(record)),
        ("loss", _loss_line(record)),
        ("data", _data_line(record)),
        ("updates", _update_line(record)),
        ("layers", _layers_line(record)),
        ("gradient", _gradient_line(record)),
        ("lost", _lost_line(record)),
        ("numerics", _looks_line(record)),
        ("compile", _compile_line(record)),
        ("timeline", _timeline_line(record)),
        *(
            ("look next", f"{f['stage']}: {f['symptom']}: {f['evidence']}; {f['advice']}")
            for f in record.diagnosis
            if f["symptom"]
        ),
        ("run folder", str(folder)),
    )
    lines += [f"  {name:<11}{text}" for name, text in sections if text]
    return lines


def _device_line(record: RunRecord) -> str:
    device = record.environment.get("device")
    if not device:
        return ""
    sizes = record.sizes
    shape = ""
    if sizes:
        accum = sizes["global_batch"] // sizes["micro_batch"]
        shape = (
            f" · batch {sizes['global_batch']} = {accum} x {sizes['micro_batch']}"
            f" · seq_len {record.config['seq_len']} · {sizes['params']:,} parameters"
        )
    kind = "CPU" if device["type"] == "cpu" else "GPU"
    return f"{kind}: {device['name']}{shape}"


def _emulation_line(record: RunRecord) -> str:
    words = record.evidence.get("emulation", {}).get("value", "")
    if record.environment.get("emulated"):
        return f"emulated ({words}): judged on its quality; no time, no rate"
    return str(words)


def _step_line(record: RunRecord) -> str:
    if record.environment.get("emulated"):
        return ""
    steps = record.sizes.get("step_s")
    if not steps:
        timed = record.sizes.get("updates_timed")
        if timed is None:
            return ""
        return f"unknown: no update came after the {record.config['warmup']} of warm-up"
    return (
        f"median {human_seconds(steps['median'])} · p95 {human_seconds(steps['p95'])}"
        f" · spread {steps['spread']:.0%} · over {steps['count']:.0f} updates after warm-up"
    )


def _phase_line(record: RunRecord) -> str:
    shares = record.sizes.get("phase_shares")
    if not shares:
        return ""
    return " · ".join(f"{phase} {shares[phase]:.1%}" for phase in PHASES)


def _rate_line(record: RunRecord) -> str:
    words = [
        f"{label} {record.summary[f'{kind}_tokens_per_s']:,.0f}"
        for kind, label in (("useful", "useful"), ("nonpad", "non-pad"), ("slots", "slots"))
        if f"{kind}_tokens_per_s" in record.summary
    ]
    padding = record.sizes.get("padding_share")
    if words and padding is not None:
        words.append(f"padding {padding:.0%} of slots")
    if "mfu" in record.summary:
        words.append(f"MFU {record.summary['mfu']:.1%}")
    return " · ".join(words)


def _memory_line(record: RunRecord) -> str:
    peak = record.summary.get("peak_allocated_bytes")
    if peak is None:
        return str(record.memory.get("not_accounted", ""))
    largest = record.memory.get("largest_live_object")
    words = [f"peak {human_bytes(peak)}"]
    predicted = record.memory.get("predicted")
    if predicted:
        error = record.memory.get("prediction_error")
        beside = "" if error is None else f" ({error:+z.1%})"
        words.append(f"predicted {human_bytes(predicted['peak_bytes'])}{beside}")
    elif record.memory.get("not_predicted"):
        words.append(f"not predicted: {record.memory['not_predicted']}")
    if largest:
        words.append(f"largest live object: {largest}")
    elif record.memory.get("not_accounted"):
        words.append(record.memory["not_accounted"])
    if record.memory.get("smaller_with"):
        words.append(f"smaller with {', '.join(record.memory['smaller_with'])}")
    return " · ".join(words)


def _allocator_line(record: RunRecord) -> str:
    """What CUDA's allocator held of the device, and who else holds some."""
    found = record.memory.get("allocator")
    if not found:
        return ""
    words = [
        f"reserved {human_bytes(found['peak_reserved_bytes'])}, at the peak "
        f"{human_bytes(found['unfilled_bytes'])} of it unfilled ({found['unfilled_share']:.0%})"
    ]
    if found["peak_inactive_split_bytes"] is not None:
        words.append(f"free but split {human_bytes(found['peak_inactive_split_bytes'])}")
    if found["retries"]:
        words.append(f"{found['retries']} retries")
    others = record.memory.get("device", {}).get("after", {}).get("others")
    if others:
        held = record.memory["device"]["after"]["others_bytes"]
        size = "an unknown amount" if held is None else human_bytes(held)
        words.append(f"{len(others)} other processes hold {size}")
    return " · ".join(words)


def _account_line(record: RunRecord) -> str:
    """Updates whose peak the memory account does not cover."""
    found = record.memory.get("account_exceeded")
    if not found or not found["updates"]:
        return ""
    by = f"by {human_bytes(found['largest_bytes'])} ({found['largest_share']:.1%}) at most"
    slack = record.memory.get("allocator", {}).get("slack_bytes")
    if slack:
        by += f" (the allocator's blocks exceed what was asked for by {human_bytes(slack)})"
    if not found["explained"]:
        return f"does not explain the peak: every update was over it, {by}"
    return (
        f"{found['updates']} of {found['of']} updates were over it by more than "
        f"{found['allowed']:.0%}, {by}; they are named in the journal"
    )


def _loss_line(record: RunRecord) -> str:
    found = record.evaluation
    words = []
    if "train_loss" in record.summary:
        applied = int(record.summary["updates_applied"])
        window = min(accounting.TRAIN_LOSS_WINDOW, applied)
        words.append(f"train {record.summary['train_loss']:.4f} (last {window} updates)")
    if found.get("before") is not None and found.get("last") is not None:
        words.append(_held_out(found, record.summary.get("updates_applied")))
        words.append(f"unigram entropy {found['unigram_entropy']:.4f}")
    return " · ".join(words)


def _held_out(found: Mapping[str, Any], applied: float | None) -> str:
    """From where to where; a run that ended early says which weights the last loss is of."""
    before, last, at = found["before"], found["last"], found.get("last_update")
    if at == 0:
        return f"held-out {before:.4f} nats before training, not evaluated again"
    early = at is not None and applied is not None and at < applied
    return f"held-out {before:.4f} -> {last:.4f} nats{f' after update {at}' if early else ''}"


def _data_line(record: RunRecord) -> str:
    """What of the corpus was cut or left out; nothing where nothing was."""
    sizes = record.sizes
    truncated, dropped = sizes.get("examples_truncated"), sizes.get("examples_dropped")
    if not truncated and not dropped:
        return ""
    count, held_out = sizes.get("examples_train"), sizes.get("examples_eval")
    words = ["a stream" if count is None else f"{count:,} examples", f"{held_out:,} held out"]
    if truncated:
        words.append(f"{truncated:,} cut to seq_len")
    if dropped:
        reasons = ", ".join(f"{reason} {number:,}" for reason, number in dropped.items())
        words.append(f"left out: {reasons}")
    return " · ".join(words)


def _lost_line(record: RunRecord) -> str:
    """Weights that their format was too coarse to change in the untimed updates."""
    names = record.evidence.get("tensors_unchanged", {}).get("value")
    share = record.evidence.get("updates_lost_share", {}).get("value")
    words = [] if share is None else [f"{share:.1%} of the weights with a gradient"]
    if names:
        count = record.evidence["tensors_trainable"]["value"]
        shown = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
        words.append(f"{len(names)} of {count} tensors whole ({shown})")
    if not words:
        return ""
    return f"the first updates left {', '.join(words)} as they were: too small for their format"


def _layers_line(record: RunRecord) -> str:
    """How many layers a recipe converted, and what it left."""
    found = record.evidence.get("converted_layers", {}).get("value")
    if not found:
        return ""
    left = ", ".join(found["left"])
    return f"{found['count']} of {found['of']} in the recipe's format" + (
        f"; left: {left}" if left else ""
    )


def _gradient_line(record: RunRecord) -> str:
    """How the recipe's gradient agrees with FP32's, and the group that agrees least."""
    found = record.numerics.get("gradient_probe")
    if not found:
        return ""
    whole = found["gradient"]
    if whole["norm_ratio"] is None:
        return "not finite, or FP32's is zero, in the untimed updates"
    cosine = "none, as it is zero" if whole["cosine"] is None else f"{whole['cosine']:.5f}"
    worst = found["groups"][found["worst"]]["relative_error"]
    error = "not finite, or FP32's is zero" if worst is None else f"{worst:.2e}"
    return (
        f"against FP32: error {whole['relative_error']:.2e} · cosine {cosine} · norm "
        f"{whole['norm_ratio']:.4f}× · worst {found['worst']} {error}"
    )


def _looks_line(record: RunRecord) -> str:
    """The worst that the looks while training found: gradient error and lost updates."""
    found = record.numerics.get("looks")
    if not found:
        return ""
    words = []
    for name, text, form in (
        ("gradient_error", "gradient error", "{:.2e}"),
        ("lost_share", "updates rounded away", "{:.3g}%"),
    ):
        figure = found["figures"].get(name)
        if figure is None:
            continue
        if figure["most"] is not None:
            most = figure["most"] * (100 if "%" in form else 1)
            upto = f"{text} up to {form.format(most)} (update {figure['most_update']})"
            words.append(upto if most else f"no {text}")
        if figure["nonfinite"]:
            words.append(f"{text} {not_finite(figure)}")
    return " · ".join([f"{found['count']} look{'s' if found['count'] > 1 else ''}", *words])


def _compile_line(record: RunRecord) -> str:
    found = record.evidence.get("compilations", {}).get("value")
    if not found:
        return ""
    words = f"{found['graphs']} graphs, of them {found['recompilations']} recompilations"
    if "seconds" not in found:
        return words
    return f"{words}, in {human_seconds(found['seconds'])}; not in step time"


def _timeline_line(record: RunRecord) -> str:
    found = record.evidence.get("timeline", {}).get("value")
    if not found:
        return ""
    return (
        f"device busy {found['busy_share']:.0%} · idle before the first kernel "
        f"{human_seconds(found['idle_before_first_s'])} · gaps {found['gap_share']:.0%} · tail "
        f"{human_seconds(found['tail_s'])} · trace in artifacts/ (over 2 untimed, profiled updates)"
    )


def _update_line(record: RunRecord) -> str:
    summary = record.summary
    if "updates_applied" not in summary:
        return ""
    return (
        f"{summary['updates_applied']:.0f} applied of {summary['updates_attempted']:.0f} attempted"
        f" · {summary['updates_skipped']:.0f} skipped"
    )
