"""Tests of runner/memory/adapter.py, lowrank.py and frozen.py: LoRA and QLoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner import accounting
from runner.assemble import Job, assemble
from runner.checks import build_parts
from runner.contracts import UserError
from runner.measure.probe import probe
from runner.memory.frozen import Bf16Linear, FrozenLinear, Int4Linear, Int8Linear, Nf4Linear
from runner.step import measured_update
from runner.weights import load_weights, save_weights, unique_tensors
from runner.worker import merged_weights
from tests.support import Quiet, relative_difference
from tests.test_assemble import CPU, corpus
from tests.test_checks import config, refused

SIZES = {
    "gpt_tiny": ("model.layers=2", "model.heads=2", "model.width=64", "model.positions=64"),
    "llama_tiny": ("model.layers=2", "model.width=64", "model.positions=64"),
}
RUN = ("seq_len=64", "batch=4", "accum=2")
QLORA = {
    "nf4": ("memory/adapter=qlora",),
    "nf4 single": ("memory/adapter=qlora", "memory.adapter.double=false"),
    "int8": ("memory/adapter=qlora", "memory.adapter.base=int8"),
    "int4": ("memory/adapter=qlora", "memory.adapter.base=int4", "memory.adapter.block=32"),
    "bf16": ("memory/adapter=qlora", "memory.adapter.base=bf16"),
}
ADAPTERS = {"lora": ("memory/adapter=lora",), **QLORA}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights of another seed for each model, as if trained."""
    folder = tmp_path_factory.mktemp("bases")
    for model, sizes in SIZES.items():
        spec = build_parts(config(f"model={model}", *sizes, "seq_len=64")).model
        (folder / model).mkdir()
        save_weights(spec.build(seed=7), folder / model, {})
    return folder


def job_of(bases: Path, *words: str, model: str = "gpt_tiny") -> Job:
    init = f"model.init={bases / model}"
    chosen = config(f"model={model}", *SIZES[model], *RUN, init, *words)
    return assemble(chosen, build_parts(chosen), CPU, corpus())


def state(model: nn.Module, *, trained: bool) -> dict[str, Tensor]:
    """Copies of every parameter and buffer that is, or is not, trained."""
    own = {n for n, p in model.named_parameters() if p.requires_grad}
    return {n: t.detach().clone() for n, t in model.state_dict().items() if (n in own) == trained}


def train(job: Job, updates: int) -> None:
    draws = job.feed.draws()
    for _ in range(updates):
        measured_update(job.training, lambda: next(draws), Quiet())


def logits(model: Any) -> Tensor:
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        return model.hidden(ids, None, None) @ model.head_weight.T  # type: ignore


# --- what is trained and what is not ----------------------------------------------------------


@pytest.mark.parametrize("model", list(SIZES))
@pytest.mark.parametrize("adapter", list(ADAPTERS))
def test_adapters_train_the_base_stays_to_the_bit_and_the_merged_model_is_the_adapted_one(
    bases: Path, adapter: str, model: str, tmp_path: Path
) -> None:
    job = job_of(bases, *ADAPTERS[adapter], model=model)
    module: Any = job.training.model
    frozen, adapters = state(module, trained=False), state(module, trained=True)
    assert adapters
    assert all(".lora_" in name for name in adapters)
    train(job, 3)
    after = state(module, trained=False)
    assert all(torch.equal(after[name], tensor) for name, tensor in frozen.items())
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert parameter.dtype == torch.float32
            assert parameter.grad.count_nonzero() > 0, name
            assert parameter.grad.isfinite().all()
            assert not torch.equal(parameter, adapters[name])
        else:
            assert parameter.grad is None
    save_weights(module, tmp_path, {}, merged_weights(job))
    plain = job.parts.model.build(seed=0)
    load_weights(plain, tmp_path)
    difference = (logits(plain) - logits(module)).abs().max()
    assert difference < 1e-4 * logits(module).abs().max()
    assert {n for n, _ in unique_tensors(plain)} == set(merged_weights(job) or ())


def test_before_the_first_update_the_adapted_model_is_the_trained_base(bases: Path) -> None:
    job = job_of(bases, "memory/adapter=lora")
    base = job.parts.model.build(seed=0)
    load_weights(base, bases / "gpt_tiny")
    assert torch.equal(logits(base), logits(job.training.model))
    assert job.initial_weights is not None


def test_probes_accept_frozen_weights_and_adapters_that_start_at_zero(bases: Path) -> None:
    job = job_of(bases, "memory/adapter=qlora", "precision=bf16")
    before = state(job.training.model, trained=False) | state(job.training.model, trained=True)
    account, trained = probe(job.training, job.feed.probes(2))
    assert trained.contradiction() is None
    assert trained.dispatched.contradiction("bf16") is None
    assert trained.parameters == 2 * 2 * 4  # A and B of four matrices in two blocks
    after = state(job.training.model, trained=False) | state(job.training.model, trained=True)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not job.training.optimizer.state
    assert account is not None


