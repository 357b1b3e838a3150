"""Scaling policies against hand-worked values and against torchao's own tensors."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.prototype.quantized_training.bitnet import get_bitnet_scale, quantize_bitnet_weight
from torchao.prototype.quantized_training.int8 import quantize_int8_rowwise

from runner.precision.formats import E2M1, TF32
from runner.precision.formats import E4M3 as E4M3_FORMAT
from runner.precision.history import DelayedScale
from runner.precision.policies import (
    E4M3,
    E5M2,
    e2m1,
    fp8,
    fp8_blocks,
    int4,
    int8,
    mxfp8,
    nvfp4,
    ternary,
    tf32,
)
from runner.precision.rounding import round_to

EMULATED = LinearMMConfig(*[ScaledMMConfig(True, False, False, False)] * 3)


def wide_range(rows: int = 48, columns: int = 64) -> Tensor:
    """Rows from 1e-3 to 1e3 in size, with one outlier."""
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    found = drawn * torch.logspace(-3, 3, rows)[:, None]
    found[3, 5] = 500.0
    return found


# --- against torchao ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("power_of_2", [False, True])
def test_fp8_by_tensor_and_by_row_is_torchao_s(dtype: torch.dtype, power_of_2: bool) -> None:
    x = wide_range()
    cast = partial(
        hp_tensor_to_float8_dynamic, x, dtype, EMULATED, round_scales_to_power_of_2=power_of_2
    )
    whole = cast().to_original_precision()
    rows = cast(
        scaling_granularity=ScalingGranularity.AXISWISE, axiswise_dim=-1
    ).to_original_precision()
    assert torch.equal(fp8(x, dtype, "tensor", power_of_2=power_of_2), whole)
    assert torch.equal(fp8(x, dtype, "row", power_of_2=power_of_2), rows)
    assert not torch.equal(whole, rows)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_mxfp8_is_torchao_s_tensor(dtype: torch.dtype) -> None:
    x = wide_range()
    theirs = MXTensor.to_mx(x, dtype, 32, ScaleCalculationMode.RCEIL).dequantize(torch.float32)
    assert torch.equal(mxfp8(x, dtype), theirs)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_an_infinity_or_nan_under_mxfp8_stays_one_as_in_torchao_s_tensor(
    dtype: torch.dtype,
) -> None:
    x = wide_range()
    x[2, 7], x[5, 40], x[6, 3] = torch.inf, torch.nan, -torch.inf
    theirs = MXTensor.to_mx(x, dtype, 32, ScaleCalculationMode.RCEIL).dequantize(torch.float32)
    torch.testing.assert_close(mxfp8(x, dtype), theirs, rtol=0, atol=0, equal_nan=True)
    assert mxfp8(x, dtype)[2, 7].item() == torch.inf
    assert mxfp8(x, dtype)[5, 32:].isnan().all()


@pytest.mark.parametrize("size", [1.0, 1e-20])
def test_nvfp4_is_torchao_s_tensor_however_small_the_values(size: float) -> None:
    x = wide_range() * size
    scale = per_tensor_amax_to_scale(x.abs().max())
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(torch.float32)
    assert theirs.count_nonzero() > 0
    assert torch.equal(nvfp4(x), theirs)


def test_nvfp4_of_zeros_is_zeros() -> None:
    assert torch.equal(nvfp4(torch.zeros(16, 32)), torch.zeros(16, 32))


def test_int8_and_ternary_are_torchao_s() -> None:
    x = wide_range()
    codes, scale = quantize_int8_rowwise(x)
    assert torch.equal(int8(x), codes * scale[:, None])
    mean = get_bitnet_scale(x)
    assert torch.equal(ternary(x), quantize_bitnet_weight(x, mean) * mean)


# --- by hand ------------------------------------------------------------------------------------


def test_e2m1_takes_the_nearest_of_its_eight_sizes_ties_to_even_and_saturates() -> None:
    given = [0.2, 0.25, 0.75, 1.2, 1.25, 1.75, 2.4, 2.5, 3.5, 4.9, 5.0, 5.1, 7.0, -0.3, -5.1]
    codes = [0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 6.0, 6.0, -0.5, -6.0]
    assert e2m1(torch.tensor(given)).tolist() == codes


def test_e2m1_at_random_stays_between_neighbours_with_the_right_mean() -> None:
    torch.manual_seed(0)
    drawn = e2m1(torch.tensor([[2.25], [5.0], [1.5], [6.0]]).expand(-1, 10_000), stochastic=True)
    assert [set(row.tolist()) for row in drawn] == [{2.0, 3.0}, {4.0, 6.0}, {1.5}, {6.0}]
    # Deviations of the mean of 10,000 draws: sqrt(0.25 * 0.75) / 100 and 2 * 0.5 / 100.
    assert drawn[0].mean().item() == pytest.approx(2.25, abs=4 * 0.0044)
    assert drawn[1].mean().item() == pytest.approx(5.0, abs=4 * 0.01)


def test_an_outlier_coarsens_its_scale_s_group_and_no_other() -> None:
    """448 makes the tensor's scale 1: 0.011 lies between 5 and 6 times 2**-9, the subnormal step.
    A block of its own keeps it to 4 bits: between 11 and 12 times 2**-10."""
    x = torch.full((1, 64), 0.011)
    x[0, 0] = 448.0
    assert fp8(x, E4M3, "tensor")[0, 40].item() == 6 * 2**-9
    assert mxfp8(x)[0, 1].item() == 6 * 2**-9
    assert mxfp8(x)[0, 40].item() == 11 * 2**-10
    blocks = torch.full((128, 256), 0.011)
    blocks[0, 0] = 448.0
    rounded = fp8_blocks(blocks, 1, 128)
    assert rounded[0, 1].item() == 6 * 2**-9
    for place in ((0, 200), (1, 1)):
        assert rounded[place].item() == pytest.approx(0.011, rel=1e-6)
    square = fp8_blocks(blocks, 128, 128)
    assert square[100, 1].item() == 6 * 2**-9
    assert square[100, 200].item() == pytest.approx(0.011, rel=1e-6)


def test_an_mx_scale_is_the_smallest_power_of_two_that_lets_nothing_saturate() -> None:
    x = torch.zeros(1, 32)
    for largest, scale in ((448.0, 1.0), (449.0, 2.0), (896.0, 2.0), (0.875, 2.0**-9)):
        x[0, 0], x[0, 1] = largest, scale * 2**-9
        rounded = mxfp8(x)
        assert rounded[0, 1].item() == scale * 2**-9  # E4M3's smallest subnormal, scaled
        assert rounded[0, 0].item() >= largest * (1 - 2**-4)


def test_nvfp4_weights_share_a_scale_by_squares_and_equal_their_transpose() -> None:
    x = wide_range(64, 32)
    assert torch.equal(nvfp4(x, rows=16), nvfp4(x.t(), rows=16).t())
    assert not torch.equal(nvfp4(x), nvfp4(x.t()).t())


def test_int4_has_sixteen_values_by_group() -> None:
    x = torch.linspace(-7, 7, 29)[None]
    assert int4(x, 32).unique().tolist() == [float(n) for n in range(-7, 8)]
    two = torch.cat([x, torch.zeros(1, 3), x / 10], dim=1)
    rounded = int4(two, 32)
    assert rounded[0, 32:].unique().tolist() == pytest.approx([n / 10 for n in range(-7, 8)])


def test_tf32_keeps_ten_fraction_bits_ties_to_even() -> None:
    given = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-10, -(1 + 2**-12), torch.inf, 1e38])
    assert tf32(given)[:5].tolist() == [1.0, 1 + 2**-9, 1 + 2**-10, -1.0, torch.inf]
    assert tf32(given)[5].item() == pytest.approx(1e38, rel=2**-11)
    assert torch.isnan(tf32(torch.tensor([torch.nan]))).all()


@pytest.mark.parametrize("width", [1, 31, 33, 130])
def test_blocks_that_are_not_full_change_nothing_of_the_full_ones(width: int) -> None:
    x = wide_range(20, 160)
    for policy in (mxfp8, nvfp4, int4, partial(fp8_blocks, rows=1, columns=128)):
        cut = x[:, :width].contiguous()
        whole = policy(cut)
        assert whole.shape == cut.shape
        filled = torch.zeros(20, 256)
        filled[:, :width] = cut
        assert torch.equal(policy(filled)[:, :width], whole)


@pytest.mark.parametrize(
    "policy",
    [
        partial(fp8, dtype=E4M3, by="tensor"),
        partial(fp8, dtype=E4M3, by="row"),
        *(mxfp8, nvfp4, int8, int4, ternary, tf32),
    ],
)
def test_zeros_stay_zeros(policy: partial[Tensor]) -> None:
    assert torch.equal(policy(torch.zeros(3, 40)), torch.zeros(3, 40))


def test_policies_round_to_the_numbers_of_the_table() -> None:
    x = wide_range() * 0.01
    assert torch.equal(e2m1(x.clamp(-6, 6)), round_to(x.clamp(-6, 6), E2M1))
    assert torch.equal(tf32(x), round_to(x, TF32))
    one = torch.cat([x.clamp(-440, 440), torch.full((48, 1), 448.0)], dim=1)  # the scale is 1
    assert torch.equal(fp8(one, E4M3, "row"), round_to(one, E4M3_FORMAT))


# --- delayed scaling ----------------------------------------------------------------------------


def test_a_delayed_scale_follows_its_history_by_hand_through_an_outlier() -> None:
    """History of 3, E4M3: the scale is 448 over the largest of the last three amaxes. The outlier
    of 64 comes when the scale foresees 2: it saturates at 2, and then rules three tensors long."""
    scale = DelayedScale(E4M3, history=3)
    amaxes = [1.0, 2.0, 1.0, 64.0, 1.0, 1.0, 1.0, 1.0]
    used, kept = [], []
    for amax in amaxes:
        kept.append(scale.first(torch.tensor([[amax, -0.01]]))[0, 0].item())
        used.append(scale.used.item())
    assert used == [1.0, 448.0, 224.0, 224.0, 7.0, 7.0, 7.0, 448.0]
    assert kept == [1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0]


def test_what_is_rounded_again_has_the_scale_it_had_and_leaves_no_history() -> None:
    scale = DelayedScale(E5M2, history=4)
    first = scale.first(torch.full((1, 2), 3.0))
    before = scale.amaxes.clone()
    assert torch.equal(scale.again(torch.full((1, 2), 3.0)), first)
    assert torch.equal(scale.amaxes, before)
    assert before.tolist() == [3.0, 0.0, 0.0, 0.0]


def test_an_overflow_moves_no_delayed_scale() -> None:
    scale = DelayedScale(E4M3, history=2)
    scale.first(torch.tensor([[2.0]]))
    scale.first(torch.tensor([[torch.inf]]))
    assert scale.scale.item() == 224.0
