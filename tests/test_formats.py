"""Tests for ../runner/precision/formats.py, ../runner/precision/rounding.py and runner.formats."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor

from runner import formats as command
from runner.precision import policies
from runner.precision.formats import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    FLOATS,
    FP16,
    FP32,
    INT4,
    INT8,
    MXFP8,
    NVFP4,
    OTHERS,
    TERNARY,
    TF32,
    TOY,
    Format,
)
from runner.precision.rounding import round_to


def test_the_specifications_toy_format_ends_at_7_and_rounds_3_1_to_3() -> None:
    assert TOY.round(3.0) == 3.0 and TOY.round(3.1) == 3.0
    assert TOY.spacing(3.0) == 0.5 and TOY.spacing(2.0) == 0.5 and TOY.spacing(1.5) == 0.25
    assert TOY.largest == 7.0 and TOY.round(7.0) == 7.0
    assert TOY.overflows(8.0) and TOY.round(8.0) == math.inf
    assert TOY.smallest == TOY.smallest_normal == 0.25
    with pytest.raises(ValueError, match="beyond the largest"):
        TOY.spacing(8.0)


def test_the_tables_figures_are_those_of_torch() -> None:
    pairs = {
        FP32: torch.float32,
        BF16: torch.bfloat16,
        FP16: torch.float16,
        E4M3: torch.float8_e4m3fn,
        E5M2: torch.float8_e5m2,
    }
    for form, dtype in pairs.items():
        known = torch.finfo(dtype)
        assert (form.bits, form.largest) == (known.bits, known.max), form.name
        assert form.smallest_normal == known.tiny
        assert form.spacing(1.0) == known.eps
        assert form.smallest == known.tiny * known.eps


def test_figures_worked_by_hand() -> None:
    assert (E4M3.smallest, E5M2.smallest, E2M1.smallest) == (2**-9, 2**-16, 0.5)
    assert TF32.spacing(1.0) == 2**-10 and TF32.smallest_normal == FP32.smallest_normal
    assert MXFP8.storage_bytes == 33 / 32 and NVFP4.storage_bytes == 4.5 / 8
    assert INT4.storage_bytes == 5 / 8 and TERNARY.bits == pytest.approx(1.585, abs=1e-3)
    assert BF16.spacing(1.0) == 1 / 128  # so a weight of 1 keeps no step of 1e-4
    assert BF16.round(1.0 + 1e-4) == 1.0
    assert FP16.round(1e-8) == 0.0 and FP16.round(1e-8 * 65536) > 0


def all_codes(dtype: torch.dtype) -> Tensor:
    bits = torch.finfo(dtype).bits
    whole = {8: torch.uint8, 16: torch.int16}[bits]
    codes = torch.arange(256, dtype=torch.uint8) if bits == 8 else torch.arange(-(2**15), 2**15)
    return codes.to(whole).view(dtype).double()


DTYPES = [
    (FP16, torch.float16),
    (BF16, torch.bfloat16),
    (E4M3, torch.float8_e4m3fn),
    (E5M2, torch.float8_e5m2),
]


@pytest.mark.parametrize(("form", "dtype"), DTYPES, ids=lambda value: getattr(value, "name", ""))
def test_every_code_and_every_point_between_two_is_rounded_as_torch_casts(
    form: Format, dtype: torch.dtype
) -> None:
    values = all_codes(dtype)
    values = values[values.isfinite() & (values >= 0)].unique()
    middle = (values[1:] + values[:-1]) / 2
    near = torch.cat([torch.nextafter(middle, middle * 0), torch.nextafter(middle, middle * 4 + 1)])
    points = torch.cat([values, middle, near])
    points = torch.cat([points, -points])
    torch_says = points.float().to(dtype).double()
    exact = points.float().double() == points  # what FP32 itself rounds is another question
    ours = round_to(points, form)
    assert exact.sum() > len(values)
    assert torch.equal(ours[exact], torch_says[exact])
    assert not (ours.signbit() ^ points.signbit()).any()
    some = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:500]
    assert [form.round(float(v)) for v in points[some]] == ours[some].tolist()


@pytest.mark.parametrize(("form", "dtype"), DTYPES, ids=lambda value: getattr(value, "name", ""))
def test_beyond_the_largest_value_a_format_clamps_or_overflows(
    form: Format, dtype: torch.dtype
) -> None:
    step = form.spacing(form.largest)
    just = torch.tensor([form.largest + step * 0.49, -form.largest - step * 0.49]).double()
    assert round_to(just, form).tolist() == [form.largest, -form.largest]
    far = torch.tensor([form.largest * 4, -torch.inf, torch.nan]).double()
    high, low, nothing = round_to(far, form).tolist()
    assert math.isnan(nothing)
    if form.saturates:
        assert (high, low) == (form.largest, -form.largest)
    else:
        assert (high, low) == (math.inf, -math.inf)
        assert torch.equal(far[:2].float().to(dtype).double(), round_to(far, form)[:2])


def test_e5m2_overflows_from_the_tie_on_where_torch_s_cast_does_and_clamps_where_asked() -> None:
    points = torch.tensor([57344.0, 61439.9, 61440.0, 65536.0, 3e38, torch.inf])
    points = torch.cat([points, -points])
    assert torch.equal(round_to(points, E5M2, saturate=False), points.to(torch.float8_e5m2).float())
    assert round_to(points, E5M2, saturate=True).abs().unique().tolist() == [57344.0]
    kept, lost = round_to(torch.tensor([464.0, 465.0]), E4M3, saturate=False).tolist()
    assert kept == 448.0 and math.isnan(lost)


def test_fp4_has_the_eight_sizes_of_its_specification() -> None:
    points = torch.linspace(-8, 8, 3201)
    found = round_to(points, E2M1)
    assert found.abs().unique().tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert torch.equal(found, policies.e2m1(points))
    assert [E2M1.round(v) for v in (0.25, 0.75, 2.5, 5.0, 100.0)] == [0, 1, 2, 4, 6]


def test_tf32_keeps_ten_bits_of_the_fraction() -> None:
    points = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_to(points, TF32), policies.tf32(points))


def test_scales_are_the_nearest_powers_of_two_as_torch_casts_them() -> None:
    """Every code, and around it and around the middle to the next one the nearest FP32 numbers."""
    codes = torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu).float()
    middles = codes.double().mul(1.5).float()
    exact = torch.cat([codes, middles, codes.double().mul(1.25).float()])
    ends = torch.tensor([0.0, math.inf, torch.finfo(torch.float32).max, 2.0**-149, 2.0**-128])
    near = [torch.nextafter(exact, torch.tensor(end)) for end in (0.0, math.inf)]
    points = torch.cat([exact, *near, ends])
    theirs = points.to(torch.float8_e8m0fnu).double()
    own = torch.tensor([E8M0.round(float(v)) for v in points], dtype=torch.float64)
    assert torch.equal(own.nan_to_num(nan=-1.0), theirs.nan_to_num(nan=-1.0))
    assert torch.equal(own[:255], codes.double())
    assert E8M0.round(6.0) == 8.0 and math.isnan(E8M0.round(-1.0))


def test_integers_are_clamped_to_their_ends() -> None:
    assert [INT8.round(v) for v in (2.5, 3.5, 200.0, -200.0)] == [2, 4, 127, -128]
    assert [TERNARY.round(v) for v in (0.4, 0.6, -9.0)] == [0, 1, -1]


def test_stochastic_rounding_is_right_on_average_and_gives_neighbours_only() -> None:
    x = torch.full((40_000,), 1.0 + 1e-3)
    found = round_to(x, BF16, torch.Generator().manual_seed(0))
    assert set(found.tolist()) == {1.0, 1.0 + 1 / 128}
    # Share of the upper neighbour: 0.128, with a standard error of 0.0017.
    assert float((found > 1).double().mean()) == pytest.approx(0.128, abs=0.007)


def test_without_subnormals_stochastic_rounding_gives_0_or_the_smallest_number() -> None:
    x = torch.full((40_000,), 0.05)
    found = round_to(x, TOY, torch.Generator().manual_seed(0))
    assert set(found.tolist()) == {0.0, 0.25}
    # Share of the upper neighbour: 0.05 / 0.25, with a standard error of 0.002.
    assert float((found > 0).double().mean()) == pytest.approx(0.2, abs=0.008)
    ends = torch.tensor([0.125, 0.1251, 0.2499, 0.25, -0.2])
    assert round_to(ends, TOY).tolist() == [0.0, 0.25, 0.25, 0.25, -0.25]


# --- the command ------------------------------------------------------------------------------


def test_the_table_names_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    out = capsys.readouterr().out
    for form in (*FLOATS, *OTHERS):
        assert form.name in out
    assert "65,504" in out and "448" in out


def test_a_value_is_shown_as_every_format_holds_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["value=3.1"]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert lines["fp32"][1] == repr(struct.unpack("f", struct.pack("f", 3.1))[0])
    assert lines["fp4_e2m1"][1] == "3.0" and lines["fp8_e5m2"][1] == "3.0"
    assert lines["fp8_e4m3"][1] == "3.0" and lines["ternary"][1] == "1.0"
    assert command.main(["value=1e6"]) == 0
    assert "clamped" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["value=much"], ["valu=3"], ["3.1"], ["value=3", "value=4"]])
def test_a_wrong_word_is_one_message(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(words) == 2
    assert "allowed" in capsys.readouterr().err
