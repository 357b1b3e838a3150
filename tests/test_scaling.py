"""Tests of runner/precision/scaling.py, with torch's GradScaler as the oracle."""

from __future__ import annotations

import random

import pytest
import torch

from runner.contracts import ScalePolicy
from runner.precision.scaling import LossScaler

CPU = torch.device("cpu")


def oracle_scales(policy: ScalePolicy, bad: list[bool]) -> list[float]:
    """The scale after each update of torch's own scaler."""
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=policy.init,
        growth_factor=policy.growth,
        backoff_factor=policy.backoff,
        growth_interval=policy.interval,
    )
    parameter = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scales = []
    for skip in bad:
        optimizer.zero_grad()
        scaler.scale(parameter * (float("inf") if skip else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("seed", range(5))
def test_the_scale_follows_torch_s_own_scaler_through_any_history(seed: int) -> None:
    draws = random.Random(seed)
    policy = ScalePolicy(init=1024.0, growth=2.0, backoff=0.5, interval=draws.randint(1, 4))
    bad = [draws.random() < 0.3 for _ in range(40)]
    scaler = LossScaler(policy, CPU)
    scales = []
    for skip in bad:
        scaler.update(torch.tensor(float(skip)))
        scales.append(float(scaler.scale))
    assert scales == oracle_scales(policy, bad)


def test_growth_that_would_overflow_is_not_made() -> None:
    policy = ScalePolicy(init=2.0**127, interval=1)
    scaler = LossScaler(policy, CPU)
    scaler.update(torch.tensor(0.0))
    assert float(scaler.scale) == 2.0**127
    assert oracle_scales(policy, [False]) == [2.0**127]


def test_a_restored_scaler_goes_on_where_the_saved_one_was() -> None:
    policy = ScalePolicy(init=8.0, interval=3)
    saved, restored = LossScaler(policy, CPU), LossScaler(policy, CPU)
    for bad in (0.0, 0.0):
        saved.update(torch.tensor(bad))
    restored.load_state_dict(saved.state_dict())
    assert restored.state_dict() == {"scale": 8.0, "streak": 2}
    for scaler in (saved, restored):
        scaler.update(torch.tensor(0.0))
        assert scaler.state_dict() == {"scale": 16.0, "streak": 0}
