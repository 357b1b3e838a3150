"""Tests of runner/diagnosis.py: each row of table 7.1 is found by its own fault and no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runner.diagnosis import Figures, stages, symptoms

SHARES = {"data": 0.02, "transfer": 0.01, "forward": 0.3, "backward": 0.58, "optimizer": 0.08}
HEALTHY = Figures(
    shares={**SHARES, "other": 0.01},
    host_data_share=0.05,
    padding=0.1,
    peak_bytes=10 * 2**30,
    device_bytes=80 * 2**30,
    largest_category="saved_activations",
    peak_phase="backward",
    accum=4,
    spread=0.03,
)


def test_every_stage_has_its_figure_in_execution_order_and_a_healthy_step_no_advice() -> None:
    judged = stages(HEALTHY)
    assert [stage.stage for stage in judged] == [
        "batch preparation",
        "transfer",
        "memory",
        "forward and backward",
        "update",
        "tail",
        "accumulation",
        "measurement",
    ]
    assert all(stage.figure for stage in judged)
    assert not any(stage.advice or stage.evidence for stage in judged)
    assert symptoms(judged) == []
    assert judged[0].figure == "data exposed 2.0% of the step, host work 5.0%"
    assert judged[2].figure == "peak 10.000 GiB in backward, mostly saved activations"


def test_nothing_is_judged_without_a_timed_update() -> None:
    assert stages(Figures()) == []


@pytest.mark.parametrize(
    ("shares", "changes", "stage", "symptom", "figure"),
    [
        ({"data": 0.4}, {}, "batch preparation", "device idle before forward", "40%"),
        ({"transfer": 0.2}, {}, "transfer", "device idle before forward", "20%"),
        (
            {},
            {"peak_bytes": 72 * 2**30},
            "memory",
            "peak memory rises through forward",
            "90% of the device",
        ),
        ({}, {"retries": 5}, "memory", "the allocator ran out and began again", "5 times"),
        (
            {"forward": 0.1},
            {},
            "forward and backward",
            "backward dominates step time",
            "5.8 times",
        ),
        ({"optimizer": 0.4}, {}, "update", "update is unexpectedly expensive", "40%"),
        ({"other": 0.2}, {}, "tail", "step ends with a long wait", "20.0%"),
        ({}, {"padding": 0.5}, "forward and backward", "work on padding", "50%"),
        ({}, {"skipped": 3}, "accumulation", "updates skipped", "3 updates"),
        ({}, {"spread": 0.4}, "measurement", "step time is unstable", "40%"),
        ({}, {"others": 2}, "measurement", "the device was shared", "2 other processes"),
    ],
)
def test_a_planted_fault_yields_its_row_and_no_other(
    shares: dict[str, float], changes: dict[str, float], stage: str, symptom: str, figure: str
) -> None:
    faulty = replace(HEALTHY, shares={**HEALTHY.shares, **shares}, **changes)
    (found,) = symptoms(stages(faulty))
    assert (found.stage, found.symptom) == (stage, symptom)
    assert figure in found.evidence
    assert found.advice


def test_a_full_device_whose_memory_is_not_activations_gets_no_activation_advice() -> None:
    full = replace(HEALTHY, peak_bytes=79 * 2**30, largest_category="parameters")
    assert symptoms(stages(full)) == []


def test_unknown_figures_are_said_to_be_unknown() -> None:
    unknown = replace(HEALTHY, peak_bytes=None, spread=None, padding=None)
    figures = {stage.stage: stage.figure for stage in stages(unknown)}
    assert figures["memory"] == "peak unknown"
    assert figures["measurement"] == "spread unknown"


def test_optimizer_traffic_stands_beside_its_share() -> None:
    moved = replace(HEALTHY, optimizer_bytes_per_s=1.5e12, bandwidth=3e12)
    figures = {stage.stage: stage.figure for stage in stages(moved)}
    assert (
        figures["update"]
        == "optimizer 8.0% of the step, 1500.00 GB/s (50% of the device's bandwidth)"
    )


def test_input_that_delays_the_step_is_advised_on_by_what_is_ahead_already() -> None:
    shares = {"data": 0.4, "forward": 0.2, "backward": 0.4}
    alone = stages(Figures(shares=shares, host_data_share=0.4))[0]
    assert "compare data.workers=2" in alone.advice
    ahead = stages(Figures(shares=shares, host_data_share=1.3, workers=2))[0]
    assert "compare data.workers=4" in ahead.advice
    copied = stages(Figures(shares={**shares, "transfer": 0.01}, copy_share=0.2))[1]
    assert copied.figure == "transfer exposed 1.0% of the step, copies 20.0%"
    assert ahead.figure == (
        "data exposed 40.0% of the step, host work 130.0%, by 2 processes ahead"
    )
