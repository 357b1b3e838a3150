"""Tests for runner/objective.py: an update's objective does not depend on its micro-batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from runner.contracts import IGNORE, Batching, Counts, Example, MicroBatch, Objective
from runner.data.packed import Packed
from runner.data.padded import Bucketed, Padded, PaddedMax
from runner.data.token_budget import TokenBudget
from runner.objective import ClassWeighted, SequenceMean, TokenMean

VOCAB = 16


def documents(targets: list[int]) -> list[Example]:
    """Documents with the given numbers of targets."""
    draw = np.random.default_rng(0)
    return [
        Example(ids=draw.integers(VOCAB, size=n + 1), loss=np.ones(n + 1, np.bool_))
        for n in targets
    ]


def masked(example: Example) -> Example:
    return Example(ids=example.ids, loss=np.zeros(example.length, np.bool_))


def split(examples: list[Example], size: int) -> list[MicroBatch]:
    return Padded().micro_batches(examples, size=size, pad_id=0, seq_len=64)


def loss_sum(micro: MicroBatch, weights: Tensor | None) -> float:
    """Weighted summed cross-entropy under fixed logits that depend on the input token alone."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)).double()
    losses = torch.nn.functional.cross_entropy(
        table[micro.input_ids].transpose(1, 2),
        micro.targets,
        reduction="none",
        ignore_index=IGNORE,
    )
    return float((losses if weights is None else losses * weights).sum())


def update_loss(objective: Objective, micros: list[MicroBatch]) -> float:
    divisor = objective.denominator(micros)
    return sum(loss_sum(micro, objective.weights(micro)) / divisor for micro in micros)


OBJECTIVES: list[Objective] = [
    TokenMean(),
    SequenceMean(),
    ClassWeighted(classes={3: 0.5, 7: 4.0}, other=1.5),
]


def test_every_objective_keeps_the_contract() -> None:
    assert all(isinstance(objective, Objective) for objective in OBJECTIVES)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_token_mean_divides_by_the_targets_of_the_whole_update(size: int) -> None:
    """Case C01: 1 + 2 + 5 + 12 targets, however they are divided."""
    assert TokenMean().denominator(split(documents([1, 2, 5, 12]), size)) == 20.0


def test_token_mean_weighs_every_target_the_same() -> None:
    assert TokenMean().weights(split(documents([1, 2]), 2)[0]) is None


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_accumulation_does_not_change_the_loss_of_an_update(objective: Objective) -> None:
    """Case C01, where the mean of micro-batch means is off by more than a thousandth."""
    examples = documents([1, 2, 5, 12])
    whole = update_loss(objective, split(examples, 4))
    for size in (1, 2, 3):
        assert update_loss(objective, split(examples, size)) == pytest.approx(whole, rel=1e-12)


def test_a_mean_of_micro_batch_means_would_be_noticed() -> None:
    micros = split(documents([1, 2, 5, 12]), 1)
    naive = sum(loss_sum(m, None) / m.counts.useful for m in micros) / len(micros)
    assert abs(naive - update_loss(TokenMean(), micros)) > 1e-3


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_a_micro_batch_with_nothing_valid_contributes_zero_in_any_order(
    objective: Objective,
) -> None:
    """Case C02."""
    normal, empty = documents([4, 3])
    alone = update_loss(objective, split([normal], 1))
    for examples in ([normal, masked(empty)], [masked(empty), normal]):
        micros = split(examples, 1)
        assert update_loss(objective, micros) == pytest.approx(alone, rel=1e-12)
        nothing = min(micros, key=lambda micro: micro.counts.useful)
        assert loss_sum(nothing, objective.weights(nothing)) == 0.0


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_an_update_with_nothing_valid_has_the_denominator_zero(objective: Objective) -> None:
    assert objective.denominator(split([masked(e) for e in documents([2, 3])], 1)) == 0.0


def row(ids: list[int]) -> Example:
    return Example(ids=np.array(ids), loss=np.ones(len(ids), np.bool_))


def test_sequence_mean_weighs_each_target_by_its_examples_target_count() -> None:
    micro = split([row([1, 2]), masked(row([8, 9])), row([3, 4, 5, 6, 7])], 3)[0]
    weights = SequenceMean().weights(micro)
    assert weights is not None
    assert weights.dtype == torch.float32
    assert weights.tolist() == [[1, 0, 0, 0, 0], [0] * 5, [0.25] * 4 + [0]]
    assert SequenceMean().denominator([micro]) == 2.0


