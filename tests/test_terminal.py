"""Tests of runner/terminal.py: what a person reads."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.contracts import Fault
from runner.forwarding.runs import is_timed
from runner.numerics import summed_up
from runner.records import EvaluationRecord, NumericsRecord, dumps
from runner.terminal import Progress, human_bytes, human_seconds, print_faults, summary_lines
from tests.test_accounting import update
from tests.test_records import record

SIZES = {
    "global_batch": 16,
    "micro_batch": 4,
    "params": 150272,
    "step_s": {"median": 0.05, "p95": 0.2, "spread": 0.123, "count": 75.0},
    "updates_timed": 75,
    "phase_shares": {
        "data": 0.01,
        "transfer": 0.0,
        "forward": 0.3,
        "backward": 0.6,
        "optimizer": 0.08,
        "other": 0.01,
    },
    "padding_share": 0.35,
}
WHOLE = record(
    config={"seq_len": 256, "warmup": 5, "batch": 16},
    sizes=SIZES,
    environment={"device": {"type": "cpu", "name": "Chip"}},
    summary={
        "useful_tokens_per_s": 1000.0,
        "nonpad_tokens_per_s": 1500.0,
        "slots_tokens_per_s": 3000.0,
        "peak_allocated_bytes": 3 * 2**20,
        "train_loss": 2.5,
        "updates_applied": 7,
        "updates_attempted": 8,
        "updates_skipped": 1,
    },
    memory={"largest_live_object": "logits"},
    evaluation={"before": 5.0, "last": 2.0, "unigram_entropy": 3.2},
    diagnosis=[
        {"stage": "tail", "figure": "f", "symptom": "", "evidence": "", "advice": ""},
        {
            "stage": "update",
            "figure": "f",
            "symptom": "skips",
            "evidence": "1 skipped",
            "advice": "look",
        },
    ],
)


def lines_of(**changes: Any) -> dict[str, str]:
    lines = summary_lines(replace(WHOLE, **changes), title="a setup", folder=Path("/runs/1"))
    assert lines[0].startswith("a setup: ")
    return {line[2:13].strip(): line[13:] for line in lines[1:]}


def test_the_summary_says_everything_at_a_glance() -> None:
    lines = lines_of()
    assert lines["device"].startswith("CPU: Chip · batch 16 = 4 x 4 · seq_len 256")
    assert lines["step time"].startswith("median 50.0 ms · p95 200.0 ms · spread 12%")
    assert "over 75 updates after warm-up" in lines["step time"]
    assert "backward 60.0%" in lines["phases"]
    assert lines["tokens/s"] == "useful 1,000 · non-pad 1,500 · slots 3,000 · padding 35% of slots"
    assert lines["memory"] == "peak 3.0 MiB · largest live object: logits"
    assert "train 2.5000 (last 7 updates)" in lines["loss"]
    assert "held-out 5.0000 -> 2.0000 nats" in lines["loss"]
    assert lines["updates"] == "7 applied of 8 attempted · 1 skipped"
    assert lines["look next"] == "update: skips: 1 skipped; look"


@pytest.mark.parametrize(
    ("last_update", "words"),
    [
        (7, "held-out 5.0000 -> 2.0000 nats ·"),
        (4, "held-out 5.0000 -> 2.0000 nats after update 4 ·"),
        (0, "held-out 5.0000 nats before training, not evaluated again ·"),
    ],
)
def test_a_held_out_loss_of_earlier_weights_is_not_shown_as_the_last(
    last_update: int, words: str
) -> None:
    assert words in lines_of(evaluation={**WHOLE.evaluation, "last_update": last_update})["loss"]


def test_what_is_unknown_is_left_out_or_said_never_zero() -> None:
    lines = lines_of(summary={}, sizes={**SIZES, "step_s": None}, evaluation={}, memory={})
    assert "tokens/s" not in lines
    assert "memory" not in lines
    assert "loss" not in lines
    assert lines["step time"] == "unknown: no update came after the 5 of warm-up"


ALLOCATOR = {
    "peak_allocated_bytes": 3 * 2**20,
    "peak_reserved_bytes": 8 * 2**20,
    "unfilled_bytes": 2 * 2**20,
    "unfilled_share": 0.25,
    "peak_inactive_split_bytes": 2**20,
    "retries": 0,
    "ooms": 0,
}
EXCEEDED = {
    "updates": 3,
    "of": 40,
    "largest_bytes": 2**20,
    "largest_share": 0.125,
    "explained": True,
    "allowed": 0.03,
}


def test_what_the_allocator_holds_and_who_else_holds_memory_is_one_line() -> None:
    line = lines_of(memory={"allocator": ALLOCATOR})["allocator"]
    assert line == (
        "reserved 8.0 MiB, at the peak 2.0 MiB of it unfilled (25%) · free but split 1.0 MiB"
    )
    uncounted = {**ALLOCATOR, "peak_inactive_split_bytes": None, "retries": None}
    line = lines_of(memory={"allocator": uncounted})["allocator"]
    assert line == "reserved 8.0 MiB, at the peak 2.0 MiB of it unfilled (25%)"
    after = {"others": {"8": 2**20, "9": 2**20}, "others_bytes": 2**21}
    busy = {"allocator": {**ALLOCATOR, "retries": 4}, "device": {"after": after}}
    assert lines_of(memory=busy)["allocator"].endswith("4 retries · 2 other processes hold 2.0 MiB")
    busy["device"]["after"] = {"others": {"8": None}, "others_bytes": None}
    assert lines_of(memory=busy)["allocator"].endswith("hold an unknown amount")


def test_updates_that_the_account_does_not_cover_are_said() -> None:
    assert "account" not in lines_of(memory={"account_exceeded": {**EXCEEDED, "updates": 0}})
    some = lines_of(memory={"account_exceeded": EXCEEDED})["account"]
    assert some == (
        "3 of 40 updates were over it by more than 3%, by 1.0 MiB (12.5%) at most; they are named "
        "in the journal"
    )
    slack = {"account_exceeded": EXCEEDED, "allocator": {**ALLOCATOR, "slack_bytes": 2**19}}
    words = "at most (the allocator's blocks exceed what was asked for by 512.0 KiB); they are"
    assert words in lines_of(memory=slack)["account"]
    every = {**EXCEEDED, "updates": 40, "explained": False}
    assert lines_of(memory={"account_exceeded": every})["account"] == (
        "does not explain the peak: every update was over it, by 1.0 MiB (12.5%) at most"
    )


def test_a_run_without_an_account_says_why() -> None:
    why = {"not_accounted": "compiled code has none"}
    assert lines_of(memory=why, summary={})["memory"] == "compiled code has none"
    assert lines_of(memory=why)["memory"] == "peak 3.0 MiB · compiled code has none"


def test_what_was_cut_or_left_out_is_said_and_nothing_where_nothing_was() -> None:
    kept = {"examples_train": 1200, "examples_eval": 60}
    lost = {"examples_truncated": 1234, "examples_dropped": {"null": 2, "broken": 1}}
    assert "data" not in lines_of(sizes={**SIZES, **kept})
    assert lines_of(sizes={**SIZES, **kept, **lost})["data"] == (
        "1,200 examples · 60 held out · 1,234 cut to seq_len · left out: null 2, broken 1"
    )
    stream = {**kept, "examples_train": None, "examples_dropped": {"null": 2}}
    assert lines_of(sizes={**SIZES, **stream})["data"] == (
        "a stream · 60 held out · left out: null 2"
    )


def test_the_worst_of_the_looks_is_a_line_and_what_was_not_finite_is_said() -> None:
    looks = [
        NumericsRecord(update=5, values={"gradient_error": 0.0125, "lost_share": 0.25}),
        NumericsRecord(update=10, values={"gradient_error": 0.01, "lost_share": 0.375}),
    ]
    assert lines_of(numerics={"looks": summed_up(looks)})["numerics"] == (
        "2 looks · gradient error up to 1.25e-02 (update 5) · "
        "updates rounded away up to 37.5% (update 10)"
    )
    none = [NumericsRecord(update=5, values={"gradient_error": 0.0, "lost_share": 0.0})]
    line = lines_of(numerics={"looks": summed_up(none)})["numerics"]
    assert line == "1 look · no gradient error · no updates rounded away"
    odd = [*looks, NumericsRecord(update=15, values={"gradient_error": math.nan})]
    line = lines_of(numerics={"looks": summed_up(odd)})["numerics"]
    assert "gradient error not finite in 1 of 3 looks, first after update 15" in line
    assert "numerics" not in lines_of()


def test_a_gradient_without_figures_is_never_passed_over_for_the_worst() -> None:
    whole = {"relative_error": 0.25, "cosine": 0.875, "norm_ratio": 1.0}
    lost = {"relative_error": None, "cosine": None, "norm_ratio": None}
    found = {"gradient": whole, "groups": {"a": whole, "b": lost}, "worst": "b"}
    assert lines_of(numerics={"gradient_probe": found})["gradient"] == (
        "against FP32: error 2.50e-01 · cosine 0.87500 · norm 1.0000× · "
        "worst b not finite, or FP32's is zero"
    )
    zero = {"relative_error": 1.0, "cosine": None, "norm_ratio": 0.0}
    found = {"gradient": zero, "groups": {"a": zero}, "worst": "a"}
    line = lines_of(numerics={"gradient_probe": found})["gradient"]
    assert "error 1.00e+00 · cosine none, as it is zero · norm 0.0000×" in line


def test_a_failure_is_in_the_first_line_with_its_reason() -> None:
    failed = replace(WHOLE, status="diverged", message="loss not finite")
    assert summary_lines(failed, title="t", folder=Path())[0] == "t: diverged — loss not finite"


def test_units() -> None:
    assert human_bytes(2**30) == "1.00 GiB"
    assert human_bytes(1536) == "1.5 KiB"
    assert human_bytes(12) == "12 B"
    assert human_seconds(0.0123) == "12.3 ms"
    assert human_seconds(1.5) == "1.50 s"


def test_faults_are_listed_under_one_heading() -> None:
    out = io.StringIO()
    one = Fault(key="accum", given="3", allowed="1, 2", next_step="accum=2")
    print_faults(out, [one, one], "nothing was started")
    heading, *rest = out.getvalue().splitlines()
    assert heading == "error: 2 mistakes in the command; nothing was started"
    assert rest == ["  accum: given 3; allowed: 1, 2; next: accum=2"] * 2


def progress_of(folder: Path) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    plan: Any = SimpleNamespace(number=0, setup="precision=fp32", config={})
    return Progress(out, plan=plan, jobs=1, folder=folder), out


def test_plain_lines_cover_each_update_once_and_weigh_the_loss_by_tokens(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    progress, out = progress_of(tmp_path)
    first = [update(1, loss=2.0, useful=30), update(2, loss=4.0, useful=10)]
    journal.write_text("".join(dumps(u.to_json()) + "\n" for u in first))
    progress.show({"state": "started", "updates": 3})
    assert "update 2/3 · loss 2.5000 · step 100.0 ms · 200 useful tokens/s" in out.getvalue()
    with journal.open("a") as file:
        file.write(dumps(update(3, loss=3.0, useful=20).to_json()) + "\n")
        evaluation = EvaluationRecord(update=3, eval_loss=2.25, eval_tokens=9)
        file.write(dumps(evaluation.to_json()) + "\n")
    progress.close(replace(WHOLE, sizes={**SIZES, "updates_planned": 3}))
    last = [line for line in out.getvalue().splitlines() if "update 3/3" in line]
    assert len(last) == 1
    assert "loss 3.0000" in last[0]
    assert "held-out 2.2500" in last[0]


def test_a_nan_loss_is_printed_as_nan(tmp_path: Path) -> None:
    progress, out = progress_of(tmp_path)
    line = dumps(update(1, loss=float("nan")).to_json())
    (tmp_path / "journal.jsonl").write_text(f"{line}\n")
    progress.show({"state": "started", "updates": 3})
    assert "loss nan" in out.getvalue()


def test_an_emulated_run_is_called_so_and_shows_no_time() -> None:
    reason = "precision: X needs a CUDA device; this job runs on cpu"
    changes = {
        "sizes": {k: v for k, v in SIZES.items() if k not in ("step_s", "phase_shares")},
        "environment": {**WHOLE.environment, "emulated": True},
        "evidence": {"emulation": {"value": reason, "how": "observed"}},
        "summary": {k: v for k, v in WHOLE.summary.items() if not is_timed(k)},
        "diagnosis": [],
    }
    text = "\n".join(summary_lines(replace(WHOLE, **changes), title="t", folder=Path()))
    assert f"emulate    emulated ({reason}): judged on its quality; no time, no rate" in text
    for word in (" ms", " s ", "tokens/s", "step time", "phases", "MFU"):
        assert word not in text


def test_the_progress_of_an_emulated_run_has_a_loss_and_no_time(tmp_path: Path) -> None:
    plan = SimpleNamespace(setup="a", config={"warmup": 1}, number=0)
    out = io.StringIO()
    progress = Progress(out, plan=plan, jobs=1, folder=tmp_path)  # type: ignore
    lines = [{**update(n).to_json(), "time": None, "host": None} for n in (1, 2)]
    (tmp_path / "journal.jsonl").write_text("".join(dumps(line) + "\n" for line in lines))
    progress.show({"state": "started", "updates": 4})
    assert out.getvalue() == "a: update 2/4 · loss 1.0000\n"
