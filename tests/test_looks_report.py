"""Tests for the looks at the numerics in comparisons: ../runner/numerics.py,
../runner/comparison/looks.py, ../runner/reporting/looks_*.py."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from html.parser import HTMLParser

import pytest

from runner.comparison.judge import compare
from runner.comparison.looks import EVENLY, thinned
from runner.comparison.results import Comparison, LooksRow
from runner.comparison.runs import ComparedRun
from runner.numerics import Worst, extremes, not_finite, summed_up, worst_groups
from runner.records import JournalLine, NumericsRecord, UpdateRecord, line_of
from runner.reporting import looks_plots
from runner.reporting.looks_section import looks_section
from runner.reporting.looks_tables import TITLE
from runner.reporting.looks_words import percent
from runner.reporting.texts import comma_separated, markdown
from tests.compared import BF16, run, update

NAN = math.nan


def look(number: int, **values: float) -> NumericsRecord:
    """A look; `__` in a name stands for the `/` before a group of layers."""
    return NumericsRecord(
        update=number, values={k.replace("__", "/"): v for k, v in values.items()}
    )


# Two seeds of an FP16 recipe with rounded operands, looked at after updates 2 and 4; a third one
# that diverged after its first look. Attempt 3 of seed 0 was skipped and halved the scale.
FIRST = (
    look(2, gradient_error=0.01, gradient_cosine=0.9999, gradient_norm_ratio=0.99, lost_share=0.25,
         underflow_share=0.002, overflow_share=0.0, inputs_error=0.02, inputs_saturated_share=0.0,
         inputs_amax=8.0, inputs_error__a=0.02, inputs_error__b=0.01, loss_scale=1024.0,
         amax_error_least=-0.5, amax_error_most=44.0),
    look(4, gradient_error=0.03, gradient_cosine=0.9991, gradient_norm_ratio=1.01, lost_share=0.5,
         underflow_share=0.001, overflow_share=0.0, inputs_error=0.04, inputs_saturated_share=0.125,
         inputs_amax=16.0, inputs_error__a=0.03, inputs_error__b=0.05, loss_scale=512.0,
         amax_error_least=-0.25, amax_error_most=2.0),
)  # fmt: skip
SECOND = (
    look(2, gradient_error=0.02, lost_share=0.35, gradient_cosine=0.9997),
    look(4, gradient_error=0.05, lost_share=0.4, gradient_cosine=0.9993),
)
THIRD = (look(2, gradient_error=0.75, lost_share=0.1, gradient_cosine=0.5),)
SKIP = {"applied": False, "skipped_reason": "nonfinite_gradient"}


def attempts(*scales: float, skipped: int = 0) -> list[UpdateRecord]:
    found = []
    for number, scale in enumerate(scales, start=1):
        changes = SKIP if number == skipped else {}
        found.append(update(number, attempt=number, loss_scale=scale, **changes))
    return found


def planted(*, diverged: bool = True) -> list[ComparedRun]:
    """FP32 with looks of its own, in which nothing is off, and the recipe."""
    none = [look(n, gradient_error=0.0, gradient_cosine=1.0, lost_share=0.0) for n in (2, 4)]
    journals: dict[int, list[JournalLine]] = {
        0: [*attempts(1024, 1024, 1024, 512, skipped=3), *FIRST],
        1: [*attempts(1024, 1024, 1024, 1024), *SECOND],
    }
    found = [
        run("precision=fp32", seed, 3.0, journal=[*attempts(), update(1), *none])
        for seed in journals
    ]
    found += [
        run("precision=fp16", seed, 3.0, journal=journal, config=BF16)
        for seed, journal in journals.items()
    ]
    if diverged:
        lost = [*attempts(1024, 1024), *THIRD]
        found.append(run("precision=fp16", 2, None, status="diverged", journal=lost, config=BF16))
    return found


def looks_of(comparison: Comparison, name: str) -> LooksRow:
    (found,) = [row.looks for row in comparison.setups if row.name == f"precision={name}"]
    assert found is not None
    return found


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare(planted())


class Text(HTMLParser):
    """The words of a page, a space between elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.feed(text)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def words_of(text: str) -> str:
    return " ".join(Text(text).words)


# --- figures ----------------------------------------------------------------------------------


def test_extremes_are_of_finite_values_and_what_was_not_is_counted_with_its_first_update() -> None:
    found = extremes([(5, 0.5), (10, NAN), (15, 0.25), (20, math.inf), (25, 0.5)])
    assert (found.least, found.least_update) == (0.25, 15)
    assert (found.most, found.most_update) == (0.5, 5)  # the first of equals
    assert (found.looks, found.nonfinite, found.nonfinite_update) == (5, 2, 10)
    assert not_finite(asdict(found)) == "not finite in 2 of 5 looks, first after update 10"
    nothing = extremes([(5, NAN)])
    assert nothing.least is nothing.most is None and nothing.nonfinite == 1
    assert not_finite(asdict(extremes([(5, 1.0)]))) == ""


