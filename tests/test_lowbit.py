"""Recipes of narrow products: emulated against real layers, conversion, evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchao.float8.config import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.prototype.quantized_training.int8_mixed_precision import (
    Int8MixedPrecisionTrainingConfig,
    Int8MixedPrecisionTrainingLinear,
)
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from models.gpt import GPT
from runner.contracts import UserError
from runner.measure.evidence import Watch
from runner.precision.blockwise import Blockwise
from runner.precision.conversion import Conversion, conversion_of
from runner.precision.delayed import Delayed
from runner.precision.float8 import Float8
from runner.precision.int8 import Int8
from runner.precision.linear import Operand, Products, RoundedLinear
from runner.precision.lowbit import LowBit
from runner.precision.mxfp8 import Mxfp8, mx_layer
from runner.precision.narrow_weights import Int4Weights, TernaryWeights
from runner.precision.nvfp4 import Nvfp4
from runner.precision.policies import int4, ternary
from runner.precision.tf32 import Tf32
from tests.support import tiny_gpt

RECIPES: list[LowBit] = [
    Float8(scales="tensorwise"),
    Float8(scales="rowwise"),
    Float8(scales="rowwise_with_gw_hp", rest="fp32"),
    Delayed(history=4),
    Blockwise(),
    Mxfp8(),
    Nvfp4(),
    Int8(),
]


def layer(inputs: int = 64, outputs: int = 96, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias)


def passed(module: nn.Module, x: Tensor, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Output, and the gradients of input and weight for a fixed output gradient."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    out = module(x)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    out.backward(gradient.to(out.dtype) * 1e-3)
    assert x.grad is not None
    weight: Any = module.weight
    return out.detach(), x.grad, weight.grad.clone()


def inputs(rows: int = 64, width: int = 64) -> Tensor:
    drawn = torch.randn(2, rows // 2, width, generator=torch.Generator().manual_seed(2))
    return drawn * torch.logspace(-2, 2, rows // 2)[:, None]


def sharing_weight(linear: nn.Linear, other: nn.Module) -> nn.Module:
    other.weight, other.bias = linear.weight, linear.bias
    return other


# --- emulated and real agree --------------------------------------------------------------------


@pytest.mark.parametrize("scales", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_emulation_is_torchao_s_own_emulation(scales: str, dtype: torch.dtype) -> None:
    linear, x = layer(), inputs().to(dtype)
    ours = passed(RoundedLinear(linear, Float8(scales=scales).rounding()), x)
    config = replace(Float8LinearConfig.from_recipe_name(scales), emulate=True)
    theirs = passed(sharing_weight(linear, Float8Linear(64, 96, config=config)), x)
    for own, other in zip(ours, theirs, strict=True):
        assert own.dtype == other.dtype
        torch.testing.assert_close(
            own, other, rtol=2e-5 if dtype == torch.float32 else 2**-7, atol=1e-6
        )


def test_tensorwise_emulation_agrees_with_scaled_mm_on_real_fp8_operands() -> None:
    linear, x = layer(), inputs().to(torch.bfloat16)
    recipe = Float8(scales="tensorwise")
    ours = passed(RoundedLinear(linear, recipe.rounding()), x)
    with Watch() as watch:
        theirs = passed(recipe.native(linear).train(), x)
    assert set(watch.result().flops) == {
        "float8_e4m3fn x float8_e4m3fn",
        "float8_e4m3fn x float8_e5m2",
    }
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.float(), other.float(), rtol=2**-6, atol=1e-4)


def test_mxfp8_emulation_is_torchao_s() -> None:
    linear, x = layer(), inputs()
    ours = passed(RoundedLinear(linear, Mxfp8().rounding()), x)
    made = MXFP8Linear(64, 96, kernel_preference=KernelPreference.EMULATED)
    theirs = passed(sharing_weight(linear, made), x)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [2, 42])
def test_the_mxfp8_layer_casts_its_fp32_weight_and_takes_any_rows(rows: int) -> None:
    """As on hardware, but for torchao's own emulation of the kernels; the weight here is one that
    BF16 holds, so that the cast changes nothing."""
    linear, x = layer(), inputs(rows).to(torch.bfloat16)
    with torch.no_grad():
        linear.weight.copy_(linear.weight.bfloat16())
    made = mx_layer(linear, KernelPreference.EMULATED, multiple=32).train()
    ours = passed(RoundedLinear(linear, Mxfp8().rounding()), x)
    for own, other in zip(ours, passed(made, x), strict=True):
        torch.testing.assert_close(own.float(), other.float(), rtol=2**-6, atol=1e-4)
    assert linear.weight.grad is not None and linear.weight.grad.dtype == torch.float32


def test_int8_emulation_is_torchao_s_integer_arithmetic() -> None:
    linear, x = layer(bias=False), inputs().reshape(-1, 64)
    ours = passed(RoundedLinear(linear, Int8().rounding()), x)
    made = Int8MixedPrecisionTrainingLinear(
        64, 96, bias=False, config=Int8MixedPrecisionTrainingConfig()
    )
    theirs = passed(sharing_weight(linear, made), x)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("recipe", "dtype", "rtol", "atol"),
    [
        (Float8(scales="tensorwise"), torch.bfloat16, 2**-6, 1e-4),
        (Int8(), torch.float32, 1e-5, 1e-5),
    ],
    ids=["fp8_tensorwise", "int8"],
)
@pytest.mark.parametrize("rows", [2, 42])
def test_native_layers_take_any_number_of_rows_and_keep_names(
    recipe: LowBit, dtype: torch.dtype, rtol: float, atol: float, rows: int
) -> None:
    """21 tokens to a row of two: the product of the weight's gradient sums over 42 of them."""
    linear, x = layer(), inputs(rows).to(dtype)
    native = recipe.native(linear).train()
    ours = passed(RoundedLinear(linear, recipe.rounding()), x)
    for own, other in zip(ours, passed(native, x), strict=True):
        torch.testing.assert_close(own.float(), other.float(), rtol=rtol, atol=atol)
    assert [name for name, _ in native.named_parameters()] == ["weight", "bias"]
    assert set(native.state_dict()) == {"weight", "bias"}
    assert torch.equal(native.eval()(x.float()), linear(x.float()))


