"""Tests of runner/memory/attention.py: the chosen kernel runs, or the job is refused."""

from __future__ import annotations

import pytest
import torch

from models.gpt import GPT
from runner.assemble import assemble
from runner.checks import build_parts
from runner.contracts import Unsupported
from runner.measure.evidence import MATH, Dispatched
from runner.measure.probe import probe
from runner.memory.attention import Attention
from runner.precision.fp32 import Fp32
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
