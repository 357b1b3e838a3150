"""Tests of runner/memory/loss.py and chunks.py: every form is the full loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.gpt import GPT
from runner.checks import build_parts
from runner.contracts import IGNORE, MicroBatch, Recipe, ScalePolicy
from runner.memory.chunks import chunked_sum
from runner.memory.loss import Chunked, Full, Fused
from runner.objective import ClassWeighted, SequenceMean, TokenMean
from runner.precision.autocast import Autocast
from runner.step import measured_update
from tests.support import Quiet, example, examples, padded, relative_difference, training_of
from tests.test_checks import config, refused

LEVERS = {"chunked": Chunked(tokens=7), "one chunk": Chunked(tokens=10**6), "fused": Fused()}
OBJECTIVES = {
    "token_mean": TokenMean(),
    "sequence_mean": SequenceMean(),
    "class_weighted": ClassWeighted(classes={5: 3.0, 77: 0.0, 200: 0.25}, other=1.5),
}


def micros() -> list[MicroBatch]:
    """Two micro-batches of unequal lengths, padding and a masked prompt in them."""
    return padded([*examples(9, 2, 23), example(15, masked=11)], 2)


def updated(
    loss: Any, *, double: bool, tied: bool = True, **changes: Any
) -> tuple[float, list[Tensor]]:
    """Loss and gradient of one update of a small model."""
    spec = GPT(layers=2, heads=2, width=32, positions=64, vocab=264, tied=tied)
    model = spec.build(0)
    job = training_of(model.double() if double else model, loss=loss, **changes)
    drawn = with_weights(micros(), job.objective)
    outcome = measured_update(job, lambda: drawn, Quiet())
    return outcome.figures.tolist()[0], [p.grad for p in model.parameters()]  # type: ignore


def with_weights(drawn: Sequence[MicroBatch], objective: Any) -> list[MicroBatch]:
    return [replace(micro, weights=objective.weights(micro)) for micro in drawn]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("objective", list(OBJECTIVES))
@pytest.mark.parametrize("lever", list(LEVERS))
@pytest.mark.parametrize(("double", "within"), [(True, 1e-10), (False, 1e-5)])
def test_loss_and_gradient_are_those_of_the_full_loss(
    lever: str, objective: str, double: bool, within: float, tied: bool
) -> None:
    changes = {"double": double, "tied": tied, "objective": OBJECTIVES[objective]}
    loss, gradient = updated(Full(), **changes)  # type: ignore
    other, found = updated(LEVERS[lever], **changes)  # type: ignore
    assert other == pytest.approx(loss, rel=within)
    assert relative_difference(found, gradient) < within


@pytest.mark.parametrize("lever", list(LEVERS))
@pytest.mark.parametrize(
    ("dtype", "scaling"), [("bfloat16", None), ("float16", ScalePolicy(init=1024.0))]
)
def test_under_autocast_they_differ_from_the_full_loss_by_rounding_only(
    lever: str, dtype: str, scaling: ScalePolicy | None
) -> None:
    recipe = Autocast(dtype=dtype, scaling=scaling)
    exact, truth = updated(Full(), double=True)
    loss, gradient = updated(Full(), double=False, recipe=recipe)
    other, found = updated(LEVERS[lever], double=False, recipe=recipe)
    # as far from the truth as the full loss in the same format is, and no farther
    assert relative_difference(found, truth) < 1.2 * relative_difference(gradient, truth) + 1e-4
    assert other == pytest.approx(exact, abs=2e-3)
    assert loss == pytest.approx(exact, abs=2e-3)


@pytest.mark.parametrize("lever", list(LEVERS))
def test_the_head_product_runs_in_the_format_of_autocast(lever: str) -> None:
    hidden = torch.randn(2, 5, 32, requires_grad=True)
    head = torch.randn(264, 32)
    targets = torch.randint(0, 264, (2, 5))
    rounded = LEVERS[lever].loss_sum(hidden.bfloat16(), head.bfloat16(), targets, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = LEVERS[lever].loss_sum(hidden, head, targets, None)
    exact = LEVERS[lever].loss_sum(hidden, head, targets, None)
    assert found.dtype == rounded.dtype == torch.float32
    assert found == rounded
    assert abs(found - exact) > 0.01


@pytest.mark.parametrize("lever", list(LEVERS))
def test_a_micro_batch_without_a_target_contributes_zero(lever: str) -> None:
    hidden = torch.randn(1, 3, 8, requires_grad=True)
    head = torch.randn(16, 8, requires_grad=True)
    loss = LEVERS[lever].loss_sum(hidden, head, torch.full((1, 3), IGNORE), None)
    loss.backward()
    assert loss.item() == 0
    assert not hidden.grad.any()  # type: ignore
    assert not head.grad.any()  # type: ignore


@pytest.mark.parametrize("lever", list(LEVERS))
def test_nothing_at_all_costs_nothing(lever: str) -> None:
    hidden = torch.randn(1, 0, 8, requires_grad=True)
    head = torch.randn(16, 8, requires_grad=True)
    loss = LEVERS[lever].loss_sum(hidden, head, torch.zeros(1, 0, dtype=torch.int64), None)
    loss.backward()
    assert loss.item() == 0
    assert not head.grad.any()  # type: ignore


@pytest.mark.parametrize("lever", list(LEVERS))
def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_theirs(lever: str) -> None:
    hidden = torch.randn(1, 9, 8, dtype=torch.float64)
    head = torch.randn(16, 8, dtype=torch.float64)
    targets = torch.randint(0, 16, (1, 9))
    gradients = []
    for loss in (Full(), LEVERS[lever]):
        own = hidden.clone().requires_grad_()
        loss.loss_sum(own, head, targets, None).backward()  # type: ignore
        gradients.append(own.grad)
    assert torch.allclose(gradients[0], gradients[1], atol=1e-12)  # type: ignore
    assert head.grad is None


def test_no_more_logits_are_live_than_those_of_one_chunk() -> None:
    rows: list[int] = []

    def note(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        rows.append(hidden.shape[0] * hidden.shape[1])
        return Full().loss_sum(hidden, head, targets, weights)

    hidden = torch.randn(2, 10, 8, requires_grad=True)
    loss = chunked_sum(note, 6, hidden, torch.randn(16, 8), torch.ones(2, 10).long(), None)
    loss.backward()  # type: ignore
    assert rows == [6, 6, 6, 2] * 2


def test_a_torch_without_the_fused_loss_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = GPT(layers=1, heads=2, width=32, positions=64, vocab=264).describe()
    cpu = torch.device("cpu")
    assert Fused().refusal(shapes, Recipe(), cpu) is None
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions")
    assert "no linear_cross_entropy" in str(Fused().refusal(shapes, Recipe(), cpu))


@pytest.mark.parametrize("option", ["chunked", "fused"])
def test_a_loss_that_is_not_compiled_is_refused_with_compile(option: str) -> None:
    (fault,) = refused(f"memory/loss={option}", "compile=default")
    assert fault.key == "memory/loss"
    assert "compile=off" in fault.next_step
    assert build_parts(config("memory/loss=chunked")).levers["memory.loss"].tokens == 1024
