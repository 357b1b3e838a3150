"""What a user sees in MLflow's own pages, in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from runner.records import RunRecord, read_journal, updates_of
from runner.worker import read_ticket
from scripts import mlflow_ui
from scripts.mlflow_ui import Page, chromium, served
from tests.test_cli import folders, parent_and_children, record_of

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.xdist_group("sweep")]

PARENT = "sweep precision=fp32,fp16"


@pytest.fixture(scope="module")
def page(sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    profile = tmp_path_factory.mktemp("browser") / "profile"
    with served(sweep) as url, chromium(profile) as driver:
        yield Page(driver=driver, url=url)


@pytest.fixture(scope="module")
def setups(sweep: Path) -> list[str]:
    """Names of the two jobs' setups."""
    names = [read_ticket(folder)["setup"] for folder in folders(sweep)]
    assert [name.split()[0] for name in names] == ["precision=fp32", "precision=fp16"]
    return names


def records(sweep: Path) -> list[RunRecord]:
    return [record_of(folder) for folder in folders(sweep)]


def test_the_run_list_shows_the_sweep_and_under_it_its_jobs(page: Page, setups: list[str]) -> None:
    page.open_runs()
    text = page.see(PARENT, "3 matching runs")
    assert not any(setup in text for setup in setups)
    page.expand(PARENT)
    lines = page.see(*setups).splitlines()
    assert lines.count(PARENT) == 1
    assert [lines.count(setup) for setup in setups] == [1, 1]


def test_the_run_list_can_be_grouped_by_setup(page: Page, setups: list[str]) -> None:
    page.open_runs()
    page.click("Group by")
    page.click("setup")
    page.see(*(f"Group: {setup}" for setup in setups))


def numbers(lines: list[str]) -> list[float]:
    plain = [line.replace("−", "-") for line in lines]
    return [float(line) for line in plain if re.fullmatch(r"-?\d+(\.\d+)?", line)]


def test_the_loss_curve_of_a_job_is_drawn_over_its_updates(
    page: Page, sweep: Path, setups: list[str]
) -> None:
    losses = [u.loss for u in updates_of(read_journal(folders(sweep)[0] / "journal.jsonl"))]
    page.open_runs()
    page.expand(PARENT)
    page.click(setups[0])
    page.click("Model metrics")
    legend = f"{setups[0]} (loss/train)"

    def ticks() -> tuple[list[float], list[float]] | None:
        """Numbers along the two axes; the losses lie far above the 4 updates."""
        lines = page.text().splitlines()
        if legend not in lines or "train" not in lines:
            return None
        drawn = numbers(lines[lines.index("train") : lines.index(legend)])
        steps, heights = [n for n in drawn if n <= 4], [n for n in drawn if n > 4]
        return (steps, heights) if steps and heights else None

    assert min(losses) > 5
    steps, heights = page.until("axes of loss/train", ticks)
    assert 3 <= max(steps) <= 4
    reach = 0.1 * (max(losses) - min(losses))
    assert len(heights) >= 2
    assert min(losses) - reach <= min(heights) <= max(heights) <= max(losses) + reach


def test_a_job_shows_its_final_status_and_its_figures(
    page: Page, sweep: Path, setups: list[str]
) -> None:
    record = records(sweep)[1]
    page.open_runs()
    page.expand(PARENT)
    page.click(setups[1])
    page.see("Finished", f"Parent run\n{PARENT}\n")
    lines = page.see("summary/eval_loss").splitlines()
    shown = float(lines[lines.index("summary/eval_loss") + 1])
    assert shown == pytest.approx(record.summary["eval_loss"], rel=1e-9)


def test_two_jobs_stand_side_by_side_in_the_compare_view(
    page: Page, sweep: Path, setups: list[str]
) -> None:
    page.open_runs()
    page.expand(PARENT)
    for setup in setups:
        page.select(setup)
    page.click("Compare")
    _, children = parent_and_children(sweep)
    ids = [run.info.run_id for run in children]
    text = page.see(
        "Comparing 2 Runs from 1 Experiment", *setups, *ids, "summary/eval_loss", "Artifacts"
    )
    lines = text.splitlines()
    (classes,) = [line for line in lines if line.startswith("precision._target_ ")]
    assert classes.split()[1:] == [
        "runner.precision.fp32.Fp32",
        "runner.precision.autocast.Autocast",
    ]
    figures = lines[lines.index("Metrics") + 2 : lines.index("Artifacts")]
    names = [line for line in figures if "/" in line]
    shown = dict(zip(names, in_pairs(figures[len(names) :]), strict=False))
    assert shown["optim/loss_scale"] == ("NaN", "65536")
    expected = [record.summary["eval_loss"] for record in records(sweep)]
    assert [float(text) for text in shown["summary/eval_loss"]] == pytest.approx(expected, abs=6e-4)


def in_pairs(values: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(values[::2], values[1::2], strict=True))


FRAME = "//iframe"
PLOTS = """
const plots = [...document.querySelectorAll('figure svg')];
return plots.map(plot => {
  const box = plot.getBoundingClientRect();
  const words = [...plot.querySelectorAll('text')].map(t => t.getBoundingClientRect());
  const inside = w => w.left >= box.left - 2 && w.right <= box.right + 2
    && w.top >= box.top - 2 && w.bottom <= box.bottom + 2;
  return [box.width, box.height, words.length, words.filter(w => !inside(w)).length];
});
"""


def test_the_report_of_a_sweep_opens_inside_its_run_and_draws_its_plots(
    page: Page, sweep: Path, setups: list[str]
) -> None:
    page.open_runs()
    page.click(PARENT)
    page.click("Artifacts")
    page.click("report.html")
    page.driver.switch_to.frame(page.find(FRAME))
    (comparison,) = sweep.glob("runs/*/*/comparison.json")
    verdicts = [one["verdict"]["reason"] for one in json.loads(comparison.read_text())["contrasts"]]
    assert verdicts
    losses = [f"{record.summary['eval_loss']:.4f}" for record in records(sweep)]
    page.see("Compared with precision=fp32", "precision=fp16", "CPU figures", *verdicts, *losses)
    plots = page.driver.execute_script(PLOTS)
    page.driver.switch_to.default_content()
    assert len(plots) >= 6
    for width, height, words, outside in plots:
        assert width > 250 and height > 60 and words >= 3 and outside == 0, plots


def test_a_missing_browser_is_a_failure_that_names_the_command_which_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mlflow_ui, "DRIVER", tmp_path / "chromedriver")
    with (
        pytest.raises(FileNotFoundError, match=r"apt-get install .* chromium chromium-driver"),
        chromium(tmp_path / "profile"),
    ):
        pass
