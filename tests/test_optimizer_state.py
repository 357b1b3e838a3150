"""Tests of runner/memory/optimizer_state.py: AdamW's moments elsewhere, or in fewer bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runner.assemble import assemble
from runner.checks import build_parts
from runner.contracts import Unsupported
from runner.measure.probe import probe
from runner.measure.storages import plain_tensors
from runner.memory.hostadamw import HostAdamW
from runner.optimizer import AdamW, parameter_groups
from runner.step import measured_update
from tests.support import Quiet, examples, padded, relative_difference, tiny_gpt, training_of
from tests.test_assemble import CPU, corpus, job_of
from tests.test_checks import config, refused

LOW = {"bf16": 2.0, "8bit": 1.0, "4bit": 0.5}
"""Bytes of a moment's element, scales apart."""


ROOMY = ("model.layers=1", "model.width=64", "model.positions=64", "seq_len=64", "batch=4")


def updated(*words: str, updates: int) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """What a few updates with a clipped gradient added to each weight; the moments after them, of
    the tensors that are large enough to be kept in few bits."""
    chosen = config(*ROOMY, "optimizer.weight_decay=0.5", "clip=0.1", *words)
    job = assemble(chosen, build_parts(chosen), CPU, corpus())
    before = [p.detach().clone() for p in job.training.parameters]
    draws = job.feed.draws()
    for _ in range(updates):
        measured_update(job.training, lambda: next(draws), Quiet())
    added = [p.detach() - b for p, b in zip(job.training.parameters, before, strict=True)]
    large = [p for p in job.training.parameters if p.numel() >= 4096]
    state = job.training.optimizer.state
    names = ("exp_avg", "exp_avg_sq")
    return added, {name: [values(state[p][name]) for p in large] for name in names}


def values(moment: Tensor) -> Tensor:
    """What a moment of any format stands for."""
    return moment.dequantize() if hasattr(moment, "codes") else moment.float()  # type: ignore


@pytest.mark.parametrize(("option", "within"), [("bf16", 0.003), ("8bit", 0.02), ("4bit", 0.35)])
def test_only_the_moments_are_rounded_and_by_no_more_than_their_bits(
    option: str, within: float
) -> None:
    exact, true_moments = updated("optimizer.implementation=plain", updates=1)
    found, moments = updated(f"memory/optimizer_state={option}", updates=1)
    # The first update computes with moments that were not stored yet: it is AdamW's own.
    assert relative_difference(found, exact) < 1e-5
    for name in moments:
        assert 1e-5 < relative_difference(moments[name], true_moments[name]) < within
    later = [updated(*words, updates=4)[0] for words in ((), (f"memory/optimizer_state={option}",))]
    assert 1e-5 < relative_difference(later[1], later[0]) < min(3 * within + 0.01, 0.6)


@pytest.mark.parametrize("option", list(LOW))
def test_the_moments_take_the_bytes_that_their_bits_say(option: str) -> None:
    chosen = config(*ROOMY, f"memory/optimizer_state={option}")
    job = assemble(chosen, build_parts(chosen), CPU, corpus())
    account, trained = probe(job.training, job.feed.probes(2))
    assert trained.contradiction() is None
    expected = 0.0
    block = {"8bit": 256, "4bit": 128}.get(option)
    codes = {"8bit": 256, "4bit": 16}.get(option, 0)  # entries of the table of values
    for p in job.training.parameters:
        low = p.numel() >= 4096
        expected += 2 * p.numel() * (LOW[option] if low else 4) + 4  # and the step
        if low and block:
            expected += 2 * (4 * p.numel() / block + 4 * codes)
    rates = 4 * len(job.training.optimizer.param_groups)
    assert account is not None
    assert account.largest_by_category["optimizer_state"] == expected + rates


def test_a_skipped_update_leaves_low_bit_moments_alone_and_the_rate_is_the_schedules() -> None:
    job = job_of("memory/optimizer_state=8bit", "schedule=constant", "updates=4")
    micros = next(job.feed.draws())
    measured_update(job.training, lambda: micros, Quiet())
    parameter = job.training.parameters[0]
    state = [
        plain.clone() for plain in plain_tensors(job.training.optimizer.state[parameter]["exp_avg"])
    ]
    hook = parameter.register_hook(lambda gradient: gradient * torch.inf)
    outcome = measured_update(job.training, lambda: micros, Quiet())
    hook.remove()
    assert outcome.figures.tolist()[2] == 1  # type: ignore
    after = plain_tensors(job.training.optimizer.state[parameter]["exp_avg"])
    assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))
    rates = [float(group["lr"]) for group in job.training.optimizer.param_groups]
    assert rates == pytest.approx([5e-3] * len(rates))


@pytest.mark.parametrize("option", ["bf16", "8bit", "4bit", "cpu_offload"])
def test_another_optimizer_than_adamw_is_refused(option: str) -> None:
    (fault,) = refused("optimizer=sgd", f"memory/optimizer_state={option}")
    assert fault.key == "memory/optimizer_state"
    assert "optimizer=adamw" in fault.next_step


def test_bf16_moments_with_a_slow_second_beta_are_refused_with_the_reason() -> None:
    words = ("memory/optimizer_state=bf16", "optimizer.betas=[0.9,0.999]")
    (fault,) = refused(*words)
    assert (fault.key, "round back" in fault.allowed) == ("optimizer.betas", True)
    # the reason: a second moment of 1 moves by 0.001 towards 2, and BF16 rounds that away
    moment = torch.ones((), dtype=torch.bfloat16)
    assert (moment.float().lerp(torch.tensor(2.0), 1 - 0.999)).bfloat16() == moment
    assert (moment.float().lerp(torch.tensor(2.0), 1 - 0.99)).bfloat16() > moment
    assert config("memory/optimizer_state=8bit", "optimizer.betas=[0.9,0.999]")


def test_on_a_cpu_a_host_optimizer_is_refused() -> None:
    with pytest.raises(Unsupported, match="memory/optimizer_state=cpu_offload: on cpu"):
        job_of("memory/optimizer_state=cpu_offload")


def test_adamw_on_the_host_is_adamw_with_clipped_gradients() -> None:
    part = AdamW(lr=1e-2, weight_decay=0.5, implementation="plain")
    results = []
    for host in (False, True):
        model = tiny_gpt()
        settings = {"lr": part.lr, "betas": part.betas, "eps": part.eps}
        groups = parameter_groups(model, part.weight_decay)
        job = training_of(model, optimizer=part, clip=1e-3, factors=[1.0, 0.5, 0.25])
        if host:
            job = replace(job, optimizer=HostAdamW(groups, **settings))
            _, trained = probe(job, [padded(examples(9), 1)])  # clears the state: made anew
            assert trained.contradiction() is None
        for _ in range(3):
            measured_update(job, lambda: padded(examples(9, 20), 1), Quiet())
        results.append([p.detach() for p in model.parameters()])
    assert relative_difference(results[1], results[0]) < 1e-6
    start = [p.detach() for p in tiny_gpt().parameters()]
    assert relative_difference(results[0], start) > 1e-3
