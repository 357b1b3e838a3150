"""Tests of runner/measure/evidence.py: what ran is what is reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from runner.measure.evidence import MATH, Dispatched, Watch
from runner.measure.probe import probe
from runner.optimizer import AdamW
from runner.precision.autocast import Autocast
from runner.precision.fp32 import Fp32
from tests.support import examples, padded, tiny_gpt, training_of


def dispatched(**changes: Any) -> Dispatched:
    training = training_of(tiny_gpt(), optimizer=AdamW(lr=1e-3), **changes)
    return probe(training, [padded(examples(20, 30), 2)])[1].dispatched


def test_a_product_counts_two_flops_per_multiply_add_under_its_operands() -> None:
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    with Watch() as watch:
        a @ b
        a.bfloat16() @ b.bfloat16()
        torch.addmm(torch.ones(5), a, b)
    flops = 2 * 3 * 4 * 5
    expected = {"float32 x float32": 2 * flops, "bfloat16 x bfloat16": flops}
    assert watch.result().flops == expected
    assert watch.result().total == 3 * flops
    assert watch.result().attention_operators == (MATH,)


def test_fp32_runs_in_fp32_only() -> None:
    found = dispatched(recipe=Fp32())
    assert found.share("float32") == 1.0
    assert found.contradiction("fp32") is None
    assert found.contradiction("tf32") is None


def test_bf16_autocast_multiplies_bf16_only() -> None:
    found = dispatched(recipe=Autocast(dtype="bfloat16"))
    assert found.share("bfloat16") == 1.0
    assert found.contradiction("bf16") is None
    assert "declared fp32" in str(found.contradiction("fp32"))


def test_an_autocast_that_is_not_in_force_is_a_contradiction() -> None:
    found = dispatched(recipe=Autocast(dtype="bfloat16"), forward_contexts=list)
    assert "declared bf16" in str(found.contradiction("bf16"))


def test_the_attention_operator_that_ran_is_named() -> None:
    assert dispatched().attention_operators == ("_scaled_dot_product_flash_attention_for_cpu",)
    with sdpa_kernel(SDPBackend.MATH):
        assert dispatched().attention_operators == (MATH,)


def test_mixed_operands_count_for_neither_format() -> None:
    found = Dispatched(
        flops={"float32 x float32": 50, "bfloat16 x bfloat16": 940, "bfloat16 x float32": 10},
        attention={},
    )
    assert found.share("bfloat16") == pytest.approx(0.94)
    assert found.contradiction("bf16") is not None


def test_watching_changes_no_result() -> None:
    def losses(watched: bool) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(4, 8, requires_grad=True)
        if watched:
            with Watch():
                (x @ x.T).sum().backward()
        else:
            (x @ x.T).sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(losses(True), losses(False))
