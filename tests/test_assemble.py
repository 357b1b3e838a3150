"""Tests of runner/assemble.py and of the recipes' effect on a built job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from runner.assemble import (
    assemble,
    choose_device,
    evaluation_micros,
    lacking,
    planned_updates,
    realised,
)
from runner.checks import _role_faults, build_parts
from runner.contracts import (
    BuiltOptimizer,
    Corpus,
    Lever,
    OptimizerBuilder,
    OptimizerPart,
    Recipe,
    Requirements,
    ScalePolicy,
    Unsupported,
    UserError,
)
from runner.measure.probe import probe
from runner.precision.controls import set_controls
from runner.step import measured_update
from tests.support import (
    PAD,
    Quiet,
    example,
    examples,
    padded,
    reference_gradient,
    relative_difference,
    tiny_gpt,
    training_of,
)
from tests.test_checks import config

CPU = torch.device("cpu")
SMALL = ("model.layers=1", "model.width=16", "model.positions=64", "seq_len=64", "batch=4")


def corpus(**changes: object) -> Corpus:
    made = [example(n, seed=n) for n in range(4, 16)]
    return Corpus(
        **{"train": made, "eval": made[:6], "fingerprint": "f", "vocab": 258, "pad_id": PAD}
        | changes  # type: ignore
    )


def job_of(*words: str):  # type: ignore
    chosen = config(*SMALL, *words)
    return assemble(chosen, build_parts(chosen), CPU, corpus())


def test_the_same_seed_gives_the_same_weights_and_order_for_every_recipe() -> None:
    one, two = job_of("precision=fp32", "seed=3"), job_of("precision=bf16", "seed=3", "accum=2")
    for a, b in zip(one.training.parameters, two.training.parameters, strict=True):
        assert torch.equal(a, b)
    ids = [torch.cat([m.input_ids.flatten() for m in next(j.feed.draws())]) for j in (one, two)]
    assert sorted(set(ids[0].tolist())) == sorted(set(ids[1].tolist()))
    other = job_of("seed=4")
    assert not torch.equal(one.training.parameters[0], other.training.parameters[0])


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_a_recipe_computes_in_its_format_over_fp32_parameters(
    precision: str, dtype: torch.dtype
) -> None:
    job = job_of(f"precision={precision}")
    seen = set()

    def note(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        seen.add(output.dtype)

    for module in job.training.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(note)
    measured_update(job.training, lambda: next(job.feed.draws()), Quiet())
    assert seen == {dtype}
    assert {p.dtype for p in job.training.parameters} == {torch.float32}
    assert {p.grad.dtype for p in job.training.parameters} == {torch.float32}
    assert (job.training.scaler is not None) == (precision == "fp16")


def test_fp32_is_ieee_by_name_and_read_back() -> None:
    controls = set_controls(Recipe().controls())
    precisions = {value for name, value in controls.items() if name.endswith("fp32_precision")}
    assert precisions == {"ieee"}
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


def test_a_control_that_does_not_keep_its_value_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stubborn:
        @property
        def fp32_precision(self) -> str:
            return "tf32"

        @fp32_precision.setter
        def fp32_precision(self, value: str) -> None:
            pass

    monkeypatch.setattr(torch.backends, "cudnn", Stubborn())
    with pytest.raises(RuntimeError, match="reads 'tf32' after 'ieee'"):
        set_controls({"cudnn.fp32_precision": "ieee"})


def test_devices_are_chosen_by_name_and_never_replaced() -> None:
    assert choose_device("cpu") == CPU
    if not torch.cuda.is_available():
        assert choose_device("auto") == CPU
        with pytest.raises(Unsupported, match="sees no CUDA device"):
            choose_device("cuda")


@dataclass(frozen=True, kw_only=True)
class NeedsCuda(Recipe):
    requirements: ClassVar[Requirements] = Requirements(cuda=True, capability=(8, 9))


def test_a_recipe_that_needs_a_gpu_is_refused_on_a_cpu() -> None:
    parts = build_parts(config())
    object.__setattr__(parts, "precision", NeedsCuda())
    with pytest.raises(Unsupported, match="NeedsCuda needs a CUDA device"):
        realised(config(), parts, CPU)


@dataclass(frozen=True, kw_only=True)
class Fp64OnGpu(NeedsCuda):
    def emulation(self) -> Recipe:
        return Recipe()


def test_what_the_device_lacks_is_emulated_only_when_asked_for() -> None:
    parts = replace(build_parts(config()), precision=Fp64OnGpu())
    with pytest.raises(Unsupported, match=r"Fp64OnGpu needs a CUDA device.*emulate=true runs its"):
        realised(config(), parts, CPU)
    emulated, reason = realised(config("emulate=true"), parts, CPU)
    assert type(emulated.precision) is Recipe
    assert reason == "precision: Fp64OnGpu needs a CUDA device; this job runs on cpu"
    with pytest.raises(Unsupported, match=r"NeedsCuda needs a CUDA device; this job runs on cpu$"):
        realised(config("emulate=true"), replace(parts, precision=NeedsCuda()), CPU)


def test_a_recipe_that_the_device_can_run_is_never_emulated() -> None:
    parts = build_parts(config("emulate=true"))
    assert realised(config("emulate=true"), parts, CPU) == (parts, None)


@dataclass(frozen=True, kw_only=True)
class NeedsAModule(Recipe):
    requirements: ClassVar[Requirements] = Requirements(modules=("torch", "no_such_module"))


def test_a_module_that_is_not_installed_is_named() -> None:
    assert lacking(NeedsAModule(), CPU) == (
        "precision: NeedsAModule needs no_such_module, which is not installed"
    )


@dataclass(frozen=True, kw_only=True)
class HalfWeights(Recipe):
    def prepare(self, model: nn.Module) -> nn.Module:
        return model.half()

    def scaler(self) -> ScalePolicy | None:
        return ScalePolicy()


def test_loss_scaling_over_fp16_parameters_is_refused_before_training() -> None:
    chosen = config(*SMALL)
    parts = build_parts(chosen)
    object.__setattr__(parts, "precision", HalfWeights())
    with pytest.raises(UserError, match="loss scaling over FP16 parameters"):
        assemble(chosen, parts, CPU, corpus())


def test_epochs_become_updates_with_the_short_last_one_counted() -> None:
    chosen = config("updates=null", "epochs=2", "batch=4")
    assert planned_updates(chosen, 7) == 4
    assert planned_updates(config("updates=9"), 7) == 9


def test_a_held_out_split_without_targets_is_refused() -> None:
    job = job_of()
    with pytest.raises(UserError, match="without one target"):
        evaluation_micros(config(*SMALL), corpus(eval=[example(5, masked=5)]), job.feed)


def test_held_out_examples_are_all_there_once() -> None:
    job = job_of("eval.examples=5")
    assert sum(micro.examples for micro in job.evaluation.micros) == 5
    assert job.evaluation.tokens == sum(n - 1 for n in range(4, 9))
    assert len(examples(3, 4)) == 2


# --- who builds the optimizer -----------------------------------------------------------------


def halved_rate(part: OptimizerPart, model: nn.Module, device: torch.device) -> BuiltOptimizer:
    """SGD in its plain form, at half the rate that the part asks for."""
    optimizer = torch.optim.SGD(model.parameters(), lr=part.lr / 2)
    return BuiltOptimizer(optimizer=optimizer)


@dataclass(frozen=True, kw_only=True)
class BuildsItself(Recipe):
    formats: ClassVar[Mapping[str, str]] = {"compute": "fp32"}

    def optimizer(self) -> OptimizerBuilder:
        return halved_rate


@dataclass(frozen=True, kw_only=True)
class LeverBuilds(Lever):
    def optimizer(self) -> OptimizerBuilder:
        return halved_rate


def test_a_recipe_or_a_lever_may_build_the_optimizer_and_the_host_then_reads_the_flag() -> None:
    chosen = config(*SMALL, "optimizer.lr=0.5")
    parts = build_parts(chosen)
    usual = assemble(chosen, parts, CPU, corpus()).training
    assert usual.optimizer.param_groups[0]["fused"]
    assert parts.optimizer.skips_on_device and not usual.skips_on_device  # nothing waits on a CPU
    for changes in (
        {"precision": BuildsItself()},
        {"levers": {**parts.levers, "memory.x": LeverBuilds()}},
    ):
        training = assemble(chosen, replace(parts, **changes), CPU, corpus()).training  # type: ignore
        assert type(training.optimizer) is torch.optim.SGD
        assert training.optimizer.param_groups[0]["lr"] == 0.25
        assert not training.skips_on_device


def test_two_parts_that_build_the_optimizer_are_refused_by_both_keys() -> None:
    chosen = config(*SMALL)
    parts = build_parts(chosen)
    both = replace(
        parts, precision=BuildsItself(), levers={**parts.levers, "memory.x": LeverBuilds()}
    )
    (fault,) = _role_faults(both)
    assert fault.key == "precision, memory.x"
    assert "2 parts that each build the optimizer" in fault.given
    with pytest.raises(UserError, match=r"precision, memory\.x: given 2 parts"):
        assemble(chosen, both, CPU, corpus())


def test_masters_take_the_place_of_their_parameters_in_the_update() -> None:
    """Gradients go to a master in FP64; it is measured, clipped, stepped and copied back."""
    model = tiny_gpt()
    name, parameter = next(iter(model.named_parameters()))
    master = parameter.detach().double().requires_grad_()

    def hand_over(given: torch.Tensor) -> None:
        assert given.grad is not None
        grown = given.grad.double() if master.grad is None else master.grad + given.grad
        master.grad, given.grad = grown, None

    parameter.register_post_accumulate_grad_hook(hand_over)
    training = training_of(model, masters={name: master})
    assert training.trained[name] is master
    assert len(training.parameters) == len(list(model.parameters()))
    outcome = measured_update(training, lambda: padded(examples(9, 5), 1), Quiet())
    _, gradients = reference_gradient(tiny_gpt(), examples(9, 5))
    assert relative_difference([master.grad], gradients[:1]) < 1e-6
    assert outcome.figures.tolist()[1] == pytest.approx(  # type: ignore
        float(torch.stack([g.norm() for g in gradients]).norm()), rel=1e-5
    )


def test_untimed_updates_put_masters_back_and_look_at_them_for_gradients() -> None:
    model = tiny_gpt()
    name, parameter = next(iter(model.named_parameters()))
    master = parameter.detach().double().requires_grad_()

    def hand_over(given: torch.Tensor) -> None:
        assert given.grad is not None
        master.grad, given.grad = given.grad.double(), None

    parameter.register_post_accumulate_grad_hook(hand_over)
    training = training_of(model, masters={name: master})
    training.optimizer.param_groups[0]["params"][0] = master
    before = master.detach().clone()
    account, trained = probe(training, [padded(examples(9), 1)])
    assert trained.contradiction() is None
    assert torch.equal(master, before)
    assert account is not None
    assert account.at_peak["optimizer_state"] >= master.nbytes
