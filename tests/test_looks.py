"""Tests for ../runner/measure/looks.py: what rounding does while training goes on."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from runner.compose import command_of
from runner.door import parser
from runner.forwarding.curves import NUMERICS, Curves
from runner.measure.looks import ROOM, Looks, Rounding, amax_errors, beyond_range, unmoved_share
from runner.optimizer import Sgd
from runner.precision.formats import E4M3, FP16
from runner.precision.history import DelayedScale
from runner.precision.policies import E4M3 as E4M3_TYPE
from runner.precision.policies import fp8, int4, int8, mxfp8, nvfp4, tf32
from runner.records import NumericsRecord, RunRecord, line_of, read_journal, updates_of
from runner.running import run
from tests.support import tiny_gpt, training_of
from tests.test_glossary import table
from tests.test_recipes import job_of
from tests.test_shortage import CORPUS_JOB


def test_a_gradient_of_1e_8_is_lost_in_fp16_at_scale_1_and_kept_at_65536() -> None:
    gradients = [torch.tensor([1e-8, 0.0, 1e-3, 2.0])]
    assert beyond_range(gradients, FP16, 1.0) == (pytest.approx(1 / 3), 0.0)
    assert beyond_range(gradients, FP16, 65536.0) == (0.0, pytest.approx(1 / 3))  # 2 overflows
    assert beyond_range([torch.zeros(3)], FP16, 1.0) == (0.0, 0.0)
    # Half of the smallest number ties to 0, a hair more does not.
    half = torch.tensor([FP16.smallest / 2, FP16.smallest / 2 * 1.01], dtype=torch.float64)
    assert beyond_range([half], FP16, 1.0) == (0.5, 0.0)


def test_a_bf16_weight_of_1_does_not_move_by_1e_4_and_an_fp32_one_does() -> None:
    shares = {}
    for dtype in (torch.bfloat16, torch.float32):
        training = training_of(tiny_gpt(), optimizer=Sgd(lr=1e-4))
        weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        training.trained = {"w": weight}
        before = {"w": weight.detach().clone()}
        weight.grad = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=dtype)
        with torch.no_grad():
            weight -= 1e-4 * weight.grad
        shares[dtype] = unmoved_share(training, before)
    assert shares == {torch.bfloat16: 1.0, torch.float32: 0.0}


def test_rounding_is_summed_by_hand() -> None:
    found = Rounding()
    found.take(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.5]), 2**-4)
    assert found.error == pytest.approx(0.5 / 5) and found.amax == 4.0
    assert found.saturated == 0.5  # rounding brings nothing above 3.71875 to 3.5
    found.take(torch.tensor([3.0, 3.7]), torch.tensor([3.0, 3.5]), 2**-4)
    assert found.saturated == 0.25
    unknown = Rounding()
    unknown.take(torch.tensor([4.0]), torch.tensor([3.5]), None)
    assert unknown.saturated is None


def test_what_is_not_finite_gives_figures_that_say_so() -> None:
    """NaN compares with nothing: taken for a number it would leave amax and shares as they are."""
    found = Rounding()
    found.take(torch.tensor([3.0, 9.0]), torch.tensor([3.0, 3.5]), 2**-4)
    found.take(torch.tensor([math.nan, 4.0]), torch.tensor([math.nan, 4.0]), 2**-4)
    found.take(torch.tensor([1.0]), torch.tensor([1.0]), 2**-4)
    assert math.isnan(found.amax) and math.isnan(found.error)
    assert found.saturated is not None and math.isnan(found.saturated)
    scaled_away = Rounding()
    scaled_away.take(torch.tensor([3.0]), torch.tensor([math.nan]), 2**-4)
    assert scaled_away.amax == 3.0 and math.isnan(scaled_away.saturated or 0.0)
    wide = Rounding()
    wide.take(torch.tensor([math.inf, 1.0]), torch.tensor([448.0, 1.0]), 2**-4)
    assert wide.amax == math.inf and wide.saturated == 0.5
    assert all(map(math.isnan, beyond_range([torch.tensor([math.nan, 1.0])], FP16, 1.0)))
    scale = DelayedScale(E4M3_TYPE, history=2)
    scale.first(torch.ones(1))
    scale.first(torch.tensor([math.nan]))
    odd = amax_errors(torch.nn.ModuleList([scale, _scale_after_two_ones()]))
    assert all(map(math.isnan, odd.values())) and len(odd) == 2
    assert set(amax_errors(_scale_after_two_ones()).values()) == {0.0}


def _scale_after_two_ones() -> DelayedScale:
    scale = DelayedScale(E4M3_TYPE, history=2)
    scale.first(torch.ones(1))
    scale.first(torch.ones(1))
    return scale


def test_only_what_is_clamped_counts_as_saturated_not_what_is_rounded_down() -> None:
    """Scales from the tensor itself clamp nothing, wherever their largest code lies; a delayed
    scale for 1 clamps what is above 1 and half a step."""
    drawn = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    x = drawn * torch.logspace(-2, 2, 64)[:, None]
    policies = {
        "float8_e4m3fn": [mxfp8, partial(fp8, dtype=E4M3_TYPE, by="row", power_of_2=True)],
        "float4_e2m1fn": [nvfp4, partial(nvfp4, stochastic=True)],
        "int8": [int8],
        "int4": [int4],
        "tf32": [tf32],
    }
    for form, rounds in policies.items():
        for round_off in rounds:
            for size in (1.0, 1.1, 1.3, 1.6, 1.9):
                found = Rounding()
                found.take(x * size, round_off(x * size), ROOM[form])
                assert found.saturated == 0.0, (form, size)
    scale = DelayedScale(E4M3_TYPE, history=2)
    scale.first(torch.ones(1))
    found, come = Rounding(), torch.tensor([1.0, 0.5, -1.2, 30.0])
    found.take(come, scale.first(come), ROOM["float8_e4m3fn"])
    assert found.saturated == 0.5


def looked(*words: str) -> dict[str, float]:
    job, _ = job_of("accum=2", "model.layers=2", *words)
    micros = job.feed.probes(2)[-1]
    looks = Looks(training=job.training, recipe=job.parts.precision, micros=micros, every=1)
    before = looks.before()
    for tensor in job.training.trained.values():
        tensor.grad = torch.ones_like(tensor)
    buffers = {n: b.clone() for n, b in job.training.model.named_buffers()}
    state = torch.get_rng_state()
    values = looks.take(before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(buffers[n], b) for n, b in job.training.model.named_buffers())
    assert values["lost_share"] == 1.0  # nothing was changed since
    return values


def test_narrow_operands_have_errors_by_kind_and_block_that_order_as_their_formats() -> None:
    mx, nv = looked("precision=mxfp8"), looked("precision=nvfp4")
    kinds = ("inputs", "weights", "gradients")
    for kind in kinds:
        assert 0 < mx[f"{kind}_error"] < nv[f"{kind}_error"] < 0.3
        parts = {f"{kind}_error/blocks.{n}.{part}" for n in (0, 1) for part in ("attn", "mlp")}
        assert parts == {name for name in mx if name.startswith(f"{kind}_error/")}
    # At most half a step of 1/8 in each value: the whole lies below 2**-4.
    assert mx["weights_error"] < 2**-4 and E4M3.fraction_bits == 3
    assert mx["weights_amax"] > 0


def test_delayed_scaling_states_how_far_its_prediction_was_off() -> None:
    found = looked("precision=fp8_delayed")
    assert found["amax_error_least"] <= found["amax_error_most"]
    # No tensor came before, so that the scale is 1 and 448 is expected of values below 10.
    assert found["amax_error_most"] > 40


def test_ranges_are_stated_for_sixteen_bit_gradients_only() -> None:
    assert "underflow_share" in looked("precision=bf16")
    assert "underflow_share" not in looked("precision=mxfp8")


def test_a_look_divides_its_micro_batch_by_the_targets_of_the_whole_update() -> None:
    """As the update does: by its own targets alone it would be `accum` times as large, and less
    of it would underflow."""
    job, _ = job_of("accum=2", "model.layers=2", "precision=fp16")
    training, micros = job.training, job.feed.probes(2)[-1]
    assert training.scaler is not None
    training.scaler.scale.fill_(2.0**-12)
    looks = Looks(training=training, recipe=job.parts.precision, micros=micros, every=1)
    found = looks.take(looks.before())["underflow_share"]
    model, shares = training.model, []
    for used in (micros, micros[:1]):
        hidden = model.hidden(micros[0].input_ids, micros[0].positions, micros[0].segments)  # type: ignore
        logits = (hidden @ model.head_weight.t()).flatten(0, 1)  # type: ignore
        loss = F.cross_entropy(logits, micros[0].targets.flatten(), reduction="sum")
        gradients = torch.autograd.grad(
            loss / sum(m.counts.useful for m in used), training.parameters
        )
        sizes = torch.cat([g.flatten() for g in gradients]).abs()
        small = (sizes > 0) & (sizes * 2.0**-12 <= 2.0**-25)
        shares.append(float(small.sum() / (sizes > 0).sum()))
    assert found == pytest.approx(shares[0], abs=1e-3)
    assert shares[0] > 1.5 * shares[1]


def test_the_glossary_names_every_curve_of_a_look() -> None:
    recipes = ("fp16", "fp8_delayed")
    found = {n for r in recipes for n in looked(f"precision={r}") if "/" not in n}
    page = {row.name for row in table() if row.name.startswith(NUMERICS)}
    assert page == {f"{NUMERICS}{name}" for name in found}


def test_a_run_looks_every_so_often_marks_those_updates_and_trains_as_without(
    tmp_path: Path, corpora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = []
    for every in ("null", "5"):
        folder = tmp_path / every
        folder.mkdir()
        monkeypatch.chdir(folder)
        words = [
            f"cache='{corpora}'",
            *CORPUS_JOB,
            "precision=bf16_pure",
            f"numerics.every={every}",
        ]
        assert run(command_of(parser().parse_args(words), folder), folder, words) == 0
        (path,) = folder.glob("runs/*/*/journal.jsonl")
        lines = read_journal(path)
        losses.append([u.loss for u in updates_of(lines)])
    assert losses[0] == losses[1]
    found = [line for line in lines if isinstance(line, NumericsRecord)]
    assert [line.update for line in found] == [5, 10]
    assert all(0 < line.values["lost_share"] < 1 for line in found)
    marked = [u.update for u in updates_of(lines) if "numerics" in u.marks]
    assert marked == [5, 10]
    record = RunRecord.read(path.parent)
    assert record is not None and record.sizes["updates_timed"] == 14 - 2 - 2
    kept = record.numerics["looks"]["figures"]["lost_share"]
    assert (kept["first"], kept["last"]) == tuple(line.values["lost_share"] for line in found)


def test_a_line_of_numerics_is_read_back_and_drawn_without_its_groups() -> None:
    line = NumericsRecord(update=5, values={"lost_share": 0.25, "inputs_error/blocks.0": 0.1})
    assert line_of(json.loads(json.dumps(line.to_json()))) == line
    points = Curves(start_ms=0, emulated=False).take(line)
    assert [(p.name, p.value) for p in points] == [("numerics/lost_share", 0.25)]
    odd = Curves(start_ms=0, emulated=False).take(
        NumericsRecord(update=5, values={"gradient_error": math.nan})
    )
    assert [p.name for p in odd] == ["numerics/gradient_error", "nonfinite/numerics/gradient_error"]
