"""The gradient probe: orderings that must hold, planted scale errors, and no trace."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from runner.assemble import Job
from runner.contracts import Recipe
from runner.measure.gradients import (
    Agreement,
    GradientProbe,
    agreement,
    gradient_probe,
    group_of,
    measured_gradients,
)
from runner.precision.policies import E4M3, fp8, mxfp8
from tests.support import weights
from tests.test_recipes import job_of

WORDS = ("accum=2", "model.layers=2")


def probed(job: Job) -> GradientProbe:
    micros = job.feed.probes(2)[-1]
    found = measured_gradients(job.training, job.parts.precision, micros)
    assert found is not None
    return found


def error(*words: str) -> float:
    found = probed(job_of(*WORDS, *words)[0]).gradient.relative_error
    assert found is not None
    return found


def test_agreement_by_hand() -> None:
    a = [torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])]
    found = agreement(a, [torch.tensor([3.0]), torch.tensor([[4.0, 0.0]])])
    # The difference is (0, -4, 4), both norms are 5, the inner product 9.
    assert found.relative_error == pytest.approx(32**0.5 / 5)
    assert found.cosine == pytest.approx(9 / 25)
    assert found.norm_ratio == 1.0


def test_halved_gradients_show_as_cosine_one_and_half_the_norm() -> None:
    whole = [torch.randn(5, 3), torch.randn(7)]
    found = agreement([0.5 * t for t in whole], whole)
    assert found.cosine == pytest.approx(1.0)
    assert found.norm_ratio == pytest.approx(0.5)
    assert found.relative_error == pytest.approx(0.5)


def test_what_is_zero_or_not_finite_agrees_with_nothing() -> None:
    one = [torch.ones(2)]
    for bad in ([torch.zeros(2)], [torch.tensor([1.0, torch.nan])]):
        assert agreement(bad, one).cosine is None
        assert agreement(one, bad).relative_error is None


def test_a_gradient_that_was_flushed_to_zero_is_wrong_by_all_of_it() -> None:
    zero, one = [torch.zeros(2)], [torch.ones(2)]
    assert agreement(zero, one) == Agreement(relative_error=1.0, cosine=None, norm_ratio=0.0)
    assert agreement(zero, zero) == Agreement(relative_error=0.0, cosine=None, norm_ratio=None)


def test_fp32_against_itself_has_no_error() -> None:
    found = probed(job_of(*WORDS, "precision=fp32")[0])
    assert found.gradient.relative_error == found.output.relative_error == 0.0
    within = {f"blocks.{n}.{part}" for n in (0, 1) for part in ("norm_1", "attn", "norm_2", "mlp")}
    assert set(found.groups) == {"embed", "position", "norm"} | within


def test_recipes_order_as_their_formats_do() -> None:
    tf32, bf16, fp16 = (error(f"precision={n}") for n in ("tf32", "bf16", "fp16_master"))
    assert 1e-5 < tf32 < bf16 < 0.02
    assert 1e-5 < fp16 < bf16
    mxfp8, nvfp4 = error("precision=mxfp8"), error("precision=nvfp4")
    assert bf16 < mxfp8 < nvfp4 < 0.5


def test_blocks_hold_what_stands_beside_an_outlier_and_one_scale_for_the_tensor_loses_it() -> None:
    """At the scale 448 / 200,000 what is below 0.43 lies under half of E4M3's smallest number,
    2**-9. In blocks of 32 the outlier takes its own block along, no other. (A whole gradient shows
    it by luck only: there the rounding of the outlier itself outweighs all the rest.)"""
    x = 0.1 + 0.3 * torch.rand(4, 64, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 200_000.0
    others = torch.ones_like(x, dtype=torch.bool)
    others[0, :32] = False
    assert not fp8(x, E4M3, "tensor")[others].any()
    kept = agreement([mxfp8(x)[others]], [x[others]]).relative_error
    assert kept is not None and 0 < kept < 2**-4


class Halved(torch.autograd.Function):
    """Gives what it is given, and half its gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0] / 2


@dataclass(frozen=True, kw_only=True)
class HalvesAtTheEnd(Recipe):
    """A recipe with a scale error: what goes back from the last normalisation is halved."""

    def compute(self, device: torch.device):  # type: ignore
        return nn.modules.module.register_module_forward_hook(self._halve)

    def _halve(self, module: nn.Module, inputs: object, output: object) -> object:
        return Halved.apply(output) if type(module).__name__ == "GPTNetwork" else None


def test_a_recipe_that_halves_gradients_is_caught() -> None:
    job, _ = job_of(*WORDS, "model.tied=false")
    recipe = HalvesAtTheEnd()
    training = replace(job.training, forward_contexts=lambda: [recipe.compute(torch.device("cpu"))])
    found = gradient_probe(training, recipe, job.feed.probes(2)[-1])
    assert found.output.relative_error == 0.0
    assert found.groups["blocks.0.attn"].cosine == pytest.approx(1.0)
    assert found.groups["blocks.0.attn"].norm_ratio == pytest.approx(0.5)
    assert found.groups["head"].norm_ratio == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["fp16_master", "bf16_pure", "fp8_delayed", "int4"])
def test_the_probe_leaves_no_trace(name: str) -> None:
    job, _ = job_of(*WORDS, f"precision={name}", "model.dropout=0.1")
    training = job.training
    before, masters = weights(training.model), [p.detach().clone() for p in training.parameters]
    buffers = {n: b.clone() for n, b in training.model.named_buffers()}
    state, modes = torch.get_rng_state(), [m.training for m in training.model.modules()]
    found = probed(job)
    assert found.gradient.cosine is not None and found.gradient.cosine > 0.5
    assert all(torch.equal(before[n], p) for n, p in training.model.named_parameters())
    assert all(torch.equal(a, b) for a, b in zip(masters, training.parameters, strict=True))
    assert all(torch.equal(buffers[n], b) for n, b in training.model.named_buffers())
    assert all(p.grad is None for p in (*training.parameters, *training.model.parameters()))
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in training.model.modules()] == modes
    assert not training.optimizer.state
    rounding = [m for m in training.model.modules() if hasattr(m, "in_evaluation")]
    assert all(m.in_evaluation == (name == "int4") for m in rounding)


def test_layers_are_grouped_by_the_parts_of_each_block() -> None:
    assert group_of("blocks.11.mlp.up.weight") == "blocks.11.mlp"
    assert group_of("model.layers.2.self_attn.q_proj.weight") == "model.layers.2.self_attn"
    assert group_of("transformer.h.2.mlp.experts.3.up.weight") == "transformer.h.2.mlp"
    assert group_of("transformer.wte.weight") == "transformer.wte"
    assert group_of("decoder.layers.3.q.weight") == "decoder.layers.3.q"
    assert group_of("norm.weight") == "norm"
