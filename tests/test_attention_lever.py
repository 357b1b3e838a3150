"""Tests of runner/memory/attention.py: the chosen kernel runs, or the job is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.gpt import GPT
from runner.assemble import assemble
from runner.checks import build_parts
from runner.contracts import Unsupported
from runner.data.packed import Packed
from runner.measure.evidence import MATH, Dispatched
from runner.measure.probe import probe
from runner.memory.attention import Attention
from runner.precision.fp32 import Fp32
from runner.step import measured_update
from tests.support import PAD, Quiet, examples, padded, relative_difference, tiny_gpt, training_of
from tests.test_assemble import CPU, SMALL, corpus
from tests.test_checks import config

FLASH = "_scaled_dot_product_flash_attention_for_cpu"
SHAPES = GPT(layers=1, heads=2, width=32, positions=64, vocab=264).describe()


def operators(*words: str) -> tuple[str, ...]:
    chosen = config(*SMALL, *words)
    job = assemble(chosen, build_parts(chosen), CPU, corpus())
    return probe(job.training, job.feed.probes(2))[1].dispatched.attention_operators


@pytest.mark.parametrize(("backend", "expected"), [("math", MATH), ("flash", FLASH)])
def test_the_chosen_kernel_is_the_one_that_runs(backend: str, expected: str) -> None:
    assert operators(f"memory/attention={backend}") == (expected,)


def test_kernels_give_the_same_losses_to_rounding() -> None:
    losses = []
    for backend in ("math", "flash"):
        chosen = config(*SMALL, f"memory/attention={backend}")
        job = assemble(chosen, build_parts(chosen), CPU, corpus())
        losses.append(job.evaluation.run(job.training.model, 0).eval_loss)
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


BACKENDS = ["flash", "efficient", "cudnn"]


@pytest.mark.parametrize("padded_to", [None, 20], ids=["one document", "packed"])
@pytest.mark.parametrize(("double", "within"), [(True, 1e-10), (False, 1e-5)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_losses_and_gradients_are_those_of_separate_products(
    backend: str, double: bool, within: float, padded_to: int | None
) -> None:
    found = []
    for chosen in ("math", backend):
        lever = Attention(backend=chosen)
        model: Any = tiny_gpt(double=double)
        description = SHAPES if not double else model.description
        if lever.refusal(description, Fp32(), CPU):
            pytest.skip(f"{chosen} does not run here")
        micros = padded(examples(9, 20, 13), 3)
        if padded_to:  # documents of one row
            micros = Packed().micro_batches(examples(9, 20, 13), size=3, pad_id=PAD, seq_len=64)
        job = training_of(
            model,
            forward_contexts=lambda lever=lever: [lever.forward()],
            backward_contexts=lambda lever=lever: [lever.backward()],
        )
        outcome = measured_update(job, lambda micros=micros: micros, Quiet())
        found.append((outcome.figures.tolist()[0], [p.grad for p in model.parameters()]))  # type: ignore
    assert found[1][0] == pytest.approx(found[0][0], rel=within)
    assert relative_difference(found[1][1], found[0][1]) < within


@pytest.mark.parametrize("backend", ["efficient", "cudnn"])
def test_a_kernel_that_a_cpu_does_not_have_is_refused_never_replaced(backend: str) -> None:
    chosen = config(*SMALL, f"memory/attention={backend}")
    with pytest.raises(Unsupported, match=f"memory/attention={backend}: "):
        assemble(chosen, build_parts(chosen), CPU, corpus())


def test_another_operator_than_the_declared_one_is_a_contradiction() -> None:
    lever = Attention(backend="flash")
    flash = Dispatched(flops={}, attention={FLASH: 2})
    math = Dispatched(flops={}, attention={})
    assert lever.contradiction(flash) is None
    assert "the attention that ran is math" in str(lever.contradiction(math))
    assert Attention(backend="auto").contradiction(math) is None
    assert "math" in str(Attention(backend="math").contradiction(flash))


def test_trying_a_kernel_moves_no_random_state() -> None:
    before = torch.get_rng_state()
    assert Attention(backend="flash").refusal(SHAPES, Fp32(), CPU) is None
    assert torch.equal(torch.get_rng_state(), before)
