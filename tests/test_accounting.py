"""Tests of runner/accounting.py, with sums worked by hand."""

from __future__ import annotations

import math

import pytest

from runner.accounting import (
    activation_bytes,
    activation_elements,
    causal_pairs,
    divisors,
    marked,
    mfu,
    micro_sizes,
    optimizer_traffic,
    padding_share,
    phase_shares,
    rate,
    rates,
    statistics,
    summary,
    unigram_entropy,
    window_loss,
)
from runner.contracts import Counts
from runner.records import PHASES, UpdateRecord


def update(
    number: int = 1,
    *,
    loss: float | None = 1.0,
    useful: int = 10,
    total: float = 0.1,
    marks: tuple[str, ...] = (),
    applied: bool = True,
    slots: int = 0,
) -> UpdateRecord:
    return UpdateRecord(
        update=number,
        attempt=number,
        applied=applied,
        skipped_reason=None if applied else "nonfinite_gradient",
        loss=loss,
        grad_norm=1.0,
        lr=0.1,
        loss_scale=None,
        tokens=Counts(useful=useful, nonpad=useful, slots=slots or useful),
        examples=2,
        time={**dict.fromkeys(PHASES, 0.0), "forward": total * 0.75, "data": total * 0.25},
        total=total,
        host={"data": 0.0, "transfer": 0.0},
        memory=None,
        marks=marks,
    )


def test_the_specification_s_two_sequences_give_80_useful_and_100_slots_per_second() -> None:
    found = rates([update(useful=3 + 5, slots=2 * 5, total=0.1)])
    assert found["useful_tokens_per_s"] == pytest.approx(80)
    assert found["slots_tokens_per_s"] == pytest.approx(100)


def test_a_rate_is_total_over_total_not_a_mean_of_ratios() -> None:
    found = rates([update(useful=100, total=1.0), update(useful=100, total=3.0)])
    assert found["useful_tokens_per_s"] == 50.0  # the mean of ratios would be 66.7
    assert rate(5, 0) is None


def test_a_window_s_loss_weighs_by_tokens() -> None:
    window = [update(loss=2.0, useful=30), update(loss=4.0, useful=10), update(loss=3.0, useful=20)]
    assert window_loss(window) == pytest.approx(160 / 60)  # 2.6667, not 3.0


def test_windows_of_eight_updates_by_three_cover_three_three_and_two() -> None:
    updates = [update(n, loss=float(n), useful=n) for n in range(1, 9)]
    windows = [updates[i : i + 3] for i in range(0, 8, 3)]
    assert [window_loss(w) for w in windows] == pytest.approx([14 / 6, 77 / 15, 113 / 15])


def test_a_nan_loss_makes_the_window_nan_and_an_empty_one_has_none() -> None:
    assert math.isnan(window_loss([update(loss=math.nan), update()]) or 0.0)
    assert window_loss([]) is None
    assert window_loss([update(loss=None, useful=0)]) is None


def test_warm_up_is_left_out_of_step_time_and_rates_but_counted() -> None:
    updates = [update(1, total=1.0, marks=("warmup",))] + [update(n, total=0.02) for n in (2, 3, 4)]
    found = summary(updates)
    assert found["step_s_median"] == pytest.approx(0.02)
    assert found["useful_tokens_per_s"] == pytest.approx(500)
    assert found["updates_attempted"] == 4
    assert marked(updates) == {"warmup": {"count": 1, "seconds": 1.0}}


def test_a_run_no_longer_than_its_warm_up_has_no_step_time() -> None:
    found = summary([update(marks=("warmup",))])
    assert not any("step_s" in name or "per_s" in name for name in found)
    assert found["train_loss"] == 1.0


def test_the_training_loss_is_over_the_last_twenty_applied_updates() -> None:
    updates = [update(n, loss=9.0) for n in range(5)] + [update(n, loss=2.0) for n in range(20)]
    updates.append(update(30, loss=math.inf, applied=False))
    assert summary(updates)["train_loss"] == 2.0
    assert summary(updates)["updates_skipped"] == 1


def test_statistics_of_one_to_five() -> None:
    found = statistics([5.0, 1.0, 4.0, 2.0, 3.0])
    assert found is not None
    assert found["median"] == 3.0
    assert found["p95"] == pytest.approx(4.8)
    assert found["spread"] == pytest.approx(2 / 3)  # quartiles 2 and 4 over 3
    assert statistics([]) is None


def test_phase_shares_are_of_the_total() -> None:
    shares = phase_shares([update(total=1.0), update(total=3.0)])
    assert shares["forward"] == pytest.approx(0.75)
    assert sum(shares.values()) == pytest.approx(1.0)


def test_padding_share_counts_slots_without_a_token() -> None:
    assert padding_share(Counts(useful=15, nonpad=20, slots=26)) == pytest.approx(6 / 26)
    assert padding_share(Counts()) is None


def test_micro_batches_of_a_short_last_update() -> None:
    assert micro_sizes(7, 4) == [4, 3]
    assert micro_sizes(8, 4) == [4, 4]
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_unigram_entropy_of_a_fair_and_a_biased_coin() -> None:
    assert unigram_entropy({0: 5, 1: 5}) == pytest.approx(math.log(2))
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert unigram_entropy({0: 3, 1: 1, 2: 0}) == pytest.approx(expected)


def test_the_entropy_of_a_single_target_is_zero_and_not_minus_zero() -> None:
    assert f"{unigram_entropy({7: 3}):.4f}" == "0.0000"


def test_causal_pairs_of_two_documents() -> None:
    assert causal_pairs([3, 2]) == 6 + 3


def test_adamw_in_fp32_moves_28_bytes_for_each_parameter() -> None:
    assert optimizer_traffic(parameters=4, gradients=4, moments=8) == 28


def test_mfu_is_absent_without_a_known_peak() -> None:
    assert mfu(flops=5e11, seconds=1.0, peak_flops_per_s=1e12) == 0.5
    assert mfu(flops=5e11, seconds=1.0, peak_flops_per_s=None) is None


# --- activations ------------------------------------------------------------------------------

LARGE = {"n_hidden": 16, "n_score": 1, "length": 1024, "width": 1280, "heads": 20}
"""The specification's coarse estimate of GPT-2 Large, 36 layers, two bytes an element."""


def test_the_linear_and_the_quadratic_term_of_gpt2_large_are_21_million_each() -> None:
    linear = activation_elements(**{**LARGE, "n_score": 0}, rows=1)
    quadratic = activation_elements(**{**LARGE, "n_hidden": 0}, rows=1)
    assert linear == quadratic == 20_971_520


def test_gpt2_large_keeps_84_mb_a_layer_3_gb_in_all_and_96_gb_at_batch_32() -> None:
    one = activation_bytes(element_bytes=2, layers=1, rows=1, **LARGE)
    every = activation_bytes(element_bytes=2, layers=36, rows=1, **LARGE)
    batch = activation_bytes(element_bytes=2, layers=36, rows=32, **LARGE)
    assert (one, every, batch) == (83_886_080, 3_019_898_880, 96_636_764_160)
