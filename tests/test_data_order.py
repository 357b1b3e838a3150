"""Tests for runner/data/order.py."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.data.arranged import Budgeted, Windowed
from runner.data.order import Numbered, Order, order, updates_per_epoch


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
    drawn = [Numbered(7, batch=4, seed=0)[number] for number in range(4)]
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
        Numbered(count, batch=batch, seed=0)


def lengths_of(count: int) -> list[int]:
    return [int(n) for n in np.random.default_rng(count).integers(2, 40, count)]


def orders(count: int, batch: int, seed: int) -> dict[str, Order]:
    """The plain order and those that batchings make of it."""
    lengths = lengths_of(count)

    def plain() -> Numbered:
        return Numbered(count, batch=batch, seed=seed)

    return {
        "plain": plain(),
        "window": Windowed(plain(), lengths.__getitem__, window=3),
        "budget": Budgeted(plain(), lengths.__getitem__, tokens=60),
    }


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 20), batch=st.integers(1, 25), seed=st.integers(0, 2**64))
def test_updates_are_the_same_in_whichever_order_they_are_looked_up(
    count: int, batch: int, seed: int
) -> None:
    """So a run goes on from an update without replaying those before it."""
    for name, forwards in orders(count, batch, seed).items():
        found = [forwards[number] for number in range(12)]
        again = orders(count, batch, seed)[name]
        for number in reversed(range(12)):
            draw = again[number]
            assert (draw.epoch, draw.number) == (found[number].epoch, found[number].number)
            assert draw.indices.tolist() == found[number].indices.tolist()


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 30), batch=st.integers(1, 12), seed=st.integers(0, 2**64))
def test_every_order_visits_every_example_once_an_epoch(count: int, batch: int, seed: int) -> None:
    for made in orders(count, batch, seed).values():
        seen: dict[int, list[int]] = {}
        number = 0
        while len(seen) < 3:
            draw = made[number]
            assert draw.number == 0 or draw.epoch in seen
            seen.setdefault(draw.epoch, []).extend(draw.indices.tolist())
            number += 1
        for epoch in (0, 1):
            assert sorted(seen[epoch]) == list(range(count))


def test_a_window_shares_out_its_examples_by_length_and_shuffles_its_updates() -> None:
    """16 examples of lengths 1 to 16 in updates of 2, windows of 4 updates."""
    made = Windowed(Numbered(16, batch=2, seed=5), lambda i: i + 1, window=4)
    plain = Numbered(16, batch=2, seed=5)
    for first in (0, 4):
        members = sorted(int(i) for n in range(first, first + 4) for i in plain[n].indices)
        pairs = [tuple(made[n].indices.tolist()) for n in range(first, first + 4)]
        assert sorted(pairs) == [tuple(members[k : k + 2]) for k in (0, 2, 4, 6)]
    arranged = [tuple(made[n].indices.tolist()) for n in range(8)]
    assert arranged != sorted(arranged), "long updates must not all come last"


def test_a_window_keeps_the_sizes_of_its_updates() -> None:
    """Case C04: 7 examples in updates of 3: the shorter one stays the epoch's last."""
    made = Windowed(Numbered(7, batch=3, seed=1), lambda i: i, window=8)
    assert [len(made[n].indices) for n in range(6)] == [3, 3, 1, 3, 3, 1]


def test_a_budget_takes_as_many_examples_as_fit() -> None:
    """Lengths 5, 9, 4, 8, 2, 30 in the order of the epoch and 16 tokens: 5 + 9, 4 + 8 + 2, 30."""
    plain = Numbered(6, batch=4, seed=2)
    by_place = dict(zip(plain.shuffled(0).tolist(), (5, 9, 4, 8, 2, 30), strict=True))
    made = Budgeted(plain, by_place.__getitem__, tokens=16)
    found = [[by_place[int(i)] for i in made[n].indices] for n in range(3)]
    assert found == [[5, 9], [4, 8, 2], [30]]
    assert made[3].epoch == 1
    few = Budgeted(Numbered(6, batch=2, seed=2), by_place.__getitem__, tokens=16)
    assert [len(few[n].indices) for n in range(4)] == [2, 2, 1, 1], "batch is the most"
