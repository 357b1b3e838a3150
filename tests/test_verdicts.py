"""Tests for ../runner/comparison/statistics.py: bounds, numbers of seeds, Holm's procedure."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from runner.comparison.statistics import (
    MOST_SEEDS,
    POWER,
    holm_levels,
    p_value,
    paired,
    power,
    seeds_for,
    settling_seeds,
    spread_bound,
)

MARGIN = 0.01
CONFIDENCE = 0.95
Matrix = NDArray[np.float64]

# --- bounds -----------------------------------------------------------------------------------


def test_bounds_of_three_differences_are_those_of_the_t_table() -> None:
    # Two degrees of freedom: t(0.95) = 2.91999, t(0.975) = 4.30265; error 0.001 / sqrt(3).
    found = paired([0.001, 0.002, 0.003], 0.95)
    assert found.count == 3
    assert found.mean == pytest.approx(0.002)
    assert found.stdev == pytest.approx(0.001)
    assert found.upper == pytest.approx(0.002 + 2.91999 * 0.000577350, abs=1e-8)
    assert found.lower == pytest.approx(0.002 - 2.91999 * 0.000577350, abs=1e-8)
    assert found.high == pytest.approx(0.002 + 4.30265 * 0.000577350, abs=1e-8)
    assert found.low == pytest.approx(0.002 - 4.30265 * 0.000577350, abs=1e-8)


def test_a_higher_confidence_widens_both_kinds_of_bounds() -> None:
    # One degree of freedom: t(0.99) = 31.8205, t(0.995) = 63.6567; mean 1, error 1.
    found = paired([0.0, 2.0], 0.99)
    assert found.upper == pytest.approx(1 + 31.8205, abs=1e-3)
    assert found.high == pytest.approx(1 + 63.6567, abs=1e-3)


def test_one_difference_has_a_mean_and_no_bounds() -> None:
    found = paired([0.5], 0.95)
    assert found.mean == 0.5
    assert (found.stdev, found.lower, found.upper, found.low, found.high) == (None,) * 5
    assert p_value([0.5]) is None


def test_equal_differences_have_bounds_equal_to_them() -> None:
    found = paired([0.25, 0.25, 0.25], 0.95)
    assert (found.lower, found.upper, found.low, found.high) == (0.25,) * 4
    assert p_value([0.25, 0.25]) == 0.0
    assert p_value([0.0, 0.0]) == 1.0


def test_the_p_value_of_three_differences_follows_the_closed_form() -> None:
    # With two degrees of freedom p = 1 - t / sqrt(2 + t^2); here t = 2 sqrt(3), t^2 = 12.
    assert p_value([1.0, 2.0, 3.0]) == pytest.approx(1 - math.sqrt(12 / 14), abs=1e-12)
    assert p_value([-1.0, -2.0, -3.0]) == p_value([1.0, 2.0, 3.0])


def test_bounds_agree_with_an_independent_t_test() -> None:
    values = np.random.default_rng(1).normal(0.003, 0.01, 7)
    found = paired(list(values), 0.9)
    test = stats.ttest_1samp(values, 0.0)
    interval = test.confidence_interval(0.9)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert p_value(list(values)) == pytest.approx(test.pvalue)


# --- numbers of seeds -------------------------------------------------------------------------


def test_no_spread_needs_two_seeds_and_no_distance_is_never_settled() -> None:
    assert seeds_for(shift=MARGIN, spread=0.0, confidence=CONFIDENCE) == 2
    assert seeds_for(shift=0.0, spread=0.001, confidence=CONFIDENCE) is None
    assert seeds_for(shift=MARGIN, spread=1.0, confidence=CONFIDENCE) is None


def test_the_spread_bound_covers_the_true_spread_four_times_in_five() -> None:
    rng = np.random.default_rng(2)
    found = rng.normal(0, 3.0, (20_000, 3)).std(axis=1, ddof=1)
    covered = np.mean([spread_bound(float(s), 3) >= 3.0 for s in found])
    assert abs(covered - 0.8) < 4 * math.sqrt(0.8 * 0.2 / 20_000)


def test_the_recommendation_has_the_stated_power_and_one_seed_less_has_not() -> None:
    for spread in (0.003, 0.007, 0.015):
        seeds = seeds_for(shift=MARGIN, spread=spread, confidence=CONFIDENCE)
        assert seeds is not None
        reached = [
            power(shift=MARGIN, spread=spread, seeds=n, confidence=CONFIDENCE)
            for n in (seeds, seeds - 1)
            if n > 1
        ]
        assert reached[0] >= POWER
        assert all(less < POWER for less in reached[1:])


def test_a_mean_close_to_the_margin_asks_for_the_seeds_that_tell_them_apart() -> None:
    # 20 seeds, mean 0.0005 under the margin, spread 0.0015 (+-s gives s sqrt(20/19)).
    near = paired([0.0095 - 0.0015, 0.0095 + 0.0015] * 10, CONFIDENCE)
    assert near.upper is not None and near.upper > MARGIN
    wanted = settling_seeds(near, margin=MARGIN, confidence=CONFIDENCE)
    # Normal approximation: (1.645 + 1.645)^2 (0.00154 / 0.0005)^2 = 102.6, and a little for t.
    assert wanted is not None and 102 <= wanted <= 107


def test_a_mean_at_the_margin_is_not_settled_by_any_number() -> None:
    values = [MARGIN - 0.001, MARGIN + 0.001] * 10
    found = paired(values, CONFIDENCE)
    assert settling_seeds(found, margin=found.mean, confidence=CONFIDENCE) is None


# --- operating characteristics ----------------------------------------------------------------


def verdicts(differences: Matrix) -> NDArray[np.int64]:
    """1 passed, -1 failed, 0 unknown for each row: the rule, for many experiments at once."""
    seeds = differences.shape[1]
    error = stats.t.ppf(CONFIDENCE, seeds - 1) * differences.std(axis=1, ddof=1) / seeds**0.5
    mean = differences.mean(axis=1)
    return np.where(mean + error < MARGIN, 1, np.where(mean - error > MARGIN, -1, 0))


def test_the_simulated_rule_is_the_rule_of_the_product() -> None:
    rows = np.random.default_rng(4).normal(MARGIN, 0.004, (300, 4))
    for row, verdict in zip(rows, verdicts(rows), strict=True):
        found = paired(list(row), CONFIDENCE)
        assert found.upper is not None and found.lower is not None
        assert verdict == (found.upper < MARGIN) - (found.lower > MARGIN)


def low_bound(hits: int, trials: int) -> float:
    """Exact lower bound of a probability at 99.99 %."""
    return float(stats.binomtest(hits, trials).proportion_ci(0.9998).low)


def high_bound(hits: int, trials: int) -> float:
    """Exact upper bound of a probability at 99.99 %."""
    return float(stats.binomtest(hits, trials).proportion_ci(0.9998).high)


@pytest.mark.parametrize("spread", [0.003, 0.007, 0.012])
def test_operating_characteristics_at_the_recommended_number_of_seeds(spread: float) -> None:
    trials = 40_000
    seeds = seeds_for(shift=MARGIN, spread=spread, confidence=CONFIDENCE)
    assert seeds is not None
    rng = np.random.default_rng(5)
    at = {
        true: verdicts(rng.normal(true, spread, (trials, seeds)))
        for true in (0.0, MARGIN, 2 * MARGIN)
    }
    assert low_bound(int((at[0.0] == 1).sum()), trials) >= 0.90
    # The exact probability is 0.95 or more; the simulation must not exclude it.
    assert high_bound(int((at[2 * MARGIN] == -1).sum()), trials) >= 0.95
    assert (at[2 * MARGIN] == -1).mean() >= 0.95 - 4 * math.sqrt(0.05 * 0.95 / trials)
    assert low_bound(int((at[MARGIN] == 1).sum()), trials) <= 0.05
    assert (at[MARGIN] == 1).mean() <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / trials)


def test_three_seeds_and_then_the_recommended_number_settle_what_was_open() -> None:
    """The whole procedure of a user, whose recommendation rests on the spread of three pairs."""
    spread, pilots = 0.007, 1500
    rng = np.random.default_rng(6)
    rates = {}
    for true in (0.0, MARGIN, 2 * MARGIN):
        first = rng.normal(true, spread, (pilots, 3))
        final = verdicts(first)
        for row in np.flatnonzero(final == 0):
            found = paired(list(first[row]), CONFIDENCE)
            seeds = settling_seeds(found, margin=MARGIN, confidence=CONFIDENCE) or MOST_SEEDS
            more = rng.normal(true, spread, seeds - 3)
            final[row] = verdicts(np.concatenate([first[row], more])[None])[0]
        rates[true] = final
    assert low_bound(int((rates[0.0] == 1).sum()), pilots) >= 0.90
    assert low_bound(int((rates[2 * MARGIN] == -1).sum()), pilots) >= 0.95
    # Two looks at 5 % each: by the union bound at most 10 % pass at the margin itself.
    assert low_bound(int((rates[MARGIN] == 1).sum()), pilots) <= 0.10


# --- many comparisons -------------------------------------------------------------------------


def test_holm_stops_at_the_first_p_value_over_its_share() -> None:
    # Shares of 0.05: 0.05/3, 0.05/2, 0.05. 0.03 exceeds 0.025, so 0.04 is held to 0.025 too,
    # although it is under 0.05.
    levels = holm_levels([0.04, 0.01, 0.03], 0.95)
    assert levels == pytest.approx([1 - 0.025, 1 - 0.05 / 3, 1 - 0.025])


def test_holm_goes_on_while_every_p_value_is_within_its_share() -> None:
    levels = holm_levels([0.04, 0.001, 0.02], 0.95)
    assert levels == pytest.approx([1 - 0.05, 1 - 0.05 / 3, 1 - 0.025])


def test_the_first_of_equal_p_values_decides_for_all() -> None:
    assert holm_levels([0.03, 0.03], 0.95) == pytest.approx([0.975, 0.975])
    assert holm_levels([], 0.95) == []


def test_holm_keeps_the_chance_of_any_false_win_under_one_in_twenty() -> None:
    trials, family, seeds = 4000, 6, 3
    logs = np.random.default_rng(7).normal(0, 0.01, (trials, family, seeds))
    error = logs.std(axis=2, ddof=1) / seeds**0.5
    p_values = 2 * stats.t.sf(abs(logs.mean(axis=2)) / error, seeds - 1)
    wins = sum(
        any(p < 1 - level for p, level in zip(row, holm_levels(list(row), 0.95), strict=True))
        for row in p_values
    )
    assert low_bound(wins, trials) <= 0.05
    # Without the correction about 1 - 0.95**6 = 26 % of the families would hold one.
    assert (p_values.min(axis=1) < 0.05).mean() > 0.2