def test_targets_are_parts_of_names_and_only_they_are_adapted(bases: Path) -> None:
    words = ("memory/adapter=lora", "memory.adapter.targets=[attn.q,attn.v]")
    job = job_of(bases, *words, model="llama_tiny")
    names = {
        n.partition(".lora_")[0]
        for n, p in job.training.model.named_parameters()
        if p.requires_grad
    }
    assert names == {f"blocks.{i}.attn.{part}" for i in (0, 1) for part in "qv"}


def test_c31_targets_that_name_no_matrix_are_a_fault_that_names_the_matrices(bases: Path) -> None:
    words = ("memory/adapter=lora", "memory.adapter.targets=[attn,q_proj]")
    with pytest.raises(UserError) as raised:
        job_of(bases, *words)
    (fault,) = raised.value.faults
    assert (fault.key, fault.given.split(",")[0]) == ("memory.adapter.targets", "q_proj")
    assert "attn.out, attn.qkv, mlp.down, mlp.up" in fault.allowed


# --- C31: checkpointing over a frozen embedding -----------------------------------------------


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_c31_adapters_train_the_same_under_checkpointing(bases: Path, adapter: str) -> None:
    chosen = (f"memory/adapter={adapter}", "memory.adapter.targets=[attn.q,attn.v]")
    words = (*chosen, "optimizer=sgd")
    changes = []
    for option in ("none", "full", "selective"):
        job = job_of(bases, *words, f"memory/checkpointing={option}", model="llama_tiny")
        adapters = state(job.training.model, trained=True)
        frozen = state(job.training.model, trained=False)
        train(job, 1)
        first = state(job.training.model, trained=True)
        assert all(t.count_nonzero() for n, t in first.items() if ".lora_B." in n)
        train(job, 4)
        after = state(job.training.model, trained=True)
        changes.append([after[name] - adapters[name] for name in adapters])
        for parameter in job.training.parameters:
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()
        still = state(job.training.model, trained=False)
        assert all(torch.equal(still[name], tensor) for name, tensor in frozen.items())
    assert relative_difference(changes[1], changes[0]) < 1e-6
    assert relative_difference(changes[2], changes[0]) < 1e-6


# --- quantized bases --------------------------------------------------------------------------


def source(rows: int = 48, columns: int = 64) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(columns, rows)


LAYERS = {
    "nf4": (lambda s: Nf4Linear(s, 64, double=False), 0.12),
    "nf4 double": (lambda s: Nf4Linear(s, 64, double=True), 0.12),
    "int8": (Int8Linear, 0.01),
    "int4": (lambda s: Int4Linear(s, 32), 0.12),
    "bf16": (Bf16Linear, 0.003),
}


