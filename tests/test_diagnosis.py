"""Tests of runner/diagnosis.py: each symptom yields its own finding and no other."""

from __future__ import annotations

from typing import Any

import pytest

from runner.diagnosis import findings

HEALTHY: dict[str, Any] = {
    "shares": {"data": 0.02, "transfer": 0.01, "forward": 0.3, "backward": 0.6, "optimizer": 0.06},
    "padding": 0.1,
    "skipped": 0,
    "spread": 0.03,
}


def test_no_symptom_no_advice() -> None:
    assert findings(**HEALTHY) == []
    assert findings(shares={}, padding=None, skipped=0, spread=None) == []


@pytest.mark.parametrize(
    ("change", "stage", "figure"),
    [
        ({"shares": {"data": 0.4}}, "batch preparation", "data is 40%"),
        ({"shares": {"transfer": 0.2}}, "transfer", "20%"),
        ({"padding": 0.5}, "forward and backward", "50% of the slots"),
        ({"shares": {"optimizer": 0.3}}, "update", "optimizer is 30%"),
        ({"shares": {"other": 0.05}}, "update", "other is 5.0%"),
        ({"skipped": 3}, "update", "3 updates skipped"),
        ({"spread": 0.3}, "measurement", "30%"),
    ],
)
def test_a_symptom_has_its_stage_and_figure_and_brings_no_other(
    change: dict[str, Any], stage: str, figure: str
) -> None:
    (found,) = findings(**{**HEALTHY, **change})
    assert found.stage == stage
    assert figure in found.evidence
    assert found.advice


def test_findings_come_in_the_order_of_the_step() -> None:
    shares = {"data": 0.3, "transfer": 0.3, "optimizer": 0.3}
    found = findings(shares=shares, padding=0.5, skipped=1, spread=0.5)
    stages = [f.stage for f in found]
    order = ["batch preparation", "transfer", "forward and backward", "update", "update"]
    assert stages == [*order, "measurement"]
