"""Tests of runner/timeline.py and runner/measure/profiling.py."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from runner.measure.profiling import PHASE, TRACE, record_timeline
from runner.optimizer import AdamW
from runner.records import PHASES
from runner.timeline import Operation, Span, bounds, covered, timeline, top, within
from tests.support import examples, padded, tiny_gpt, training_of, weights


def span(start: float, end: float, name: str = "k") -> Span:
    return Span(name=name, start=start, end=end)


def test_overlapping_work_is_covered_once() -> None:
    assert covered([span(0, 2), span(1, 3), span(5, 6), span(5.2, 5.5)]) == 4.0
    assert covered([]) == 0.0


def test_work_is_cut_at_the_end_of_its_update() -> None:
    (cut,) = within([span(-1, 0.5), span(9, 12), span(10, 11)], span(0, 10))
    assert (cut.start, cut.end) == (9, 10)


def test_the_figures_of_two_updates_worked_by_hand() -> None:
    # Update 0 to 10: work 1-4 and 5-9. Update 10 to 20: work 13-14 and 14-18.
    found = timeline(
        updates=[span(0, 10), span(10, 20)],
        work=[span(1, 4), span(5, 9), span(13, 14), span(14, 18)],
        operations=[],
        ridge=None,
    )
    assert found.busy_share == pytest.approx((3 + 4 + 1 + 4) / 20)
    assert found.idle_before_first_s == pytest.approx((1 + 3) / 2)
    assert found.tail_s == pytest.approx((1 + 2) / 2)
    assert found.gap_share == pytest.approx(1 / (8 + 5))
    assert found.memory_bound_share is None


def test_an_update_without_device_work_is_all_idle() -> None:
    found = timeline(updates=[span(0, 4)], work=[], operations=[], ridge=None)
    assert (found.busy_share, found.idle_before_first_s, found.gap_share) == (0.0, 4.0, 0.0)


def test_time_below_the_ridge_is_memory_bound() -> None:
    made = [
        Operation(name="mm", seconds=3.0, flops=1000, bytes=10),
        Operation(name="add", seconds=1.0, flops=0, bytes=100),
    ]
    assert bounds(made, ridge=50.0) == (0.25, 0.75)
    assert bounds(made, ridge=200.0) == (1.0, 0.0)
    assert bounds([], ridge=50.0) == (None, None)
    assert [(o["name"], o["share"]) for o in top(made)] == [("mm", 0.75), ("add", 0.25)]


def test_a_real_profile_has_labelled_phases_and_leaves_no_trace_in_training(
    tmp_path: Path,
) -> None:
    training = training_of(tiny_gpt(), optimizer=AdamW(lr=1e-2))
    before = weights(training.model)
    draws = [padded(examples(30, 40), 1), padded(examples(20, 50), 1)]
    found = record_timeline(training, draws, tmp_path, ridge=1.0)
    assert all(torch.equal(before[n], p) for n, p in training.model.named_parameters())
    assert not training.optimizer.state
    trace = json.loads(gzip.decompress((tmp_path / TRACE).read_bytes()))
    names = [event.get("name", "") for event in trace["traceEvents"]]
    # Data, transfer, forward, backward and other, and the optimizer before and after, per update.
    micro = 2 * 2
    expected = {"data": 2, "transfer": micro, "forward": micro, "backward": micro}
    expected |= {"optimizer": 4, "other": 2}
    assert {phase: names.count(f"{PHASE}{phase}") for phase in PHASES} == expected
    assert found.updates == 2
    assert 0.2 < found.busy_share <= 1.0
    assert found.idle_before_first_s >= 0
    assert sum(o["share"] for o in found.top) <= 1.0 + 1e-9
    products = [o for o in found.top if o["name"] in ("aten::mm", "aten::addmm")]
    assert products
    assert all(o["flops_per_byte"] > 1 for o in products)
    assert found.memory_bound_share is not None