# --- the layer itself ---------------------------------------------------------------------------


def test_a_layer_whose_operands_are_kept_is_the_linear_layer() -> None:
    linear, x = layer(), inputs()
    same = Operand(format="float32", round=lambda t: t)
    both = (same, same)
    rounded = RoundedLinear(linear, Products(output=both, grad_input=both, grad_weight=both))
    for own, other in zip(passed(rounded, x), passed(linear, x), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{type(r).__name__} {r.narrow}")
def test_every_emulation_takes_odd_rows_and_is_out_of_the_way_in_evaluation(
    recipe: LowBit,
) -> None:
    linear, x = layer(), inputs(42)
    emulated = RoundedLinear(linear, recipe.rounding())
    exact = passed(linear, x)
    products = recipe.operands().values()
    for own, other, formats in zip(passed(emulated, x), exact, products, strict=True):
        error = float((own - other).norm() / other.norm())
        if recipe.wide in formats:
            assert error < 1e-6
        else:
            assert 1e-4 < error < (0.25 if recipe.narrow == "fp4" else 0.12)
    assert torch.equal(emulated.eval()(x), linear(x))


@pytest.mark.parametrize(("recipe", "policy"), [(Int4Weights(), int4), (TernaryWeights(), ternary)])
def test_narrow_weights_train_straight_through_and_stay_narrow_in_evaluation(
    recipe: Any, policy: Any
) -> None:
    linear, x = layer(), inputs()
    made = recipe.native(linear)
    narrow = policy(linear.weight.detach())
    out, grad_x, grad_weight = passed(made, x)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)) * 1e-3
    torch.testing.assert_close(out, F.linear(x, narrow, linear.bias))
    torch.testing.assert_close(grad_x, gradient @ narrow)
    flat = gradient.reshape(-1, 96)
    torch.testing.assert_close(grad_weight, flat.t() @ x.reshape(-1, 64), rtol=1e-5, atol=1e-6)
    assert torch.equal(made.eval()(x), F.linear(x, narrow, linear.bias))


def test_recomputing_a_forward_pass_moves_no_history_and_changes_no_gradient() -> None:
    linear, x = layer(), inputs()
    found = []
    for again in (False, True):
        made = RoundedLinear(linear, Delayed(history=4).rounding())
        for _ in range(3):
            run = (lambda t, m=made: checkpoint(m, t, use_reentrant=False)) if again else made
            y = x.clone().requires_grad_()
            linear.zero_grad()
            run(y).square().mean().backward()
        assert y.grad is not None and linear.weight.grad is not None
        states = [buffer.clone() for buffer in made.buffers()]
        found.append([y.grad, linear.weight.grad.clone(), *states])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# --- conversion and evidence --------------------------------------------------------------------


