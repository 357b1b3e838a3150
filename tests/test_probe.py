"""Tests of runner/measure/probe.py: untimed updates leave no trace and tell the truth."""

from __future__ import annotations

import pytest
import torch

from runner.contracts import ScalePolicy
from runner.measure.probe import TRIES, ahead, probe, untouched
from runner.optimizer import AdamW
from runner.step import measured_update
from tests.support import Quiet, examples, padded, tiny_gpt, training_of, weights


def training(**changes):  # type: ignore
    return training_of(tiny_gpt(dropout=0.2), optimizer=AdamW(lr=1e-2), **changes)


def test_untimed_updates_leave_no_trace() -> None:
    job = training(policy=ScalePolicy(init=2.0**40))
    torch.manual_seed(3)
    before, state = weights(job.model), torch.get_rng_state()
    _, trained = probe(job, [padded(examples(9, 12), 1)])
    assert trained.applied
    assert all(torch.equal(before[n], p) for n, p in job.model.named_parameters())
    assert all(p.grad is None for p in job.model.parameters())
    assert not job.optimizer.state
    assert job.scaler.state_dict() == {"scale": 2.0**40, "streak": 0}
    assert int(job.applied) == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_a_run_with_and_without_probes_is_the_same_run() -> None:
    losses = []
    for probed in (False, True):
        job = training()
        torch.manual_seed(1)
        if probed:
            probe(job, [padded(examples(9, 12), 2)])
        draws = [padded(examples(9, 12, 5), 1) for _ in range(3)]
        outcomes = [measured_update(job, lambda d=d: d, Quiet()) for d in draws]
        losses.append([o.figures.tolist()[0] for o in outcomes])
    assert losses[0] == losses[1]


def test_a_trace_is_removed_even_after_an_error() -> None:
    job = training()
    before = weights(job.model)
    with pytest.raises(RuntimeError, match="planted"), untouched(job):
        measured_update(job, lambda: padded(examples(9), 1), Quiet())
        raise RuntimeError("planted")
    assert all(torch.equal(before[n], p) for n, p in job.model.named_parameters())
    assert not job.optimizer.state


def test_a_model_that_trains_contradicts_nothing() -> None:
    job = training()
    _, trained = probe(job, [padded(examples(9, 30), 1)])
    assert trained.parameters == len(job.parameters)
    assert trained.contradiction() is None
    assert trained.lengths == (9, 30)


def test_tensors_that_no_gradient_reaches_are_named() -> None:
    job = training()
    name, parameter = next(
        (n, p) for n, p in job.model.named_parameters() if n.endswith("weight") and "blocks" in n
    )
    parameter.register_hook(torch.zeros_like)
    _, trained = probe(job, [padded(examples(9), 1)])
    assert trained.no_gradient == (name,)
    assert name in str(trained.contradiction())


def test_tensors_that_no_update_changes_are_named() -> None:
    job = training()
    left_out = job.optimizer.param_groups[0]["params"].pop()
    _, trained = probe(job, [padded(examples(9), 1)])
    names = {n for n, p in job.model.named_parameters() if p is left_out}
    assert set(trained.unchanged) == names
    assert "no update changes 1 of" in str(trained.contradiction())


def test_a_scale_that_must_first_come_down_is_given_tries() -> None:
    job = training(policy=ScalePolicy(init=2.0**127))
    _, trained = probe(job, [padded(examples(9), 1)])
    assert trained.applied
    stuck = training(policy=ScalePolicy(init=2.0**127, backoff=0.9999))
    _, trained = probe(stuck, [padded(examples(9), 1)])
    assert not trained.applied
    assert trained.contradiction() is None  # skipped updates prove nothing; the loop will tell
    assert TRIES == 8


def test_the_account_is_the_larger_of_the_probes() -> None:
    small, large = padded(examples(5), 1), padded(examples(50, 60), 2)
    account, _ = probe(training(), [small, large])
    alone, _ = probe(training(), [large])
    assert account.peak_bytes == alone.peak_bytes
    only_small, _ = probe(training(), [small])
    assert only_small.peak_bytes < account.peak_bytes


def test_on_a_device_two_updates_inputs_are_there_as_the_loop_has_them() -> None:
    micros = padded(examples(9, 12, 7), 2)
    current, held = ahead(micros, lambda tensor: tensor.clone())
    own = [tensor for micro in current for tensor in micro.tensors]
    assert len(held) == 2 * len(own) == 2 * sum(len(micro.tensors) for micro in micros)
    assert len({tensor.data_ptr() for tensor in held}) == len(held)
    assert all(any(t is kept for kept in held) for t in own)
    for micro, given in zip(current, micros, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(micro.tensors, given.tensors, strict=True))
