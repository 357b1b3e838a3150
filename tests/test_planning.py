"""Tests of runner/planning: the prediction against the account of the same update, run for real."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.advice import options
from runner.assemble import training_of
from runner.checks import Parts, build_parts
from runner.compose import command_of
from runner.contracts import MicroBatch, UserError
from runner.door import parser
from runner.measure.account import MemoryAccount
from runner.measure.probe import probe
from runner.plan import least_seconds, main
from runner.planning import fitting, prediction
from runner.planning.extrapolated import depths
from runner.planning.fitting import Plans, savings, smallest_accum
from runner.planning.planned import largest_micro_batch, planned
from runner.planning.prediction import Prediction, predict
from runner.planning.target import CPU, CUDA, GPUS, target_named
from runner.planning.traced import trace

SMALL = ("model.width=32", "seq_len=48", "batch=8")
"""Examples of 48 tokens: nothing in the update has that width but what has it for its tokens."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def composed(*words: str) -> tuple[dict[str, Any], Parts, list[MicroBatch]]:
    """A job's config, its parts and the micro-batches that its largest update begins with."""
    args = parser().parse_args([*SMALL, *words])
    config = dict(command_of(args, Path("/tmp/nowhere"), to_run=False).jobs[0].config)
    parts = build_parts(config)
    return config, parts, [largest_micro_batch(config, parts)] * min(2, config["accum"])


def measured(config: Any, parts: Parts, micros: Sequence[MicroBatch]) -> MemoryAccount:
    """The account of the update as it really runs."""
    torch.manual_seed(0)
    model = parts.precision.prepare(parts.model.build(0))
    for lever in parts.levers.values():
        lever.apply(model)
    training = training_of(config, parts, torch.device("cpu"), model.train(), updates=1)
    account, _ = probe(training, [micros])
    assert account is not None
    return account


def largest_of(text: str) -> str:
    """An object's words for whichever block."""
    return re.sub(r"blocks\.(\d+|\*)", "blocks.*", text).partition(", one of")[0]


JOBS = [
    ("model.layers=2",),
    ("model.layers=7", "accum=2"),
    ("precision=bf16", "model.layers=6"),
    ("precision=fp16",),
    ("precision=fp16_master",),
    ("model=llama_tiny", "batching=packed", "accum=2"),
    ("optimizer.implementation=foreach", "model.layers=6"),
    ("memory/checkpointing=full", "model.layers=6"),
    ("memory/checkpointing=every", "model.layers=9"),
    ("memory/loss=chunked",),
    ("memory/gradients=zero", "accum=2", "model.layers=5"),
    ("memory/attention=math",),
]


@pytest.mark.parametrize("words", JOBS, ids=" ".join)
def test_the_prediction_is_the_account_before_it_is_taken(words: tuple[str, ...]) -> None:
    config, parts, micros = composed(*words)
    foreseen = predict(config, parts, micros, target=CPU).account
    account = measured(config, parts, micros)
    # bf16 autocast frees its copies of weights in the order of their addresses
    near = 0.003 if config["precision"].get("dtype") == "bfloat16" else 1e-4
    assert foreseen.peak_bytes == pytest.approx(account.peak_bytes, rel=near)
    assert foreseen.peak_phase == account.peak_phase
    assert sum(foreseen.at_peak.values()) == foreseen.peak_bytes
    for name, most in account.largest_by_category.items():
        assert foreseen.largest_by_category[name] == pytest.approx(most, rel=near, abs=64), name
    for phase, most in account.peak_by_phase.items():
        assert foreseen.peak_by_phase[phase] == pytest.approx(most, rel=0.003), phase
    assert largest_of(str(foreseen.largest[0])) == largest_of(account.largest_live_object)


@pytest.mark.parametrize("target", [CPU, CUDA], ids=["cpu", "cuda"])
@pytest.mark.parametrize("words", [(), ("memory/checkpointing=every",)], ids=["plain", "every"])
def test_two_depths_tell_what_the_whole_trace_tells(words: tuple[str, ...], target: Any) -> None:
    config, parts, micros = composed("model.layers=12", "accum=2", *words)
    two = predict(config, parts, micros, target=target)
    whole = predict(config, parts, micros, target=target, whole=True)
    assert len(two.layers) == 2 and max(two.layers) < 12 and whole.layers == (12,)
    assert two.flops == whole.flops
    for name in ("peak_bytes", "peak_phase", "start_bytes", "at_peak"):
        assert getattr(two.account, name) == getattr(whole.account, name), name
    for phase, most in whole.account.peak_by_phase.items():
        # a tensor with an element for each parameter may be rounded up to one block more
        assert two.account.peak_by_phase[phase] == pytest.approx(most, abs=2 * target.rounding)
    assert two.account.largest_by_category == whole.account.largest_by_category
    assert two.account.largest[0] == whole.account.largest[0]


