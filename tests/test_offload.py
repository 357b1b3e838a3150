"""Tests of runner/memory/offload.py and hostcopies.py: what is copied, once, and what stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runner.assemble import assemble
from runner.checks import build_parts
from runner.contracts import Unsupported
from runner.memory.hostcopies import HostCopies, HostCopy, fetch
from runner.memory.offload import Activations
from runner.step import measured_update
from tests.support import Quiet, examples, padded, relative_difference, tiny_gpt, training_of
from tests.test_assemble import CPU, SMALL, corpus
from tests.test_checks import config, refused


def test_on_a_cpu_it_is_refused() -> None:
    chosen = config(*SMALL, "memory/offload=activations")
    with pytest.raises(Unsupported, match="memory/offload=activations: on cpu"):
        assemble(chosen, build_parts(chosen), CPU, corpus())


def test_compiled_code_and_checkpointing_are_refused_together() -> None:
    words = ("memory/offload=activations", "memory/checkpointing=full", "compile=default")
    reasons = [fault.given for fault in refused(*words)]
    assert reasons == [
        "activations with compile=default",
        "activations with memory/checkpointing",
    ]


def test_gradients_through_host_copies_are_bit_equal() -> None:
    gradients = []
    for lever in (None, Activations(min_bytes=0)):
        model = tiny_gpt(dropout=0.5)
        if lever:
            lever.apply(model)
        torch.manual_seed(0)
        measured_update(training_of(model), lambda: padded(examples(9, 20), 1), Quiet())
        gradients.append([p.grad for p in model.parameters()])
    assert relative_difference(*gradients) == 0  # type: ignore


def packed(copies: HostCopies, model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list]:  # type: ignore
    """The model's output, and what autograd kept instead of the tensors it saved."""
    kept = []

    def pack(tensor: torch.Tensor) -> object:
        kept.append(copies._pack(tensor))
        return kept[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, fetch):
        return model(x), kept


def test_parameters_and_small_tensors_stay_and_a_tensor_saved_twice_is_copied_once() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) * self.b(x)

    model = Two()
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    x = torch.randn(4, 8, requires_grad=True)
    out, kept = packed(HostCopies(kept=own, min_bytes=0), model, x)
    copies = {id(item) for item in kept if isinstance(item, HostCopy)}
    stayed = [item for item in kept if isinstance(item, torch.Tensor)]
    assert len(copies) == 3  # x for both matrices, and the two factors
    assert all(item.untyped_storage()._cdata in own for item in stayed)
    out.sum().backward()  # type: ignore
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for p, wanted in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.grad, wanted)  # type: ignore
    _, kept = packed(HostCopies(kept=own, min_bytes=4 * 8 * 4 + 1), model, x)
    assert not any(isinstance(item, HostCopy) for item in kept)


def test_a_storage_that_is_freed_and_made_anew_is_copied_anew() -> None:
    copies = HostCopies(kept=set(), min_bytes=0)
    values = []
    held = []
    for number in range(50):
        tensor = torch.full((64,), float(number))  # the allocator gives the same place again
        held.append(copies._pack(tensor))
        del tensor
    values = [float(fetch(item)[0]) for item in held]
    assert values == [float(n) for n in range(50)]


def test_a_tensor_that_changed_between_two_savings_is_copied_twice() -> None:
    copies = HostCopies(kept=set(), min_bytes=0)
    tensor = torch.zeros(4)
    first = copies._pack(tensor)
    tensor.add_(1)
    second = copies._pack(tensor)
    assert fetch(first).tolist() == [0] * 4
    assert fetch(second).tolist() == [1] * 4
