"""Every option of every memory lever trains two updates on a CPU, or is refused with a reason."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from models.gpt import GPT
from models.gpt_network import GPTNetwork
from runner.assemble import assemble
from runner.checks import build_parts
from runner.config import conf_dir
from runner.contracts import Unsupported, UserError
from runner.measure.account import MemoryAccount, MemoryTracker
from runner.measure.probe import probe
from runner.memory.adapter import LoRA, QLoRA
from runner.memory.checkpointing import Blocks, Selective
from runner.memory.installed import absent
from runner.memory.loss import Chunked, Full, Fused
from runner.memory.optimizer_state import LowBit
from runner.optimizer import AdamW
from runner.step import measured_update
from runner.weights import save_weights
from tests.support import Quiet, weights
from tests.test_assemble import CPU, SMALL, corpus, job_of
from tests.test_checks import config

OPTIONS = sorted(
    f"{path.parent.name}={path.stem}" for path in (conf_dir() / "memory").glob("*/*.yaml")
)
REFUSED = {
    "attention=cudnn": "memory/attention=cudnn",
    "attention=efficient": "memory/attention=efficient",
    "checkpointing=budget": "budget with compile=off",
    "offload=activations": "in host memory already",
    "optimizer_state=cpu_offload": "on the host already",
}


def outcome(option: str, *words: str) -> str:
    """`trained`, or the reason why not."""
    try:
        chosen = config(*SMALL, f"memory/{option}", *words)
        job = assemble(chosen, build_parts(chosen), CPU, corpus())
    except (Unsupported, UserError) as error:
        return str(error)
    account, trained = probe(job.training, job.feed.probes(2))
    assert trained.contradiction() is None
    found = [lever.contradiction(trained.dispatched) for lever in job.parts.levers.values()]
    assert not any(found)
    assert account is not None
    assert account.largest_live_object
    before = weights(job.training.model)
    draws = job.feed.draws()
    for _ in range(2):
        figures = measured_update(job.training, lambda: next(draws), Quiet()).figures
        assert figures is not None
        assert figures.isfinite().all()
    after = job.training.trained
    assert after
    assert not any(torch.equal(before[name], tensor) for name, tensor in after.items())
    return "trained"


@pytest.mark.parametrize("option", OPTIONS)
def test_the_option_trains_or_says_why_not(option: str, tmp_path: Path) -> None:
    words = []
    if option in ("adapter=lora", "adapter=qlora"):
        base = build_parts(config(*SMALL)).model.build(seed=1)
        save_weights(base, tmp_path, {})
        words = [f"model.init={tmp_path}"]
    found = outcome(option, *words)
    if option in REFUSED:
        assert REFUSED[option] in found
    else:
        assert found == "trained"


def test_there_are_options_of_every_lever() -> None:
    groups = {option.partition("=")[0] for option in OPTIONS}
    assert groups >= {"adapter", "attention", "checkpointing", "gradients", "loss", "offload"}
    assert {option for option in REFUSED if option not in OPTIONS} == set()


def test_what_excludes_one_another_is_refused_together() -> None:
    words = (
        "optimizer=sgd",
        "compile=default",
        "memory/adapter=qlora",
        "memory/checkpointing=selective",
        "memory/loss=fused",
        "memory/offload=activations",
        "memory/optimizer_state=8bit",
    )
    with pytest.raises(UserError) as raised:
        config(*words)
    keys = [fault.key for fault in raised.value.faults]
    assert sorted(keys) == [
        "memory/adapter",
        "memory/checkpointing",
        "memory/loss",
        "memory/offload",
        "memory/offload",
        "memory/optimizer_state",
        "model.init",
    ]
    assert all(fault.allowed and fault.next_step for fault in raised.value.faults)


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.memory.installed.find_spec", lambda name: None)
    with pytest.raises(Unsupported, match="memory/optimizer_state needs torchao, not installed"):
        job_of("memory/optimizer_state=8bit")
    assert absent("memory/adapter", "adapters", "peft", "bitsandbytes") == (
        "memory/adapter needs peft and bitsandbytes, not installed here: "
        "pip install 'fullstep[adapters]'"
    )


# --- on fake tensors --------------------------------------------------------------------------

TRACED = {
    "adapter=lora": [LoRA()],
    "adapter=qlora nf4": [QLoRA()],
    "adapter=qlora nf4 single": [QLoRA(double=False)],
    "adapter=qlora int8": [QLoRA(base="int8")],
    "adapter=qlora int4": [QLoRA(base="int4")],
    "checkpointing=full": [Blocks()],
    "checkpointing=selective": [Selective()],
    "loss=chunked": [Chunked(tokens=16)],
    "loss=fused": [Fused()],
    "optimizer_state=bf16": [LowBit(bits=16)],
    "optimizer_state=8bit": [LowBit(bits=8)],
    "optimizer_state=4bit": [LowBit(bits=4)],
    "together": [QLoRA(), Blocks(), Chunked(tokens=16), LowBit(bits=8)],
}
SHAPES = GPT(layers=2, heads=2, width=64, positions=64, vocab=272)


def accounted(levers: Sequence[Any]) -> MemoryAccount:
    """The account of one micro-batch and one optimizer step."""
    model = GPTNetwork(SHAPES)
    for lever in levers:
        lever.apply(model)
    loss = next((lever for lever in levers if hasattr(lever, "loss_sum")), Full())
    build = next((found for lever in levers if (found := lever.optimizer())), None)
    part = AdamW(lr=1e-3, implementation="foreach")
    optimizer = build(part, model, CPU).optimizer if build else part.build(model, CPU)
    ids = torch.zeros(2, 30, dtype=torch.int64)

    def update(phases: Any) -> None:
        phases.enter("forward")
        hidden = model.hidden(ids, None, None)
        found = loss.loss_sum(hidden, model.head_weight, ids, None)
        del hidden
        phases.enter("backward")
        found.backward()
        phases.enter("optimizer")
        optimizer.step()
        optimizer.zero_grad()

    update(Quiet())
    tracker = MemoryTracker(model=model, optimizer=optimizer, inputs=[ids])
    with tracker:
        update(tracker)
    return tracker.account()


@pytest.mark.parametrize("levers", list(TRACED.values()), ids=list(TRACED))
def test_fake_tensors_give_the_account_of_real_ones_to_the_byte(levers: Sequence[Any]) -> None:
    real = accounted(levers)
    with FakeTensorMode():
        fake = accounted(levers)
    assert fake.at_peak == real.at_peak
    assert fake.largest_by_category == real.largest_by_category
    assert fake.peak_by_phase == real.peak_by_phase
    assert [item.bytes for item in fake.largest] == [item.bytes for item in real.largest]
