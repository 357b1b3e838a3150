"""Tests for runner/measure/flops.py and runner/measure/peaks.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.gpt import GPT
from models.gpt_network import GPTNetwork
from runner.measure.flops import counted_flops, update_flops
from runner.measure.peaks import PEAKS, peak_flops_per_s

ONE_LAYER = GPT(layers=1, heads=2, width=8, positions=16, vocab=32)
# matrices of its layer: 8*24 + 8*8 + 8*32 + 32*8 = 768; of its head: 32*8 = 256
FORWARD, BACKWARD = (
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward",
)


def update(network: GPTNetwork, rows: int, length: int) -> None:
    ids = torch.zeros(rows, length, dtype=torch.int64)
    F.linear(network.hidden(ids), network.head_weight).sum().backward()


# --- model FLOPs ------------------------------------------------------------------------------


def test_model_flops_of_one_layer_are_the_sum_worked_by_hand() -> None:
    # 3 tokens: matrices 2*1024*3 = 6,144; 1+2+3 = 6 pairs, 2 heads of width 4, a score and a
    # value at 2*4 each: 6*2*16 = 192; backward doubles both
    assert update_flops(ONE_LAYER.describe(), [3]) == 3 * (6_144 + 192)


def test_model_flops_see_documents_and_not_the_row_they_share() -> None:
    # 3 and 2 tokens: matrices 2*1024*5 = 10,240; 6 + 3 pairs: 9*32 = 288
    assert update_flops(ONE_LAYER.describe(), [3, 2]) == 3 * (10_240 + 288)
    assert update_flops(ONE_LAYER.describe(), [5]) == 3 * (10_240 + 15 * 32)


def test_gpt2_small_costs_six_flops_per_matrix_element_and_token_plus_attention() -> None:
    # N = 12*(12*768**2) + 50257*768 = 123,532,032; 6*N = 741,192,192 for a token. 1024 tokens
    # have 1024*1025/2 pairs, 512.5 for a token: 3*4*12 layers*768*512.5 = 56,678,400
    small = GPT(layers=12, heads=12, width=768, positions=1024, vocab=50257)
    per_token = 741_192_192 + 56_678_400
    assert update_flops(small.describe(), [1024]) == 1024 * per_token


# --- hardware FLOPs ---------------------------------------------------------------------------


def test_a_linear_layer_counts_its_forward_and_both_products_of_its_backward() -> None:
    layer = nn.Linear(8, 16, bias=False)
    x = torch.randn(3, 8, requires_grad=True)
    counted = counted_flops(lambda: layer(x).sum().backward())
    assert counted.total == 3 * (2 * 3 * 8 * 16)
    assert counted.by_operation == {"aten.mm": 2_304}


def test_attention_on_a_cpu_is_counted_forward_and_backward() -> None:
    q, k, v = torch.randn(3, 2, 4, 10, 8, requires_grad=True).unbind(0)
    counted = counted_flops(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    )
    # one product over the whole square: 2 rows * 4 heads * 2*10*10*8; two forward, five backward
    product = 2 * 4 * 2 * 10 * 10 * 8
    assert counted.by_operation == {FORWARD: 2 * product, BACKWARD: 5 * product}


def test_a_model_counts_the_slots_that_ran_and_not_only_real_tokens() -> None:
    counted = counted_flops(lambda: update(ONE_LAYER.build(0), rows=2, length=5))
    # matrices 3 * 2*1024*10; attention 7 products of 2 rows * 2 heads * 2*5*5*4
    assert counted.total == 3 * 20_480 + 7 * 800
    assert counted.by_operation[FORWARD] == 2 * 800
    # of documents of 3 and 2 tokens, 10 slots do more than the model's work
    assert counted.total > update_flops(ONE_LAYER.describe(), [3, 2])


def test_checkpointing_raises_hardware_flops_by_one_forward_of_the_blocks() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    network = ONE_LAYER.build(0)
    plain = counted_flops(lambda: update(network, rows=2, length=5))
    network.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in network.blocks)
    again = counted_flops(lambda: update(network, rows=2, length=5))
    # recomputation stops at the last tensor that backward needs, which is the input of mlp.down
    assert again.total - plain.total == 2 * (768 - 256) * 10 + 2 * 800
    assert update_flops(network.description, [5, 5]) == update_flops(ONE_LAYER.describe(), [5, 5])


def test_fake_tensors_count_as_real_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = counted_flops(lambda: update(ONE_LAYER.build(0), rows=2, length=5))
    with FakeTensorMode():
        fake = counted_flops(lambda: update(GPTNetwork(ONE_LAYER), rows=2, length=5))
    assert fake.by_operation == real.by_operation


def test_a_product_without_a_formula_is_named_instead_of_passed_over() -> None:
    a, b = torch.ones(32), torch.ones(32)
    counted = counted_flops(lambda: torch.dot(a, b))
    assert counted.total == 0
    assert counted.uncounted == ("aten.dot",)


def test_products_of_integers_count_as_any_other() -> None:
    a, b = torch.ones(32, 40, dtype=torch.int8), torch.ones(40, 24, dtype=torch.int8)
    counted = counted_flops(lambda: torch._int_mm(a, b))
    assert (counted.total, counted.uncounted) == (2 * 32 * 40 * 24, ())


def test_a_whole_update_leaves_nothing_uncounted() -> None:
    assert counted_flops(lambda: update(ONE_LAYER.build(0), 2, 5)).uncounted == ()


# --- peaks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "compute", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("A100-SXM4-40GB", "fp32", 19.5),
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2),
        ("NVIDIA B200", "fp8", 4500),
    ],
)
def test_a_known_device_has_its_dense_peak(device: str, compute: str, teraflops: float) -> None:
    assert peak_flops_per_s(device, compute) == teraflops * 10**12


@pytest.mark.parametrize(
    ("device", "compute"),
    [
        ("cpu", "fp32"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("NVIDIA GeForce RTX 4090 D", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("NVIDIA H200 NVL", "bf16"),
        ("NVIDIA A100-SXM4-80GB", "fp8"),
    ],
)
def test_an_unknown_device_or_format_has_no_peak(device: str, compute: str) -> None:
    assert peak_flops_per_s(device, compute) is None


def test_no_peak_is_a_sparse_figure() -> None:
    # dense tensor-core rates double with each halving of the format, never quadruple
    for rates in PEAKS.values():
        assert rates["bf16"] == pytest.approx(2 * rates["tf32"], rel=0.02)
        assert rates["fp16"] == rates["bf16"]
        if "fp8" in rates:
            assert rates["fp8"] == pytest.approx(2 * rates["bf16"], rel=0.02)