def test_c32_state_is_planned_for_each_unique_trainable_parameter_once() -> None:
    """A tied model of 29,184 parameters in 28 tensors; 32,384 with the head again."""
    words = ("model.vocab=100", "model.positions=16", "model.layers=2", "seq_len=16")
    config, parts, micros = composed(*words)
    most = predict(config, parts, micros, target=CPU).account.largest_by_category
    assert most["parameters"] == most["gradients"] == 4 * 29_184
    # two moments of each, a count for each tensor, the rate that the fused optimizer reads
    assert most["optimizer_state"] == 2 * 4 * 29_184 + 4 * 28 + 4


def test_depths_leave_no_remainder_and_blocks_between_their_ends() -> None:
    assert depths(48, 1) == (3, 4)
    assert depths(4, 1) is None
    assert depths(9, 2) == (5, 7)
    assert depths(48, 2) == (6, 8)


def test_a_prediction_leaves_the_random_state_and_the_real_modules_alone() -> None:
    config, parts, micros = composed()
    apply = torch.nn.Module._apply
    torch.manual_seed(3)
    state = torch.get_rng_state()
    predict(config, parts, micros, target=CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.nn.Module._apply is apply


def test_a_prediction_leaves_the_values_of_eight_bit_moments_alone() -> None:
    """torchao works them out once and keeps them: the run that follows computes with them."""
    from torchao.optim import subclass_8bit

    subclass_8bit.get_qmap_signed.cache_clear()
    config, parts, micros = composed("memory/optimizer_state=8bit", "model.layers=1")
    predict(config, parts, micros, target=CPU)
    table = subclass_8bit.get_qmap_signed()
    assert len(set(table)) == 256 and max(table) == 1 and -1 < min(table) < -0.9


# --- a GPU that is not there ------------------------------------------------------------------


def test_cuda_rounds_every_allocation_up_and_keeps_a_workspace() -> None:
    config, parts, micros = composed()
    here = predict(config, parts, micros, target=CPU).account
    there = predict(config, parts, micros, target=replace(CUDA, workspace=0)).account
    tensors = 28  # two embeddings, two of the last norm, twelve of each of two blocks
    more = there.largest_by_category["parameters"] - here.largest_by_category["parameters"]
    assert there.largest_by_category["parameters"] % 512 == 0
    assert 0 < more < 512 * tensors
    with_workspace = predict(config, parts, micros, target=CUDA).account
    assert with_workspace.peak_bytes - there.peak_bytes == CUDA.workspace == 32 * 2**20


def test_cuda_normalises_in_fp32_and_a_cpu_as_autocast_left_it() -> None:
    """The residual stream is FP32 either way; the Llama's first product makes it BF16 for nobody.
    What differs is an operation that CUDA widens: math attention's softmax."""
    config, parts, micros = composed("precision=bf16", "memory/attention=math")
    here = predict(config, parts, micros, target=CPU).account
    there = predict(config, parts, micros, target=replace(CUDA, workspace=0)).account
    # the probabilities of 2 layers of 2 heads: 8 * 2 * 48 * 48 elements of each
    assert (
        there.largest_by_category["saved_activations"]
        > here.largest_by_category["saved_activations"]
    )


def test_dropout_takes_a_fused_kernel_on_cuda_and_keeps_no_scores() -> None:
    words = ("precision=bf16", "model.dropout=0.1", "seq_len=256")
    config, parts, micros = composed(*words)
    scores = [
        any(found.item.shape[-2:] == (256, 256) for found in prediction.account.largest)
        for prediction in (predict(config, parts, micros, target=t) for t in (CPU, CUDA))
    ]
    assert scores == [True, False]


def test_what_a_lever_keeps_on_the_host_is_not_on_the_device() -> None:
    config, parts, micros = composed("memory/optimizer_state=cpu_offload")
    there = predict(config, parts, micros, target=CUDA).account
    assert there.largest_by_category["optimizer_state"] == 0
    config, parts, micros = composed("memory/offload=activations", "memory.offload.min_bytes=1024")
    plain, bare, _ = composed()
    saved = [
        predict(c, p, micros, target=CUDA).account.largest_by_category["saved_activations"]
        for c, p in ((config, parts), (plain, bare))
    ]
    assert saved[0] < 0.7 * saved[1]


def test_an_unknown_gpu_is_refused_by_name() -> None:
    assert target_named("auto", "cpu") is CPU
    assert target_named("auto", "auto") is CUDA
    assert target_named("h200", "auto") is GPUS["h200"]
    with pytest.raises(UserError, match=r"plan.device: given h300; allowed: auto, cpu, cuda"):
        target_named("h300", "auto")


@pytest.mark.parametrize("target", GPUS.values(), ids=lambda target: target.name)
def test_every_named_gpu_has_rates(target: Any) -> None:
    assert target.flops_per_s("bf16") and target.bytes_per_s() and target.memory


# --- what fits --------------------------------------------------------------------------------


def test_the_largest_micro_batch_that_fits_is_the_largest() -> None:
    config, _, _ = composed()
    peaks = {accum: planned({**config, "accum": accum}, CPU).peak_bytes for accum in (1, 2, 4, 8)}
    assert peaks[1] > peaks[2] > peaks[4] > peaks[8]
    plans = Plans(config=config, target=CPU)
    for accum, peak in peaks.items():
        assert smallest_accum(plans, peak) == accum
        assert smallest_accum(plans, peak - 1) == ({1: 2, 2: 4, 4: 8}.get(accum))


@pytest.fixture
def few_levers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the options of two levers; the others would load large libraries."""
    few = [found for found in options() if found.group in ("checkpointing", "gradients")]
    monkeypatch.setattr(fitting, "options", lambda: few)


def test_the_table_of_levers_saves_what_each_lever_alone_saves(few_levers: None) -> None:
    config, _, _ = composed("model.layers=6", "seq_len=64")
    base = planned(config, CPU)
    rows = {row.words: row for row in savings(config, CPU)}
    alone, _, _ = composed("model.layers=6", "seq_len=64", "memory/checkpointing=full")
    full: Prediction = planned(alone, CPU)
    row = rows["memory/checkpointing=full"]
    assert row.saved == base.peak_bytes - full.peak_bytes > 0
    assert row.work == pytest.approx(full.flops / base.flops)
    assert 1.2 < row.work < 1.4  # a forward pass of the blocks more
    assert rows["accum=2"].saved > 0
    assert rows["memory/checkpointing=budget"].peak is None
    assert "compile=default" in rows["memory/checkpointing=budget"].reason
    assert "memory/checkpointing=none" not in rows


def test_a_plan_traces_no_job_twice_and_few_blocks_of_it(
    few_levers: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a plan costs is what it traces: every job once, at two depths of few blocks."""
    traced: list[tuple[str, int]] = []

    def noted(config: Any, *more: Any, layers: int, **settings: Any) -> Any:
        traced.append((json.dumps([config["memory"], config["accum"]]), layers))
        return trace(config, *more, layers=layers, **settings)

    monkeypatch.setattr(prediction, "trace", noted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})  # all of it in this process
    assert main([*SMALL, "model.layers=24", "batch=4", "accum=2", "plan.memory=1GiB"]) == 0
    rows = capsys.readouterr().out.partition("levers\n")[2].count(" work x ")
    assert len(traced) == len(set(traced)) == 2 * (1 + rows + 1)  # with accum=1, which fits best
    assert max(layers for _, layers in traced) <= 8