def test_sequence_mean_tells_examples_apart_that_share_a_row() -> None:
    """One row with documents of 3 and 2 tokens, then padding."""
    micro = MicroBatch(
        input_ids=torch.tensor([[1, 2, 3, 4, 5, 0]]),
        targets=torch.tensor([[2, 3, IGNORE, 5, IGNORE, IGNORE]]),
        sequence=torch.tensor([[0, 0, 0, 1, 1, -1]]),
        lengths=(3, 2),
        counts=Counts(useful=3, nonpad=5, slots=6),
    )
    weights = SequenceMean().weights(micro)
    assert weights is not None
    assert weights.tolist() == [[0.5, 0.5, 0, 1, 0, 0]]
    assert SequenceMean().denominator([micro]) == 2.0


def test_class_weighted_weighs_by_the_target_not_by_the_input() -> None:
    objective = ClassWeighted(classes={7: 4.0, 0: 0.0}, other=0.5)
    micro = split([row([7, 1, 7]), row([2, 0])], 2)[0]
    weights = objective.weights(micro)
    assert weights is not None
    assert weights.tolist() == [[0.5, 4.0, 0.0], [0.0, 0.0, 0.0]]
    assert objective.denominator([micro]) == 4.5


def test_class_weighted_divides_by_the_weights_that_are_applied() -> None:
    """0.1 in FP32 is 0.100000001490116...; equal weights cancel exactly."""
    micros = split(documents([3, 4]), 1)
    plain = update_loss(TokenMean(), micros)
    tenth = ClassWeighted(classes={}, other=0.1)
    assert update_loss(tenth, micros) == pytest.approx(plain, rel=1e-12)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_class_weighted_refuses_a_weight_that_is_no_weight(weight: float) -> None:
    with pytest.raises(ValueError, match=r"5: given .*; allowed: a finite weight, 0 or more"):
        ClassWeighted(classes={5: weight})
    with pytest.raises(ValueError, match=r"other: given .*; allowed: a finite weight, 0 or more"):
        ClassWeighted(classes={}, other=weight)


def test_class_weighted_refuses_a_negative_token_such_as_the_ignored_target() -> None:
    with pytest.raises(ValueError, match="allowed: token ids"):
        ClassWeighted(classes={IGNORE: 1.0})


BATCHINGS: list[Batching] = [
    PaddedMax(),
    Padded(),
    Bucketed(),
    Packed(),
    TokenBudget(tokens=9),
    TokenBudget(tokens=5),
]


@pytest.mark.parametrize("batching", BATCHINGS, ids=repr)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_objectives_by_hand_in_every_batching_and_split(batching: Batching, size: int) -> None:
    """Tokens 0, 1, 2, 3 have probabilities 1/8, 1/2, 1/4, 1/8: their losses are 3, 1, 2, 3 ln 2.

    Targets 1 1; 3; 2 2 3 1: sums 2, 3, 8 over 2, 1, 4 targets. Over targets 13 / 7; over examples
    (1 + 3 + 2) / 3; with weight 2 for token 3, (2 + 6 + 11) / (2 + 2 + 5).
    """
    chosen = [row([0, 1, 1]), row([0, 3]), row([0, 2, 2, 3, 1])]
    micros = batching.micro_batches(chosen, size=size, pad_id=1, seq_len=8)
    logits = torch.tensor([1 / 8, 1 / 2, 1 / 4, 1 / 8], dtype=torch.float64).log()

    def loss(objective: Objective) -> float:
        total = 0.0
        for micro in micros:
            there = logits.expand(*micro.targets.shape, 4).transpose(1, 2)
            losses = torch.nn.functional.cross_entropy(
                there, micro.targets, reduction="none", ignore_index=IGNORE
            )
            weights = objective.weights(micro)
            total += float((losses if weights is None else losses * weights).sum())
        return total / objective.denominator(micros) / math.log(2)

    assert loss(TokenMean()) == pytest.approx(13 / 7, rel=1e-6)
    assert loss(SequenceMean()) == pytest.approx(2, rel=1e-6)
    assert loss(ClassWeighted(classes={3: 2.0}, other=1.0)) == pytest.approx(19 / 9, rel=1e-6)