def test_layers_are_converted_and_left_by_name_with_the_reason() -> None:
    model = GPT(layers=1, heads=2, width=48, positions=16, vocab=272, tied=False).build(0)
    done = Mxfp8().emulation()
    assert done is not None
    with pytest.raises(UserError, match="converts none of this model's layers"):
        done.prepare(model)
    model = GPT(
        layers=1, heads=2, width=96, positions=16, vocab=272, mlp_ratio=3, tied=False
    ).build(0)
    model.blocks[0].mlp.up = nn.Linear(96, 40)  # type: ignore
    model.blocks[0].mlp.down = nn.Linear(40, 96)  # type: ignore
    found = conversion_of(done.prepare(model))
    assert found is not None
    assert found.converted == {
        "blocks.0.attn.qkv": (288, 96),
        "blocks.0.attn.out": (96, 96),
    }
    assert found.left["blocks.0.mlp.up"] == "40 is not a multiple of 32"
    assert found.left["blocks.0.mlp.down"] == "40 is not a multiple of 32"
    assert "head" in found.left["head"] and "looked up" in found.left["embed"]
    assert found.to_json()["count"] == 2 and found.to_json()["of"] == 7


def test_parameters_keep_their_names_and_weights_load_as_before() -> None:
    plain, made = tiny_gpt(), Mxfp8().emulation().prepare(tiny_gpt())  # type: ignore
    assert [n for n, _ in made.named_parameters()] == [n for n, _ in plain.named_parameters()]
    made = Delayed().emulation().prepare(tiny_gpt())  # type: ignore
    assert set(made.state_dict()) == set(plain.state_dict())
    assert any("states" in name for name, _ in made.named_buffers())


def test_expected_flops_are_those_of_three_products_by_hand() -> None:
    products = {"output": ("a", "b"), "grad_input": ("b", "c"), "grad_weight": ("b", "a")}
    found = Conversion(converted={"x": (3, 5), "y": (7, 2)}, left={}, products=products)
    # 2 FLOPs * 10 slots * (15 + 14) elements; products of a and b: the output and the gradient.
    assert found.expected(10) == {"a x b": 2 * 580, "b x c": 580}
    assert found.expected(10, frozen=["y"]) == {"a x b": 580 + 300, "b x c": 580}


def test_a_converted_layer_that_runs_in_another_format_is_a_contradiction() -> None:
    model = Float8(scales="rowwise", rest="fp32").emulation().prepare(tiny_gpt())  # type: ignore
    found = conversion_of(model)
    assert found is not None
    ids = torch.zeros(1, 16, dtype=torch.long)
    for broken in (False, True):
        if broken:
            plain = layer(32, 128)
            model.blocks[0].mlp.up = plain
        with Watch() as watch:
            model.hidden(ids, None, None).sum().backward()
        text = watch.result().conversion_contradiction(found.expected(16))
        if not broken:
            assert text is None
            assert watch.result().shares_of(found.expected(16)) == {
                "float8_e4m3fn x float8_e4m3fn": 1.0
            }
    # Of 12 + 12 parts of work (3 + 1 + 4 + 4 a block) 4 ran in FP32.
    assert text is not None and "float8_e4m3fn x float8_e4m3fn 83%" in text


def test_tf32_is_emulated_over_fp32_whatever_the_dimensions() -> None:
    emulation = Tf32().emulation()
    assert emulation is not None
    model = emulation.prepare(GPT(layers=1, heads=1, width=7, positions=8, vocab=11).build(0))
    found = conversion_of(model)
    assert found is not None and len(found.converted) == 4
    assert emulation.formats["compute"] == "tf32"


def test_a_width_that_no_fp8_kernel_takes_is_refused_by_name_and_an_odd_vocabulary_is_not() -> None:
    """712 is 44.5 times 16; 259 rows are the head's, which no recipe converts."""
    recipe = Float8(scales="tensorwise").emulation()
    assert recipe is not None
    with pytest.raises(UserError, match=r"blocks\.0\.attn\.out: 712 is not a multiple of 16"):
        recipe.prepare(GPT(layers=1, heads=8, width=712, positions=8, vocab=259).build(0))
    made = recipe.prepare(GPT(layers=1, heads=2, width=32, positions=8, vocab=259).build(0))
    found = conversion_of(made)
    assert found is not None and len(found.converted) == 4