@pytest.mark.long
def test_the_plan_of_a_model_that_was_never_built(
    few_levers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "model.layers=24", "accum=auto", "plan.memory=1GiB", "plan.device=a100"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "planned for a100 (unverified on a GPU)" in out
    assert "batch       8 = 1 x 8 examples of 48 tokens" in out
    assert re.search(r"fits: .* of 1.00 GiB, of which 512.0 MiB for CUDA itself", out)
    assert "memory/checkpointing=full" in out


def test_a_plan_for_memory_that_nothing_fits_in_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, "accum=auto", "plan.memory=513MiB"]) == 2
    assert "not one example fits" in capsys.readouterr().err


def test_the_least_time_of_an_update_beside_adapters_is_without_their_gradients() -> None:
    """Worked by hand: 2 layers, width 32, 8 documents of 48 tokens on an H200 in BF16. Three
    products of each matrix without adapters, two beside them."""
    matrices, tokens = 2 * 12 * 32**2 + 272 * 32, 8 * 48
    attention = 3 * 4 * 2 * 32 * 8 * (48 * 49 // 2)
    found = {}
    for adapter in ("none", "lora"):
        config, _, _ = composed(
            "precision=bf16", f"memory/adapter={adapter}", "model.init=/tmp/nowhere"
        )
        found[adapter] = least_seconds(config, GPUS["h200"])
    # Parameters of two bytes are read and written, gradients read; 13 * 32 are norms and biases.
    moved = 3 * 2 * (2 * (12 * 32**2 + 13 * 32) + (272 + 512) * 32 + 2 * 32)
    whole = (6 * matrices * tokens + attention) / 989.4e12 + moved / 4.8e12
    assert found["none"] == pytest.approx(whole)
    assert found["lora"] == pytest.approx((4 * matrices * tokens + attention) / 989.4e12)
