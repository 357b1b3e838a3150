"""Padding to a fixed length and sorting by length: the same update, other slots."""

from __future__ import annotations

import random

import pytest

from runner.contracts import Batching, Counts
from runner.data.packed import Packed
from runner.data.padded import Bucketed, Padded, PaddedMax
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
