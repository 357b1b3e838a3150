"""Tests for runner/data/order.py."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.data.order import order, place, updates, updates_from, updates_per_epoch


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    """Case C50."""
    np.random.seed(0)
    first = order(50, seed=3, epoch=2)
    np.random.seed(1)
    order(50, seed=9, epoch=9)
    assert first.tolist() == order(50, seed=3, epoch=2).tolist()


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    found = {tuple(order(50, seed=s, epoch=e)) for s in range(5) for e in range(5)}
    assert len(found) == 25


def test_every_order_is_equally_likely() -> None:
    """24,000 orders of 3: each of the 6 is expected 4,000 times, standard deviation 58."""
    counts = Counter(tuple(order(3, seed=seed, epoch=seed % 7)) for seed in range(24_000))
    assert len(counts) == 6
    assert max(abs(count - 4000) for count in counts.values()) < 5 * 58


def test_the_last_update_of_an_epoch_is_shorter_and_none_crosses_its_end() -> None:
    """Case C04: 7 examples in updates of 4."""
    drawn = list(islice(updates(7, batch=4, seed=0), 4))
    assert [(d.epoch, d.number, len(d.indices)) for d in drawn] == [
        (0, 0, 4),
        (0, 1, 3),
        (1, 0, 4),
        (1, 1, 3),
    ]
    for epoch in (drawn[:2], drawn[2:]):
        assert sorted(int(i) for d in epoch for i in d.indices) == list(range(7))


@pytest.mark.parametrize(
    ("count", "batch", "expected"), [(7, 4, 2), (8, 4, 2), (9, 4, 3), (3, 4, 1), (1, 1, 1)]
)
def test_updates_per_epoch_counts_the_shorter_last_one(
    count: int, batch: int, expected: int
) -> None:
    assert updates_per_epoch(count, batch) == expected


@pytest.mark.parametrize(("count", "batch"), [(0, 4), (4, 0), (4, -1)])
def test_an_order_of_nothing_is_refused(count: int, batch: int) -> None:
    with pytest.raises(ValueError, match=f"given {count} and {batch}; allowed: 1 or more"):
        next(updates(count, batch=batch, seed=0))


def test_an_update_number_is_a_place_in_an_epoch() -> None:
    assert place(0, count=7, batch=4) == (0, 0)
    assert place(5, count=7, batch=4) == (2, 1)


@settings(max_examples=50, deadline=None)
@given(
    count=st.integers(1, 20),
    batch=st.integers(1, 25),
    seed=st.integers(0, 2**64),
    start=st.integers(0, 30),
)
def test_starting_at_an_update_gives_what_replaying_up_to_it_would(
    count: int, batch: int, seed: int, start: int
) -> None:
    replayed = list(islice(updates(count, batch=batch, seed=seed), start, start + 4))
    direct = list(islice(updates_from(start, count=count, batch=batch, seed=seed), 4))
    assert [(d.epoch, d.number, d.indices.tolist()) for d in direct] == [
        (d.epoch, d.number, d.indices.tolist()) for d in replayed
    ]
