"""Tests for ../runner/report.py, ../runner/reporting and ../runner/compare.py, the command."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from runner import compare as command
from runner import report
from runner.comparison.judge import compare
from runner.comparison.results import Comparison
from runner.comparison.runs import ComparedRun
from runner.comparison.stored import of_tracked
from runner.contracts import UserError
from runner.forwarding.client import Run
from runner.readback import TrackedRun
from runner.records import NumericsRecord, RunRecord, dumps
from runner.reporting import canvas, cost_plots
from runner.reporting.marks import LONGEST, shortened
from runner.reporting.page import page
from runner.reporting.texts import comma_separated, markdown
from runner.reporting.theme import STYLE
from tests.compared import BF16, evaluation, run, update

ROOT = Path(__file__).resolve().parent.parent
BASE = (3.0, 3.1, 2.9)


def sweep(step: float = 0.05, **changes: Any) -> list[ComparedRun]:
    """fp32 and a passing bf16 at half the step time and 60 % of the memory; 3 seeds."""
    runs = [run("precision=fp32", seed, loss) for seed, loss in enumerate(BASE)]
    for seed, loss in enumerate(BASE):
        found = run(
            "precision=bf16",
            seed,
            loss + 0.001 * seed,
            step=step * (1 + 0.001 * seed),
            peak=0.6e9,
            config=BF16,
            **changes,
        )
        runs.append(found)
    return runs


def diverging() -> list[ComparedRun]:
    return [
        *sweep(),
        *(
            run(
                "precision=fp8",
                seed,
                None,
                status="diverged",
                message="loss not finite",
                config={"precision": {**BF16["precision"], "dtype": "fp8"}},
            )
            for seed in range(3)
        ),
    ]


@pytest.fixture(scope="module")
def plain() -> str:
    """The page of a baseline and a setup that passed."""
    return page(compare(sweep()))


@pytest.fixture(scope="module")
def full() -> str:
    """The page of a baseline, one that passed and one that diverged."""
    return page(compare(diverging()))


# --- terminal ---------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [100, 120, 140])
def test_lines_keep_to_the_width_and_break_no_command(width: int) -> None:
    long = " ".join(f"key{n}={'x' * 12}" for n in range(12))
    runs = [
        run(f"precision=fp32 {long}", 0, 3.0),
        run(f"precision=bf16 {long}", 0, 3.0, config=BF16),
    ]
    words = ("python", "-m", "runner", "-m", "precision=fp32,bf16", *long.split())
    runs = [replace(r, record=replace(r.record, command=words)) for r in runs]
    found = report.lines(compare(runs), width)
    (typed,) = [line for line in found if "python -m runner" in line]
    assert typed.strip().endswith("seed=1,2") and long.split()[-1] in typed
    assert all(len(line) <= width for line in found if line is not typed)


def test_a_rate_stands_with_batch_length_quality_and_its_interval() -> None:
    found = "\n".join(report.lines(compare(sweep())))
    assert "every rate: global batch 8 = 1 × 8 · length 32" in found
    (row,) = re.findall(r"^precision=bf16 +passed +[\d,]+ .*10%$", found, re.MULTILINE)
    # 100 tokens in 0.05, 0.05005 and 0.0501 s: median 1,998; ratio 2 / 1.001 = 1.998.
    assert "1,998 " in row and "1.998× (" in row


def test_conditions_that_differ_get_a_column_of_their_own() -> None:
    runs = [
        *(run("accum=1", seed, loss) for seed, loss in enumerate(BASE)),
        *(
            run("accum=2", seed, loss, config={"accum": 2}, sizes={"micro_batch": 4})
            for seed, loss in enumerate(BASE)
        ),
    ]
    found = "\n".join(report.lines(compare(runs)))
    assert "8 = 1 × 8" in found and "8 = 2 × 4" in found
    assert "every rate: length 32" in found


def test_every_setup_has_its_verdict_and_reason_in_words() -> None:
    found = report.lines(compare(diverging()))
    assert "precision=fp8: diverged — seeds 0, 1, 2: loss not finite" in found
    assert any(line.startswith("precision=bf16: passed — d = +0.0010 nats") for line in found)
    assert "note: Times are of a CPU: they say nothing about a GPU." in found


def test_an_unknown_figure_is_a_dash_and_never_zero() -> None:
    runs = [run("precision=fp32", 0, None, status="error", message="it broke")]
    found = "\n".join(report.lines(compare(runs)))
    assert re.search(r"^precision=fp32 +baseline +0 of 1 +– +– +–$", found, re.MULTILINE)


# --- files ------------------------------------------------------------------------------------


def test_all_four_files_are_written_and_the_json_is_strict(tmp_path: Path) -> None:
    written = report.write(compare(diverging()), tmp_path / "out")
    names = ["comparison.md", "comparison.csv", "comparison.json", "report.html"]
    assert [path.name for path in written] == names
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(names)

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    found = json.loads((tmp_path / "out/comparison.json").read_text(), parse_constant=refuse)
    assert [c["verdict"]["word"] for c in found["contrasts"]] == ["passed", "diverged"]


def test_csv_has_plain_numbers_and_leaves_unknown_empty() -> None:
    rows = list(csv.DictReader(io.StringIO(comma_separated(compare(diverging())))))
    fp32, bf16, fp8 = rows
    assert fp32["quality"] == "baseline" and fp32["difference_nats"] == ""
    assert float(fp32["eval_loss"]) == pytest.approx(3.0)
    assert float(bf16["difference_nats"]) == pytest.approx(0.001)
    assert float(bf16["step_s_median"]) == pytest.approx(0.05 * 1.001)
    assert float(bf16["peak_allocated_bytes_ratio_value"]) == pytest.approx(0.6)
    assert bf16["peak_allocated_bytes_ratio_outcome"] == "win"
    assert bf16["seeds"] == "0 1 2"
    assert (fp8["eval_loss"], fp8["step_s_median"], fp8["seeds"]) == ("", "", "")
    assert fp8["quality"] == "diverged"


def test_markdown_tables_survive_a_bar_in_a_name() -> None:
    runs = [run("a=x|y", 0, 3.0), run("a=z", 0, 3.0, config=BF16)]
    text = markdown(compare(runs))
    rows = [line for line in text.splitlines() if line.startswith("| a=x")]
    assert rows and all("a=x\\|y" in row for row in rows)


# --- page -------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """Names, attributes and text of a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, Mapping[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def plots_of(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def words_of(svg: ElementTree.Element) -> list[str]:
    return [node.text or "" for node in svg.iter() if node.tag.endswith("}text")]


def plot(text: str, label: str) -> ElementTree.Element:
    (found,) = [svg for svg in plots_of(text) if label in svg.get("aria-label", "")]
    return found


def test_the_page_needs_nothing_from_elsewhere(full: str) -> None:
    elements = Elements(full)
    tags = {tag for tag, _ in elements.found}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base"}
    for _, attributes in elements.found:
        assert not {"src", "srcset", "action", "onclick", "onload"} & set(attributes)
        for name in ("href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "@import" not in full
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", full))


def test_every_colour_of_a_plot_is_one_that_the_page_defines(full: str) -> None:
    assert len(plots_of(full)) == 9
    assert "#fe01" not in full
    used = set(re.findall(r"var\(--(\w+)\)", full))
    light, dark = STYLE.split("prefers-color-scheme: dark")
    assert used <= set(re.findall(r"--(\w+):", light))
    parts = {f"p{n}" for n in range(7)}
    assert used - parts <= set(re.findall(r"--(\w+):", dark))


def test_names_from_a_run_are_text_and_never_markup() -> None:
    hostile = "a=<script>alert(1)</script>&$x_1$"
    runs = [run("a=1", 0, 3.0), run(hostile, 0, 3.0, config=BF16)]
    text = page(compare(runs))
    elements = Elements(text)
    assert "script" not in {tag for tag, _ in elements.found}
    assert hostile in "".join(elements.words)
    drawn = "".join("".join(words_of(svg)) for svg in plots_of(text))
    assert "$x_1$" in drawn


def test_figures_of_a_cpu_are_called_so_and_those_of_a_gpu_are_not(plain: str) -> None:
    assert "CPU figures" in plain
    gpu = {"packages": {"torch": "2.13.0"}, "device": {"type": "cuda", "name": "Test GPU"}}
    runs = [replace(r, record=replace(r.record, environment=gpu)) for r in sweep()]
    text = page(compare(runs))
    assert "GPU: Test GPU" in text and "CPU" not in text


def test_an_emulated_setup_is_in_no_plot_of_time() -> None:
    runs = sweep()
    for place in (3, 4, 5):
        record = runs[place].record
        config = {**record.config, "emulate": True}
        runs[place] = replace(runs[place], record=replace(record, config=config))
    text = page(compare(runs))
    assert "emulated: no time" in text
    for label in ("Phases", "tokens per second by setup"):
        assert not any("bf16" in word for word in words_of(plot(text, label)))
    assert any("bf16" in word for word in words_of(plot(text, "Memory at the peak")))
    assert not any("against peak memory" in svg.get("aria-label", "") for svg in plots_of(text))


def test_bars_state_their_totals_and_the_shares_of_their_parts(plain: str) -> None:
    memory = words_of(plot(plain, "Memory at the peak"))
    # 0.6e9 bytes are 572.2 MiB, a quarter of them parameters.
    assert "572.2 MiB" in memory and "953.7 MiB" in memory
    assert memory.count("25%") == 2 and memory.count("75%") == 2
    rates = words_of(plot(plain, "Useful, non-pad"))
    assert "1,000" in rates and "1,998" in rates
    assert "precision=bf16 · passed" in rates


def test_the_margin_is_drawn_where_quality_is_shown(plain: str) -> None:
    found = words_of(plot(plain, "Held-out differences"))
    assert "margin 0.01" in found and "precision=bf16 · passed" in found


def test_verdicts_stand_on_the_page_with_the_commands_that_settle_them() -> None:
    runs = [run("precision=fp32", 0, 3.0), run("precision=bf16", 0, 3.0, config=BF16)]
    text = "".join(Elements(page(compare(runs))).words)
    assert "python -m runner -m precision=fp32,bf16 batch=8 seed=1,2" in text
    assert "one seed has no spread" in text


def test_the_gradient_probe_stands_on_the_page_where_there_is_one() -> None:
    figures = {"relative_error": 0.0123, "cosine": 0.99991, "norm_ratio": 0.5}
    found = {
        "gradient": figures,
        "output": {**figures, "relative_error": 0.002},
        "groups": {"head": figures, "block 1 mlp": {**figures, "relative_error": None}},
        "worst": "block 1 mlp",
    }
    text = page(compare(sweep(numerics={"gradient_probe": found})))
    assert "Gradients against FP32" in text
    for words in ("1.23%", "0.99991", "0.5000", "block 1 mlp not finite", "0.20%"):
        assert words in text
    assert "Gradients against FP32" not in page(compare(sweep()))


# --- examples that were cut or left out -------------------------------------------------------


def stated(truncated: int, dropped: Mapping[str, int], train: int | None = 1200) -> dict[str, Any]:
    """What a record says of its corpus."""
    return {
        "examples_train": train,
        "examples_eval": 64,
        "examples_truncated": truncated,
        "examples_dropped": dict(dropped),
    }


def cutting() -> list[ComparedRun]:
    """Two setups on one prepared corpus, and a stream that each seed read differently."""
    prepared = stated(7, {"empty": 2, "null": 1})
    streamed = [stated(3, {}, None), stated(5, {"empty": 4}, None)]
    config = {"precision": {**BF16["precision"], "dtype": "fp8"}}
    return [
        run("precision=fp32", 0, 3.0, sizes=prepared),
        run("precision=bf16", 0, 3.0, sizes=prepared, config=BF16),
        *(
            run("precision=fp8", seed, 3.0, sizes=sizes, config=config)
            for seed, sizes in enumerate(streamed)
        ),
    ]


def from_folders(runs: Sequence[ComparedRun], folder: Path) -> list[ComparedRun]:
    for place, found in enumerate(runs):
        write_run(found, folder / str(place))
    return command.runs_of({"folder": str(folder)}, folder)


def from_store(runs: Sequence[ComparedRun], folder: Path) -> list[ComparedRun]:
    """The runs as a tracking store hands them back."""
    back = []
    for found in from_folders(runs, folder):
        tags = {"setup": found.setup}
        kept = Run(run_id=found.run_id, name="", status="", tags=tags, params={}, artifacts="")
        back.append(of_tracked(TrackedRun(run=kept, record=found.record, journal=found.journal)))
    return back


@pytest.mark.parametrize("source", [from_folders, from_store])
def test_what_was_cut_or_left_out_stands_in_the_report_by_setup_and_reason(
    source: Callable[[Sequence[ComparedRun], Path], list[ComparedRun]], tmp_path: Path
) -> None:
    found = compare(source(cutting(), tmp_path))
    rows = [
        ["precision=fp32", "1,200 · 64 held out", "7", "empty 2, null 1"],
        ["precision=bf16", "1,200 · 64 held out", "7", "empty 2, null 1"],
        # One seed read 3 and the other 5; one of them met no empty row.
        ["precision=fp8", "a stream · 64 held out", "3–5", "empty 0–4"],
    ]
    section = page(found).partition("<h2>Data</h2>")[2].partition("</section>")[0]
    cells = re.findall(r"<td>(.*?)</td>", section)
    assert [cells[at : at + 4] for at in (0, 4, 8)] == rows and len(cells) == 12
    text = markdown(found).partition("## Data")[2].partition("##")[0]
    assert [line for line in text.splitlines() if line.startswith("| precision")] == [
        f"| {' | '.join(row)} |" for row in rows
    ]
    assert "No example was cut" not in markdown(found)


def test_setups_on_one_corpus_share_one_row(tmp_path: Path) -> None:
    text = "\n".join(report.lines(compare(from_folders(cutting()[:2], tmp_path))))
    assert re.search(r"^all 2 +1,200 · 64 held out +7 +empty 2, null 1$", text, re.MULTILINE)


def test_where_nothing_was_cut_or_left_out_one_line_says_so_and_where_unknown_none() -> None:
    words = "No example was cut to seq_len or left out."
    whole = [run(f"precision={name}", 0, 3.0, sizes=stated(0, {})) for name in ("fp32", "bf16")]
    for text in (page(compare(whole)), markdown(compare(whole))):
        assert text.count(words) == 1 and ">Data<" not in text and "## Data" not in text
    half = [whole[0], run("precision=bf16", 0, 3.0)]  # a record of an earlier program
    for text in (page(compare(half)), markdown(compare(half))):
        assert words not in text and ">Data<" not in text and "## Data" not in text


def test_a_page_without_a_baseline_still_says_what_ran() -> None:
    comparison = compare(sweep(), axes={"precision": ["fp8", "fp32", "bf16"]})
    text = "".join(Elements(page(comparison)).words)
    assert "a baseline that has no run" in text and "unchecked" in text


def test_a_crowd_of_setups_is_cut_in_the_plots_with_a_word_and_whole_in_the_table() -> None:
    runs = [
        run(f"p=n{n}", 0, 3.0, config={"precision": {**BF16["precision"], "dtype": f"d{n}"}})
        for n in range(20)
    ]
    text = page(compare(runs))
    words = "".join(Elements(text).words)
    assert "Plots show 16 of 20 setups" in words
    assert words.count("p=n19") >= 2
    drawn = words_of(plot(text, "Memory at the peak"))
    assert sum(word.startswith("p=n") for word in drawn) == 16


# --- geometry ---------------------------------------------------------------------------------


def test_the_front_holds_what_nothing_else_beats_in_both() -> None:
    points = {
        "base": (100.0, 10.0),
        "faster": (200.0, 10.0),
        "smaller": (90.0, 4.0),
        "worse": (80.0, 5.0),
        "both": (150.0, 7.0),
    }
    assert cost_plots.pareto(points) == ["smaller", "both", "faster"]


def test_equal_points_are_both_on_the_front() -> None:
    assert cost_plots.pareto({"a": (1.0, 1.0), "b": (1.0, 1.0)}) == ["a", "b"]


def test_labels_that_collide_move_apart_around_their_middle() -> None:
    assert canvas.spread([5.0, 0.0, 5.0], 2.0) == [4.0, 0.0, 6.0]
    assert canvas.spread([1.0, 2.0, 3.0], 1.0) == [1.0, 2.0, 3.0]
    assert canvas.spread([0.0, 0.0], 2.0, low=0.0, high=9.0) == [0.0, 2.0]
    assert canvas.spread([9.0, 9.0], 2.0, low=0.0, high=9.0) == [7.0, 9.0]


def test_a_long_name_keeps_both_ends() -> None:
    name = "memory.checkpointing=full precision=bf16 accum=16"
    found = shortened(name)
    assert len(found) == LONGEST
    assert name.startswith(found.partition("…")[0]) and name.endswith(found.partition("…")[2])


# --- a sweep that just ended ------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    setup: str
    swept: Mapping[str, str]
    config: Mapping[str, Any]
    folder: Path


@dataclass(frozen=True)
class Result:
    plan: Plan
    status: str
    message: str
    record: RunRecord | None
    run_id: str | None


def result_of(found: ComparedRun, launch: Path) -> Result:
    """The result of a made-up run, whose journal lies in its folder."""
    folder = Path(found.run_id.replace("=", "_").replace(" ", "_"))
    write_run(found, launch / folder)
    record = found.record
    plan = Plan(found.setup, found.swept, record.config, folder)
    return Result(plan, record.status, record.message, record, f"id-{found.run_id}")


def write_run(found: ComparedRun, folder: Path) -> None:
    """The folder of a run: record with its job, and journal."""
    folder.mkdir(parents=True)
    job = {"setup": found.setup, "swept": dict(found.swept), "axes": dict(found.axes)}
    replace(found.record, job=job).write(folder)
    lines = [dumps(line.to_json()) for line in found.journal]
    (folder / "journal.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_a_sweep_is_compared_at_its_end_and_every_run_gets_its_quality(tmp_path: Path) -> None:
    axes = {"precision": ["fp32", "bf16", "int4"], "seed": ["0", "1", "2"]}
    results = [result_of(found, tmp_path) for found in sweep()]
    config = {**results[0].plan.config, "precision": {**BF16["precision"], "dtype": "int4"}}
    plan = Plan("precision=int4", {"precision": "int4", "seed": "0"}, config, Path("none"))
    results.append(Result(plan, "unsupported", "needs a GPU", None, None))
    found = command.compare_sweep(results, launch=tmp_path, axes=axes)
    words = {c.setup: c.verdict.word for c in found.contrasts}
    assert words == {"precision=bf16": "passed", "precision=int4": "error"}
    assert found.contrasts[1].verdict.reason == "not supported here: needs a GPU (seed 0)"
    assert found.setups[1].train is not None and found.setups[1].train.update == [4]
    quality = command.qualities(found)
    assert quality["id-precision=fp32/0"] == "baseline"
    assert quality["id-precision=bf16/2"] == "passed"


def test_a_run_of_the_baseline_that_did_not_end_well_says_so() -> None:
    runs = sweep()
    runs[1] = run("precision=fp32", 1, None, status="diverged", message="loss not finite")
    runs[2] = run("precision=fp32", 2, None, status="oom", message="too big")
    quality = command.qualities(compare(runs))
    assert [quality[f"precision=fp32/{seed}"] for seed in range(3)] == [
        "baseline",
        "diverged",
        "error",
    ]
    assert quality["precision=bf16/0"] == "unknown"


# --- the command ------------------------------------------------------------------------------


def wrong(*words: str) -> dict[str, str]:
    """The keys of the faults of a command, with what was given."""
    with pytest.raises(UserError) as caught:
        options = command.parse(words)
        command.rule_of(options)
    return {fault.key: fault.given for fault in caught.value.faults}


def test_options_are_split_on_their_first_equals_sign() -> None:
    found = command.parse(["baseline=precision=fp32 accum=1", "uri=sqlite:///a=b.db"])
    assert found == {"baseline": "precision=fp32 accum=1", "uri": "sqlite:///a=b.db"}


def test_wrong_options_are_refused_by_name() -> None:
    assert wrong("swep=latest", "latest") == {"swep": "swep=latest", "latest": "latest"}
    assert wrong("folder=runs", "sweep=latest") == {"folder": "folder=runs"}
    assert wrong("sweep=a", "runs=b") == {"runs": "runs=b"}
    assert wrong("quality.margin=wide") == {"quality.margin": "wide"}
    assert wrong("quality.margin=nan") == {"quality.margin": "nan"}
    assert wrong("quality.confidence=1") == {"quality.confidence": "1"}


def test_folders_are_compared_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, found in enumerate(sweep()):
        write_run(found, tmp_path / "runs" / "a sweep" / str(place))
    monkeypatch.chdir(tmp_path)
    assert command.main(["folder=runs", "baseline=precision=bf16", "out=here"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("comparison against precision=bf16\n")
    assert "wrote here/report.html" in out
    found = json.loads((tmp_path / "here/comparison.json").read_text())
    assert found["contrasts"][0]["difference"]["mean"] == pytest.approx(-0.001)
    assert command.main(["folder=runs", "quality.margin=0.0001", "out=there"]) == 0
    strict = json.loads((tmp_path / "there/comparison.json").read_text())
    assert strict["quality"] == {"margin": 0.0001, "confidence": 0.95, "min_effect": 0.01}
    assert strict["contrasts"][0]["verdict"]["word"] == "unknown"


def test_a_wrong_command_exits_with_two_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(["folder=absent"]) == 2
    assert "absent" in capsys.readouterr().err
    for place, found in enumerate(sweep()):
        write_run(found, tmp_path / "runs" / str(place))
    assert command.main(["folder=runs", "baseline=precision=fp64"]) == 2
    error = capsys.readouterr().err
    assert "baseline: given precision=fp64; allowed: precision=fp32; precision=bf16" in error
    assert not (tmp_path / "comparison").exists()
    assert command.main(["--help"]) == 0
    assert "folder" in capsys.readouterr().out


DAMAGE = {
    "record.json": lambda text: text[: len(text) // 2],
    "journal.jsonl": lambda text: text.replace('"loss"', "", 1),
}


def test_damaged_run_folders_are_named_all_together_and_none_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for place, found in enumerate(sweep()):
        write_run(found, tmp_path / "runs" / str(place))
    for place, (name, harm) in enumerate(DAMAGE.items()):
        path = tmp_path / "runs" / str(place) / name
        path.write_text(harm(path.read_text()))
    path = tmp_path / "runs" / "2" / "journal.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]) + '{"upd')
    (tmp_path / "runs" / "half").mkdir()
    (tmp_path / "runs" / "half" / "job.yaml").write_text("config: {seed: ")
    assert command.main(["folder=runs"]) == 2
    error = capsys.readouterr().err
    assert "error: 4 mistakes" in error
    for name in (
        "0/record.json: JSONDecodeError",
        "1/journal.jsonl: line 1",
        "2/journal.jsonl: it has 3 of the 4 updates that record.json counts",
        "half/job.yaml: ",
    ):
        assert f"folder: given runs/{name}" in error
    assert not (tmp_path / "comparison").exists()


def test_a_comparison_that_cannot_be_written_is_shown_and_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for place, found in enumerate(sweep()):
        write_run(found, tmp_path / "runs" / str(place))
    (tmp_path / "taken").write_text("")
    assert command.main(["folder=runs", "out=taken/here"]) == 2
    out, error = capsys.readouterr()
    assert out.startswith("comparison against precision=fp32\n")
    assert "out: given taken/here: Not a directory; allowed: a folder that can" in error


def test_a_run_folder_of_a_killed_run_counts_nowhere_and_is_named(tmp_path: Path) -> None:
    for place, found in enumerate(sweep()):
        write_run(found, tmp_path / str(place))
    (tmp_path / "5" / "record.json").unlink()
    config = json.dumps(sweep()[5].record.config)
    ticket = f"setup: precision=bf16\nswept: {{seed: '2', precision: bf16}}\nconfig: {config}\n"
    (tmp_path / "5" / "job.yaml").write_text(ticket)
    comparison = compare(command.runs_of({"folder": str(tmp_path)}, tmp_path))
    assert [len(setup.runs) for setup in comparison.setups] == [3, 3]
    assert comparison.contrasts[0].difference is not None
    assert comparison.contrasts[0].difference.count == 2
    assert any("seed 2 did not finish" in note for note in comparison.notes)


@pytest.mark.slow
def test_a_sweep_is_compared_from_its_store_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow.tracking.client import MlflowClient

    monkeypatch.chdir(tmp_path)
    client = MlflowClient("sqlite:///mlflow.db")
    where = client.create_experiment("runner", f"file://{tmp_path}/artifacts")
    ids = []
    looks = [
        NumericsRecord(update=2, values={"gradient_error": 0.25, "inputs_error/a": 0.5}),
        NumericsRecord(update=4, values={"gradient_error": math.nan}),
    ]
    for place, found in enumerate(sweep(journal=[*sweep()[3].journal, *looks])):
        write_run(found, tmp_path / "gone" / str(place))
        tags = {"sweep_id": "one", "setup": found.setup}
        run_id = client.create_run(where, tags=tags).info.run_id
        client.log_artifacts(run_id, str(tmp_path / "gone" / str(place)))
        client.set_terminated(run_id)
        ids.append(run_id)
    here = compare(command.runs_of({"folder": "gone"}, tmp_path))
    shutil.rmtree(tmp_path / "gone")
    assert command.main([]) == 0
    stored = json.loads((tmp_path / "comparison/comparison.json").read_text())["setups"]
    assert [row["looks"] for row in stored] == json.loads(
        json.dumps([asdict(row)["looks"] for row in here.setups])
    )
    assert (
        stored[0]["looks"] is None and stored[1]["looks"]["worst"]["inputs_error"]["error"] == 0.5
    )
    captured = capsys.readouterr()
    assert "precision=bf16: passed" in captured.out and "Downloading" not in captured.err
    assert command.main([f"runs={ids[3]},{ids[0]}"]) == 0
    assert capsys.readouterr().out.startswith("comparison against precision=bf16\n")
    assert command.main(["runs=nothing"]) == 2
    assert "runs: given nothing" in capsys.readouterr().err
    assert command.main(["experiment=absent"]) == 2


@pytest.mark.slow
def test_two_hundred_runs_of_a_thousand_updates_are_compared_in_ten_seconds(
    tmp_path: Path,
) -> None:
    lines = [evaluation(0, 5.0), *(update(n, loss=5 - n / 500) for n in range(1, 1001))]
    for number in range(200):
        option, seed = divmod(number, 4)
        config = {"precision": {**BF16["precision"], "dtype": f"d{option}"}}
        found = run(f"p={option}", seed, 3 + seed / 10, config=config, journal=lines)
        write_run(found, tmp_path / "runs" / str(number))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "runner.compare", f"folder={tmp_path}/runs", f"out={tmp_path}/out"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Time of the processor: another test beside this one lengthens only the clock on the wall.
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert len(json.loads((tmp_path / "out/comparison.json").read_text())["setups"]) == 50
    assert "p=49: passed" in done.stdout
    assert used < 10, f"{used:.1f} s of processor time"


# --- in a browser -----------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium")
PROBE = """<script>
const plots = [...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect());
document.title = JSON.stringify({
  wide: document.documentElement.scrollWidth, plots: plots.length,
  small: plots.filter(p => p.width < 300 || p.height < 60).length,
  out: [...document.querySelectorAll('figure')].filter(
    f => f.scrollWidth > f.clientWidth + 1).length,
  ink: getComputedStyle(document.querySelector('svg text')).fill});
</script>"""


def rendered(comparison: Comparison, folder: Path, width: int) -> dict[str, Any]:
    """What a headless browser measures on the page."""
    path = folder / f"page{width}.html"
    path.write_text(page(comparison) + PROBE, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += [f"--user-data-dir={folder}/profile{width}", f"--window-size={width},2400"]
    assert CHROMIUM is not None, "this test needs Debian's chromium"
    done = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", f"file://{path}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert found is not None
    measured: dict[str, Any] = json.loads(found.group(1))
    return measured


@pytest.mark.slow
@pytest.mark.browser
def test_a_browser_shows_every_plot_within_the_window(tmp_path: Path) -> None:
    values = {"gradient_error": 0.25, "lost_share": 0.5, "underflow_share": 0.125}
    looks = [NumericsRecord(update=n, values=values) for n in (2, 4)]
    runs = [replace(r, journal=[*r.journal, *looks]) for r in diverging()]
    for width in (1000, 1400):
        found = rendered(compare(runs), tmp_path, width)
        assert found["plots"] == 9 + 3
        assert found["small"] == 0 and found["out"] == 0
        assert found["wide"] <= width
        assert found["ink"].startswith("rgb(")
