"""docs/metrics.md has every name that is logged, and none that is not."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runner.contracts import Counts
from runner.forwarding.curves import NONFINITE, NUMERICS, Curves, values_of
from runner.forwarding.runs import is_timed
from runner.outcome import summary
from runner.outcome.memory import memory_figures
from runner.records import PHASES, RunRecord, UpdateRecord
from runner.worker import run_folder
from tests.test_cli import folders, parent_and_children

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
UNITS = {"nats", "s", "tokens/s", "bytes", "1"}

pytestmark = pytest.mark.xdist_group("sweep")


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    meaning: str
    unit: str
    ratio: str
    measured: str
    when: str


def table() -> list[Row]:
    """The rows of the page's two tables of names."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [re.split(r" \| ", line.strip("| ")) for line in lines if line.startswith("| `")]
    fields = ("meaning", "unit", "ratio", "measured", "when")
    return [Row(name=c[0].strip("`"), **dict(zip(fields, c[1:], strict=True))) for c in cells]


def named(*when: str) -> set[str]:
    return {row.name for row in table() if row.when in when}


UPDATE = UpdateRecord(
    update=1,
    attempt=1,
    applied=True,
    skipped_reason=None,
    loss=math.nan,
    grad_norm=1.0,
    lr=0.1,
    loss_scale=8.0,
    tokens=Counts(useful=1, nonpad=2, slots=3),
    examples=1,
    time=dict.fromkeys(PHASES, 0.1),
    total=0.6,
    host={},
    memory={"allocated": 5, "reserved": 7, "inactive_split": 1, "retries": 2, "ooms": 0},
)
"""An update on CUDA with loss scaling whose loss is not finite: it has every curve."""


def test_every_name_has_a_meaning_a_unit_a_ratio_a_place_and_a_condition() -> None:
    rows = table()
    assert len(rows) == len({row.name for row in rows}) > 30
    conditions = {"always", "CUDA", "loss scaling", "not FP32", "looks"}
    conditions |= {"peak known", "not finite"}
    conditions |= {"eager"}
    for row in rows:
        assert row.unit in UNITS, row
        assert row.when in conditions, row
        assert min(len(row.meaning), len(row.ratio), len(row.measured)) > 4, row


def test_the_unit_of_a_name_is_the_one_in_the_name() -> None:
    endings = {"_per_s": "tokens/s", "_bytes": "bytes", "_s": "s", "_s_median": "s", "_s_p95": "s"}
    for row in table():
        for ending in sorted(endings, key=len, reverse=True):
            if row.name.endswith(ending):
                assert row.unit == endings[ending], row
                break
        else:
            assert row.unit in ("nats", "1"), row


def test_the_curves_of_the_page_are_those_that_the_code_can_draw() -> None:
    code = {name for name, _ in values_of(UPDATE, emulated=False)} | {"loss/eval"}
    others = ("summary/", NUMERICS)  # curves of numerics: tests/test_looks.py
    page = {row.name for row in table() if not row.name.startswith(others)}
    assert page == code | {f"{NONFINITE}<curve>"}


def test_a_value_that_is_not_finite_draws_the_curve_beside_it() -> None:
    points = Curves(start_ms=0, emulated=False).take(UPDATE)
    beside = {point.name: point.value for point in points if point.name.startswith(NONFINITE)}
    assert beside == {"nonfinite/loss/train": 1.0}
    infinite = replace(UPDATE, loss=-math.inf, grad_norm=math.inf)
    points = Curves(start_ms=0, emulated=False).take(infinite)
    beside = {point.name: point.value for point in points if point.name.startswith(NONFINITE)}
    assert beside == {"nonfinite/loss/train": 3.0, "nonfinite/optim/grad_norm": 2.0}


def test_an_emulated_run_logs_what_the_page_says() -> None:
    drawn = {name for name, _ in values_of(UPDATE, emulated=True)} | {"loss/eval"}
    untimed = {row.name for row in table() if row.unit not in ("s", "tokens/s")}
    assert drawn == {
        name for name in untimed if not re.match("summary/|nonfinite/|numerics/", name)
    }
    summaries = {row.name for row in table() if row.name.startswith("summary/")}
    dropped = {name for name in summaries if is_timed(name.removeprefix("summary/"))}
    assert dropped == (summaries - untimed) | {"summary/mfu"}


@pytest.mark.slow
def test_real_runs_log_the_names_of_the_page_and_no_others(sweep: Path) -> None:
    parent, children = parent_and_children(sweep)
    plain, scaled = (set(run.data.metrics) for run in children)
    assert plain == named("always", "eager")
    assert scaled == named("always", "eager", "loss scaling", "not FP32")
    assert set(parent.data.metrics) == set()


@pytest.mark.slow
def test_a_device_s_peak_and_allocator_add_the_figures_that_the_page_says(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A known peak and CUDA's records stand in for a device that this test need not have."""
    monkeypatch.setattr(summary, "peak_flops_per_s", lambda name, compute: 1e9)
    shutil.copy(folders(sweep)[1] / "job.yaml", tmp_path)  # FP16: it has a probe
    assert run_folder(tmp_path, lambda: False) == "ok"
    record = RunRecord.read(tmp_path)
    assert record is not None
    run = SimpleNamespace(
        loop=SimpleNamespace(records=[UPDATE, replace(UPDATE, memory=None)]),
        account=SimpleNamespace(peak_bytes=5),
        device=torch.device("cuda", 0),
    )
    cuda = memory_figures(run)
    assert cuda == {
        "peak_allocated_bytes": 5,
        "peak_reserved_bytes": 7,
        "unfilled_bytes": 2,
        "peak_inactive_split_bytes": 1,
        "allocator_retries": 2,
        "account_exceeded_updates": 0,
    }
    found = {f"summary/{name}" for name in {**record.summary, **cuda}}
    assert found == {row.name for row in table() if row.name.startswith("summary/")}
