"""Tests of runner/schedule.py."""

from __future__ import annotations

from itertools import pairwise

import pytest

from runner.schedule import Constant, Cosine


def test_cosine_warms_up_then_falls_to_the_final_factor() -> None:
    factors = Cosine(warmup=4, final=0.1).factors(9)
    assert factors[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert factors[6] == pytest.approx(0.1 + 0.9 * 0.5)  # half way: cos(pi / 2) = 0
    assert factors[8] == pytest.approx(0.1)


def test_constant_stays_at_one_after_warm_up() -> None:
    assert Constant(warmup=2).factors(4) == [0.5, 1.0, 1.0, 1.0]
    assert Constant().factors(3) == [1.0, 1.0, 1.0]


def test_a_decay_never_rises_after_warm_up() -> None:
    factors = Cosine(warmup=3, final=0.0).factors(50)
    assert all(a >= b for a, b in pairwise(factors[3:]))


def test_a_warm_up_longer_than_the_run_only_rises() -> None:
    assert Cosine(warmup=10).factors(3) == pytest.approx([0.1, 0.2, 0.3])