@pytest.mark.parametrize("kind", list(LAYERS))
def test_a_frozen_layer_multiplies_by_what_its_codes_stand_for(kind: str) -> None:
    make, within = LAYERS[kind]
    linear = source()
    layer: FrozenLinear = make(linear)  # type: ignore
    weight = layer.dense(torch.float64)
    assert relative_difference([weight], [linear.weight.detach()]) < within
    x = torch.randn(5, 64, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(5, 48, dtype=torch.float64)
    out = layer(x)
    out.backward(gradient)  # type: ignore
    expected = x.detach() @ weight.T + linear.bias.detach().double()
    assert torch.allclose(out, expected, atol=1e-12)
    assert torch.allclose(x.grad, gradient @ weight, atol=1e-12)  # type: ignore
    assert not any(p.requires_grad for p in layer.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x.float()).dtype == torch.bfloat16


def test_codes_of_a_row_worked_by_hand() -> None:
    linear = nn.Linear(4, 1, bias=False)
    linear.weight.data = torch.tensor([[1.0, -7.0, 3.4, 0.0]])
    eight = Int8Linear(linear)
    assert eight.weight.tolist() == [[18, -127, 62, 0]]  # 127/7 = 18.14 a unit
    four = Int4Linear(linear, block=4)
    assert four.dense(torch.float32).tolist() == [[1.0, -7.0, 3.0, 0.0]]
    assert four.weight.tolist() == [9 | 1 << 4, 11 | 8 << 4]  # codes + 8, two in a byte


def test_c32_a_quantized_base_takes_the_bytes_that_its_bits_say(bases: Path) -> None:
    def stored(*words: str) -> int:
        model: Any = job_of(bases, *words).training.model
        layers = [m for m in model.modules() if isinstance(m, FrozenLinear)]
        assert len(layers) == 2 * 4
        return sum(b.nbytes for m in layers for b in m.buffers())

    weights = 2 * 12 * 64 * 64  # elements of the blocks' matrices
    blocks = weights // 64
    tables = 8 * 4 * 16  # eight layers' sixteen values
    assert stored(*QLORA["nf4 single"]) == weights // 2 + 4 * blocks + tables
    outer = sum(-(-n * 64 * 64 // 64 // 256) for n in (3, 1, 4, 4)) * 2
    double = weights // 2 + blocks + 4 * outer + tables + 8 * (4 + 4 * 256)
    assert stored(*QLORA["nf4"]) == double
    rows = 2 * (192 + 64 + 256 + 64)
    assert stored(*QLORA["int8"]) == weights + 4 * rows
    assert stored(*QLORA["bf16"]) == 2 * weights
    assert stored(*QLORA["int4"]) == weights // 2 + 4 * weights // 32


# --- counts -----------------------------------------------------------------------------------


def test_c32_adapters_add_rank_times_in_plus_out_and_a_quantized_base_keeps_its_count(
    bases: Path,
) -> None:
    plain = job_of(bases).description
    added = 2 * 8 * ((64 + 192) + (64 + 64) + (64 + 256) + (256 + 64))
    for adapter in ADAPTERS:
        job = job_of(bases, *ADAPTERS[adapter])
        assert job.description.params == plain.params + added
        assert sum(p.numel() for p in job.training.parameters) == added
        assert job.description.frozen_matmul_params == plain.matmul_params


def test_model_flops_of_a_frozen_matrix_leave_out_its_gradient() -> None:
    shapes = {"layers": 0, "heads": 1, "head_width": 1, "lengths": [10]}
    assert accounting.model_flops(matmul_params=100, **shapes) == 6 * 100 * 10  # type: ignore
    # 90 of 100 frozen: forward and the gradient of the input for all, that of the weight for 10
    found = accounting.model_flops(matmul_params=100, frozen_params=90, **shapes)  # type: ignore
    assert found == (2 * 100 + 2 * 100 + 2 * 10) * 10
    # the head, 20 of the frozen ones, at 4 of the 10 tokens only
    found = accounting.model_flops(  # type: ignore
        matmul_params=100, frozen_params=90, head_params=20, headless=6, **shapes
    )
    assert found == (4 * 80 + 2 * 10) * 10 + 4 * 20 * 4


# --- conflicts --------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_adapters_of_random_weights_are_refused(adapter: str) -> None:
    (fault,) = refused(f"memory/adapter={adapter}")
    assert (fault.key, fault.next_step) == ("model.init", "model.init=RUN_FOLDER")


@pytest.mark.parametrize("precision", ["bf16_pure", "fp16_master"])
@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_recipes_that_store_trained_weights_in_their_own_way_are_refused(
    bases: Path, adapter: str, precision: str
) -> None:
    words = (*SIZES["gpt_tiny"], *RUN, f"model.init={bases / 'gpt_tiny'}")
    (fault,) = refused(f"memory/adapter={adapter}", f"precision={precision}", *words)
    assert fault.key == "precision"
    assert "adapters are few and stay in FP32" in fault.allowed


@pytest.mark.long
def test_a_compiled_model_with_adapters_has_the_same_gradients(bases: Path) -> None:
    found = []
    for backend in (None, "aot_eager"):
        job = job_of(bases, "memory/adapter=lora", "optimizer=sgd")
        if backend:
            job.training.model.compile(backend=backend, dynamic=True)
        train(job, 2)
        found.append([p.grad for p in job.training.parameters])
    assert relative_difference(found[1], found[0]) < 1e-5  # type: ignore


def test_conflicts_are_refused_together(bases: Path) -> None:
    faults = refused("memory/adapter=qlora", "compile=default", "memory/checkpointing=selective")
    assert [fault.key for fault in faults] == [
        "model.init",
        "memory/adapter",
        "memory/checkpointing",
    ]


def test_a_block_that_does_not_divide_a_matrix_is_a_fault(bases: Path, tmp_path: Path) -> None:
    words = ("model=llama_tiny", *SIZES["llama_tiny"], *RUN, "model.mlp_width=44")
    chosen = config(*words)
    save_weights(build_parts(chosen).model.build(seed=0), tmp_path, {})
    words += (f"model.init={tmp_path}", *QLORA["int4"][:2], "memory.adapter.block=512")
    chosen = config(*words)
    with pytest.raises(UserError, match=r"given 512 for 0\.mlp\.gate with 2816 weights"):
        assemble(chosen, build_parts(chosen), CPU, corpus())