def test_the_worst_group_is_the_largest_of_any_look_and_no_number_is_worse_than_nan() -> None:
    assert worst_groups(FIRST) == {"inputs_error": Worst(group="b", error=0.05, update=4)}
    odd = look(3, inputs_error__a=NAN)
    assert worst_groups([*FIRST, odd])["inputs_error"] == Worst(group="a", error=None, update=3)


def test_a_figure_that_is_not_finite_is_in_the_journal_with_what_it_was() -> None:
    line = look(5, gradient_error=NAN, inputs_amax=math.inf, lost_share=0.5)
    written = json.loads(json.dumps(line.to_json(), allow_nan=False))
    assert written == {
        "update": 5,
        "numerics": {"gradient_error": None, "inputs_amax": None, "lost_share": 0.5},
        "nonfinite": {"gradient_error": "nan", "inputs_amax": "+inf"},
    }
    back = line_of(written)
    assert isinstance(back, NumericsRecord)
    assert math.isnan(back.values["gradient_error"])
    assert back.values["inputs_amax"] == math.inf and back.values["lost_share"] == 0.5
    assert "nonfinite" not in look(5, lost_share=0.5).to_json()


def test_the_record_keeps_first_last_and_extremes_of_every_figure() -> None:
    found = summed_up([*FIRST, look(6, gradient_error=NAN)])
    assert (found["count"], found["first_update"], found["last_update"]) == (3, 2, 6)
    assert found["figures"]["gradient_error"] == {
        "first": 0.01, "last": None, "looks": 3, "least": 0.01, "least_update": 2,
        "most": 0.03, "most_update": 4, "nonfinite": 1, "nonfinite_update": 6,
    }  # fmt: skip
    assert found["worst_groups"] == {"inputs_error": {"group": "b", "error": 0.05, "update": 4}}
    assert not any("/" in name for name in found["figures"])
    assert summed_up([]) == {}


# --- over seeds -------------------------------------------------------------------------------


def test_first_and_last_are_means_over_seeds_and_extremes_of_any_seed(
    comparison: Comparison,
) -> None:
    found = looks_of(comparison, "fp16")
    assert (found.seeds, found.count) == ([0, 1, 2], 2)
    assert (found.first_update, found.last_update) == (2, 4)
    error = found.figures["gradient_error"]
    assert error.first == pytest.approx((0.01 + 0.02) / 2)  # of the seeds that ended ok
    assert error.last == pytest.approx((0.03 + 0.05) / 2)
    assert error.extremes.most == 0.75 and error.extremes.looks == 5  # the diverged seed counts
    assert found.figures["gradient_cosine"].extremes.least == 0.5
    assert error.curve is not None
    assert (error.curve.low, error.curve.high) == ([0.01, 0.03], [0.02, 0.05])
    # A figure that only one seed has is its own.
    assert found.figures["underflow_share"].last == 0.001


def test_the_loss_scale_is_that_of_every_attempt_not_of_the_looks_alone(
    comparison: Comparison,
) -> None:
    found = looks_of(comparison, "fp16").loss_scale
    assert found is not None
    assert (found.first, found.last, found.lowest, found.skipped) == (1024, 512, 512, 1)
    assert looks_of(comparison, "fp32").loss_scale is None


def test_a_thousand_looks_are_thinned_to_about_fifty_with_ends_and_extremes() -> None:
    values: dict[int, float] = {5 * n: 0.1 for n in range(1, 1001)}
    values |= {1235: 0.9, 2345: 0.01, 3455: NAN}
    lines: list[JournalLine] = [update(1)]
    lines += [look(n, gradient_error=value) for n, value in values.items()]
    (row,) = compare([run("precision=bf16", 0, journal=lines)]).setups
    assert row.looks is not None and row.looks.count == 1000
    figure = row.looks.figures["gradient_error"]
    assert (figure.extremes.most, figure.extremes.most_update) == (0.9, 1235)
    assert (figure.extremes.least, figure.extremes.least_update) == (0.01, 2345)
    curve = figure.curve
    assert curve is not None and len(curve.update) <= EVENLY + 3
    assert {5, 1235, 2345, 3455, 5000} <= set(curve.update)
    assert curve.mean[curve.update.index(1235)] == 0.9
    assert curve.mean[curve.update.index(3455)] is None
    steps = [b - a for a, b in zip(curve.update, curve.update[1:], strict=False)]
    assert max(steps) <= 5 * 22  # 999 steps between 46 gaps
    assert thinned([1, 2, 3], set()) == [1, 2, 3]


