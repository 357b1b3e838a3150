"""Tests of runner/optimizer.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runner.optimizer import AdamW, Sgd, parameter_groups
from tests.support import tiny_gpt

CPU = torch.device("cpu")


class Gain(nn.Module):
    """A norm whose class name says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Gain()
        self.linear = nn.Linear(4, 4, bias=True)
        self.tied = self.linear.weight
        self.frozen = nn.Parameter(torch.ones(4, 4), requires_grad=False)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "plain"])
def test_only_matrices_decay_whatever_their_modules_are_called(implementation: str) -> None:
    model = Mixed()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    part = AdamW(lr=1e-2, weight_decay=0.5, implementation=implementation)
    optimizer = part.build(model, CPU)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = dict(model.named_parameters())
    assert torch.equal(after["norm.gain"], before["norm.gain"])
    assert torch.equal(after["linear.bias"], before["linear.bias"])
    torch.testing.assert_close(after["tied"], before["tied"] * 0.995)
    assert torch.equal(after["frozen"], before["frozen"])


def test_every_trainable_parameter_is_in_exactly_one_group() -> None:
    model = tiny_gpt()
    groups = parameter_groups(model, 0.1)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(p) for p in model.parameters()}
    assert [len({p.ndim >= 2 for p in group["params"]}) for group in groups] == [1, 1]


@pytest.mark.parametrize("kind", [AdamW, Sgd])
def test_implementations_are_the_same_algorithm(kind: type) -> None:
    results = []
    for implementation in ("fused", "foreach", "plain"):
        model = tiny_gpt(double=True)
        optimizer = kind(lr=1e-2, weight_decay=0.1, implementation=implementation).build(model, CPU)
        for step in range(3):
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, 0.1 * (number - step))
            optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(results[0], results[2], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"lr": 0.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"implementation": "fast"}, "implementation"),
    ],
)
def test_impossible_settings_are_refused_by_name(change: dict, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: given .*; allowed: "):
        AdamW(**{"lr": 1e-3, **change})
