"""Padding to a fixed length and sorting by length: the same update, other slots."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest

from runner.assemble import load_corpus
from runner.checks import build_parts
from runner.contracts import Batching, Corpus, Counts, UserError
from runner.data.packed import Packed
from runner.data.padded import Bucketed, Padded, PaddedMax
from runner.data.token_budget import TokenBudget
from runner.feed import Feed
from runner.objective import TokenMean
from runner.step import measured_update
from tests.support import (
    PAD,
    Quiet,
    examples,
    reference_gradient,
    relative_difference,
    tiny_gpt,
    training_of,
    weights,
)
from tests.test_assemble import corpus
from tests.test_checks import config, ids

LENGTHS = (5, 40, 6, 38, 7, 41, 8, 39)


def total(part: Batching, size: int) -> Counts:
    micros = part.micro_batches(examples(*LENGTHS), size=size, pad_id=PAD, seq_len=64)
    return sum((micro.counts for micro in micros), Counts())


def test_slots_by_hand() -> None:
    useful, nonpad = sum(LENGTHS) - 8, sum(LENGTHS)
    assert total(PaddedMax(), 2) == Counts(useful=useful, nonpad=nonpad, slots=8 * 64)
    assert total(Padded(), 2) == Counts(useful=useful, nonpad=nonpad, slots=2 * (40 + 38 + 41 + 39))
    assert total(Bucketed(), 2) == Counts(useful=useful, nonpad=nonpad, slots=2 * (6 + 8 + 39 + 41))
    # With one micro-batch there is nothing to sort apart.
    assert total(Bucketed(), 8) == total(Padded(), 8)


@pytest.mark.parametrize(
    "part", [PaddedMax(), Padded(), Bucketed(), Packed(), Packed(head="targets")]
)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_every_batching_makes_the_same_update(part: Batching, size: int) -> None:
    assert part.numerics == "same"
    chosen = examples(*LENGTHS)
    random.Random(size).shuffle(chosen)
    model = tiny_gpt(double=True)
    _, gradients = reference_gradient(model, chosen)
    before = weights(model)
    micros = part.micro_batches(chosen, size=size, pad_id=PAD, seq_len=64)
    measured_update(training_of(model), lambda: micros, Quiet())
    change = [before[name] - p.detach() for name, p in model.named_parameters()]
    assert relative_difference(change, gradients) < 1e-10


@pytest.mark.parametrize("part", [PaddedMax(), Bucketed()])
def test_an_overlong_example_is_refused(part: Batching) -> None:
    with pytest.raises(ValueError, match="41 tokens; allowed: up to 40"):
        part.micro_batches(examples(*LENGTHS), size=2, pad_id=PAD, seq_len=40)


# --- which examples an update has -------------------------------------------------------------


def fed(part: Batching, **changes: Any) -> Feed:
    settings: dict[str, Any] = {
        "examples": examples(*range(3, 43)),
        "batching": part,
        "objective": TokenMean(),
        "pad_id": PAD,
        "seq_len": 64,
        "batch": 8,
        "micro": 4,
        "seed": 1,
    }
    return Feed(**{**settings, **changes})


def drawn(feed: Feed, updates: int) -> list[list[int]]:
    """Lengths of the examples of each update, ascending."""
    found = islice(feed.draws(), updates)
    return [sorted(n for micro in micros for n in micro.lengths) for micros in found]


def test_a_window_moves_examples_to_updates_of_similar_length() -> None:
    """40 examples of 3 to 42 tokens: five updates of eight neighbours each."""
    updates = drawn(fed(Bucketed(window=5)), 5)
    assert sorted(updates) == [list(range(n, n + 8)) for n in (3, 11, 19, 27, 35)]
    assert updates != sorted(updates)
    assert drawn(fed(Bucketed(window=5)), 5) == updates
    assert drawn(fed(Bucketed()), 5) == drawn(fed(Padded()), 5) != updates


def test_moving_examples_between_updates_is_declared() -> None:
    assert (Bucketed().numerics, Bucketed(window=2).numerics) == ("same", "close")
    with pytest.raises(ValueError, match="window: given 0; allowed: 1 or more"):
        Bucketed(window=0)


def test_a_window_pads_less_than_sorting_one_update() -> None:
    def slots(part: Batching) -> int:
        micros = [micro for update in islice(fed(part).draws(), 5) for micro in update]
        return sum(micro.counts.slots for micro in micros)

    # Windows of all five updates: micro-batches of four neighbours, 4 * (6 + 10 + ... + 42).
    assert slots(Bucketed(window=5)) == 4 * sum(range(6, 43, 4))
    assert slots(Bucketed(window=5)) < slots(Bucketed()) < slots(Padded())


def test_a_budget_of_tokens_bounds_updates_and_rows() -> None:
    feed = fed(TokenBudget(tokens=160, accum=2), batch=100)
    updates = list(islice(feed.draws(), 12))
    seen = [sum(micro.counts.nonpad for micro in update) for update in updates]
    assert all(160 - 42 < tokens <= 160 for tokens in seen[:5])
    rows = [micro for update in updates for micro in update]
    assert all(micro.counts.slots == micro.counts.nonpad <= 80 for micro in rows)
    whole = sorted(n for lengths in drawn(feed, 6) for n in lengths)
    assert whole[: len(whole)] == sorted(set(whole)), "no example twice before the epoch ends"


def test_a_budget_is_another_workload_and_a_window_another_setup() -> None:
    padded, window = ids("batching=padded"), ids("batching=bucketed", "batching.window=4")
    assert padded[0] == window[0]
    assert padded[1] != window[1]
    budgets = [ids("batching=token_budget", f"batching.tokens={n}")[0] for n in (2048, 4096)]
    assert len({padded[0], *budgets}) == 3
    words = ("batching=token_budget", "batching.tokens=4096", "batching.head=targets")
    assert ids(*words)[0] == budgets[1]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("batching.tokens=256", "accum=4"), "batching.tokens"),
        (("updates=null", "epochs=1"), "epochs"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(words: tuple[str, ...], key: str) -> None:
    with pytest.raises(UserError) as caught:
        config("batching=token_budget", "seq_len=128", *words)
    (fault,) = caught.value.faults
    assert fault.key == key


def test_a_stream_has_no_order_to_choose_from() -> None:
    chosen = config("batching=bucketed", "batching.window=2")
    parts = build_parts(chosen)

    @dataclass(frozen=True)
    class Streaming:
        def load(self, *, seq_len: int, cache: str) -> Corpus:
            return corpus(train=(), stream=object())

    object.__setattr__(parts, "data", Streaming())
    with pytest.raises(UserError, match="choosing the examples of an update"):
        load_corpus(chosen, parts)