# --- files ------------------------------------------------------------------------------------


def rows_of(text: str, heading: str) -> dict[str, dict[str, str]]:
    """The rows of the first Markdown table whose header begins with these columns."""
    lines = text.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith(heading))
    header = [cell.strip() for cell in lines[start].strip("|").split("|")]
    found = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[cells[0]] = dict(zip(header, cells, strict=True))
    return found


def test_the_tables_say_what_applies_and_a_dash_elsewhere(comparison: Comparison) -> None:
    text = markdown(comparison)
    assert f"## {TITLE}" in text and "seeds 0, 1, 2. first" in text
    assert "untimed, on one micro-batch" in text
    tables = [rows_of(text, f"| setup | {n} |") for n in ("looks", "updates lost", "inputs")]
    fp16 = {k: v for table in tables for k, v in table["precision=fp16"].items()}
    fp32 = {k: v for table in tables[:2] for k, v in table["precision=fp32"].items()}
    assert fp16["looks"] == "2 (updates 2 to 4; seed 0, 1, 2)"
    assert fp16["gradient error"] == "1.5% → 4% (worst 75% at update 2)"
    assert fp16["cosine"] == "0.99980 → 0.99920 (worst 0.50000 at update 2)"
    assert fp16["norm ratio"] == "0.9900 → 1.0100 (0.9900 to 1.0100)"
    assert fp16["updates lost"] == "30% → 45% (largest 50% at update 4)"
    assert fp16["loss scale"] == "1,024 → 512 (lowest 512; 1 skipped)"
    assert fp16["underflow"] == "0.2% (at update 2)" and fp16["overflow"] == "0%"
    assert fp16["predicted amax"] == "-50% to +4,400%"
    assert fp16["inputs"] == (
        "2% → 4% (worst 4% at update 4; most in b: 5%; saturated up to 12.5%; amax up to 16)"
    )
    assert fp32["gradient error"] == fp32["updates lost"] == "0% → 0%"
    assert {fp32[name] for name in ("loss scale", "underflow", "overflow")} == {"–"}
    # A column that no setup has is not there, nor a setup without rounded operands in their table.
    assert not {"output error", "weights", "gradients"} & fp16.keys()
    assert list(tables[2]) == ["precision=fp16"]
    words = words_of(looks_section(comparison))
    for cell in fp16.values():
        main, _, small = cell.rstrip(")").partition(" (")
        assert main in words and all(part in words for part in small.split("; "))


def test_without_looks_there_is_no_section_no_plot_and_no_column() -> None:
    found = compare([run("precision=fp32", 0), run("precision=bf16", 0, config=BF16)])
    assert all(row.looks is None for row in found.setups)
    assert looks_section(found) == "" and TITLE not in markdown(found)
    assert "numerics_" not in comma_separated(found).splitlines()[0]


def test_what_was_not_finite_is_marked_and_does_not_vanish() -> None:
    lines = [update(1), look(2, gradient_error=NAN, lost_share=0.5), look(4, gradient_error=0.5)]
    found = compare([run("precision=fp16", 0, journal=lines)])
    cell = rows_of(markdown(found), "| setup | looks |")["precision=fp16"]["gradient error"]
    assert cell == (
        "not finite → 50% (worst 50% at update 4; not finite in 1 of 2 looks, first after update 2)"
    )
    html = looks_section(found)
    assert "not finite in 1 of 2 looks" in words_of(html)
    assert 'id="not-finite-gradient_error-precision=fp16"' in html  # its cross in the plot
    json.dumps(asdict(found), allow_nan=False)
    (row,) = csv.DictReader(io.StringIO(comma_separated(found)))
    assert row["numerics_gradient_error_nonfinite_looks"] == "1"
    assert (
        row["numerics_gradient_error_first"] == "" and row["numerics_gradient_error_last"] == "0.5"
    )
    never = compare([run("precision=fp16", 0, journal=[update(1), look(2, gradient_error=NAN)])])
    assert 'id="not-finite-gradient_error-precision=fp16"' in looks_section(never)


def test_a_plot_is_there_only_where_something_is_above_zero(comparison: Comparison) -> None:
    html = looks_section(comparison)
    for title in ("Gradient error while training", "Updates rounded away", "Gradient underflow"):
        assert title in html
    assert "0 at every look: precision=fp32" in words_of(html)
    only = compare([found for found in planted() if found.setup == "precision=fp32"])
    assert looks_plots.lost_share(only) is None
    assert looks_plots.gradient_error(only) is None
    assert TITLE in looks_section(only)


def test_shares_keep_three_figures() -> None:
    found: Mapping[float, str] = {0.0: "0%", 0.000312: "0.0312%", 0.1234: "12.3%", 44.0: "4,400%"}
    assert {value: percent(value) for value in found} == found
