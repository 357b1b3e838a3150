"""Recipes whose weights are stored in 16 bits: what is lost, and what keeps it.

The numbers of cases C18, C19 and C23 of the case list, and their whole kinds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.optim.quant_utils import _fp32_to_bf16_sr

from runner.contracts import BuiltOptimizer, MicroBatch, Recipe, ScalePolicy, UserError
from runner.measure.probe import lost_share, probe
from runner.optimizer import AdamW, Sgd
from runner.precision.bf16_pure import Bf16Pure
from runner.precision.fp16_master import Fp16Master
from runner.precision.scaling import LossScaler
from runner.precision.storage import bf16_at_random
from runner.step import Training, measured_update
from tests.support import Quiet, examples, padded, training_of
from tests.test_assemble import job_of

CPU = torch.device("cpu")
PURE = Bf16Pure()


class Weights(nn.Module):
    """A model whose loss is the inner product of its weights with given numbers."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values))

    def hidden(self, input_ids: Tensor, positions: None, segments: None) -> Tensor:
        return self.w * input_ids

    @property
    def head_weight(self) -> Tensor:
        return self.w


class Inner:
    """The loss is the sum of what the model gives, in FP32."""

    def loss_sum(self, hidden: Tensor, head: Tensor, targets: Tensor, weights: None) -> Tensor:
        return hidden.float().sum()


class Divisor:
    """Divides by a number, whatever the micro-batches hold."""

    def __init__(self, value: float) -> None:
        self.value = value

    def weights(self, micro: MicroBatch) -> None:
        return None

    def denominator(self, micros: Any) -> float:
        return self.value


def linear_training(
    recipe: Recipe, part: Any, *values: float, divisor: float = 1.0, **changes: Any
) -> Training:
    """A Training of `Weights` as `assemble` connects it."""
    model = recipe.prepare(Weights(*values))
    build = recipe.optimizer()
    if build is None:
        built = BuiltOptimizer(
            optimizer=part.build(model, CPU), skips_on_device=part.skips_on_device
        )
    else:
        built = build(part, model, CPU)
    policy = recipe.scaler()
    usual = training_of(model, optimizer=part, objective=Divisor(divisor), loss=Inner())
    settings: dict[str, Any] = {
        "optimizer": built.optimizer,
        "masters": built.masters,
        "skips_on_device": built.skips_on_device,
        "scaler": LossScaler(policy, CPU) if policy else None,
        "lr_factors": torch.ones(1000),
    }
    return replace(usual, **(settings | changes))


def micro(*values: float) -> MicroBatch:
    """A micro-batch whose loss is the weights' inner product with `values`."""
    (one,) = padded(examples(4), 1)
    return replace(one, input_ids=torch.tensor(values))


def train(training: Training, *micros: MicroBatch, updates: int = 1) -> list[list[float]]:
    figures = []
    for _ in range(updates):
        outcome = measured_update(training, lambda: micros, Quiet())
        assert outcome.figures is not None
        figures.append(outcome.figures.tolist())
    return figures


# --- C23: what BF16 weights lose, and who keeps it ---------------------------------------------

SLOW = AdamW(lr=1e-4, implementation="fused")
"""A constant gradient moves a weight by the rate in every update of Adam."""


@pytest.mark.parametrize("implementation", ["fused", "foreach", "plain"])
def test_bf16_weights_lose_updates_that_masters_keep(implementation: str) -> None:
    part = AdamW(lr=1e-4, implementation=implementation)
    kept = linear_training(Recipe(), part, 1.0)
    lost = linear_training(PURE, part, 1.0)
    for training in (kept, lost):
        train(training, micro(1.0), updates=100)
    assert kept.model.w.item() == pytest.approx(0.99, abs=1e-5)  # 100 roundings of 3e-8
    assert lost.model.w.dtype == torch.bfloat16
    assert lost.model.w.item() == 1.0


@pytest.mark.parametrize("implementation", ["fused", "foreach", "plain"])
def test_kahan_keeps_what_a_bf16_weight_cannot_hold(implementation: str) -> None:
    part = AdamW(lr=1e-4, implementation=implementation)
    training = linear_training(Bf16Pure(kahan=True), part, 1.0)
    train(training, micro(1.0), updates=100)
    state = training.optimizer.state[training.model.w]
    whole = training.model.w.float() + state["compensation"].float()
    assert {state[k].dtype for k in ("compensation", "exp_avg", "exp_avg_sq")} == {torch.bfloat16}
    # 0.99 lies 0.36 of the way from 0.9921875 to 0.98828125, its BF16 neighbours.
    assert training.model.w.item() == 0.98828125 or training.model.w.item() == 0.9921875
    # Moments in BF16 make the whole way of 0.01 uncertain by about 1/256.
    assert whole.item() == pytest.approx(0.99, abs=0.01 * 2 / 128)


def test_stochastic_rounding_keeps_small_updates_on_average() -> None:
    torch.manual_seed(0)
    training = linear_training(Bf16Pure(rounding="stochastic"), SLOW, *[1.0] * 4000)
    train(training, micro(*[1.0] * 4000), updates=20)
    values = training.model.w.float()
    assert set(values.unique().tolist()) <= {1.0 - n / 256 for n in range(8)}
    # Each update moves by 1/256 with probability 1e-4 * 256: a deviation of 6.2e-4 a weight
    # and update, of 4.4e-5 of the mean over 4,000 weights and 20 updates.
    assert values.mean().item() == pytest.approx(1 - 20 * 1e-4, abs=4 * 4.4e-5)


def test_rounding_at_random_stays_between_neighbours_and_has_the_right_mean() -> None:
    torch.manual_seed(1)
    values = torch.tensor([1.0, 1.0 + 0.25 / 128, -3.3, 1e-41, 0.0, torch.inf, -torch.inf])
    drawn = torch.stack([bf16_at_random(values) for _ in range(4000)])
    assert drawn.dtype == torch.bfloat16
    assert set(drawn[:, 0].tolist()) == {1.0}
    assert set(drawn[:, 1].tolist()) == {1.0, 1.0 + 1 / 128}
    assert set(drawn[:, 2].tolist()) == {-3.296875, -3.3125}
    assert drawn[:, 4].unique().tolist() == [0.0]
    assert drawn[:, 5].unique().tolist() == [torch.inf]
    assert drawn[:, 6].unique().tolist() == [-torch.inf]
    assert torch.isnan(bf16_at_random(torch.tensor([torch.nan]))).all()
    share = (drawn[:, 1] > 1).float().mean().item()
    assert share == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / 4000) ** 0.5)


def test_rounding_at_random_agrees_with_torchao_in_distribution() -> None:
    torch.manual_seed(2)
    values = torch.randn(50_000) * torch.logspace(-6, 6, 50_000)
    ours, theirs = (make(values).float() for make in (bf16_at_random, _fp32_to_bf16_sr))
    low, high = (values.to(torch.bfloat16).float() * f for f in (1 - 2**-7, 1 + 2**-7))
    assert ((ours - values).abs() <= (high - low).abs()).all()
    ups = [((x.abs() > values.abs()).float().mean()).item() for x in (ours, theirs)]
    assert ups[0] == pytest.approx(ups[1], abs=4 * (0.5 / 50_000) ** 0.5)


@pytest.mark.parametrize(
    ("recipe", "gradient"), [(PURE, 0.5), (Recipe(), 1.0), (Fp16Master(), 1.0)]
)
def test_gradients_of_many_micro_batches_are_lost_where_they_are_added_in_bf16(
    recipe: Recipe, gradient: float
) -> None:
    """512 contributions of 1/512: in BF16 the sum stands still at 1/2, where half the spacing,
    1/512, rounds to even."""
    training = linear_training(recipe, Sgd(lr=1.0), 1.0, divisor=512.0)
    train(training, *[micro(1.0)] * 512)
    assert training.parameters[0].grad.item() == gradient


# --- C18 and C19: scaling, clipping and skipping over masters -----------------------------------

SCALING = ScalePolicy(init=65536.0)


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("part", [Sgd(lr=1.0), Sgd(lr=1.0, implementation="foreach")])
def test_gradients_are_unscaled_once_before_the_norm_and_the_clipping(
    accum: int, part: Sgd
) -> None:
    """FP16 gradients of 65536 * [3, 4] overflow: the scale here keeps them in range."""
    recipe = Fp16Master(scaling=ScalePolicy(init=8192.0))
    training = linear_training(recipe, part, 0.0, 0.0, divisor=float(accum), clip=1.0)
    ((_, norm, bad, _, scale),) = train(training, *[micro(3.0, 4.0)] * accum)
    assert (norm, bad, scale) == (5.0, 0.0, 8192.0)
    (master,) = training.parameters
    assert master.dtype == torch.float32
    assert master.tolist() == pytest.approx([-0.6, -0.8], abs=1e-6)
    assert training.model.w.dtype == torch.float16
    assert training.model.w.tolist() == master.half().tolist()


def test_a_gradient_below_fp16_s_range_is_zero_without_scaling_and_kept_with_it() -> None:
    gradients = {}
    for scale in (1.0, 65536.0):
        recipe = Fp16Master(scaling=ScalePolicy(init=scale))
        training = linear_training(recipe, Sgd(lr=1.0), 1.0, divisor=1e8)
        train(training, micro(1.0))
        gradients[scale] = training.parameters[0].grad.item()
    assert gradients[1.0] == 0.0
    # 65536e-8 lies between FP16 neighbours 2**-21 apart.
    assert gradients[65536.0] == pytest.approx(1e-8, rel=2**-11)


def test_an_overflow_skips_the_update_backs_off_and_holds_the_schedule() -> None:
    factors = torch.tensor([0.25, 0.5, 0.75, 1.0, 1.0])
    training = linear_training(
        Fp16Master(scaling=SCALING), Sgd(lr=1.0), 0.0, divisor=65536.0, lr_factors=factors
    )
    seen = [train(training, micro(x))[0] for x in (torch.inf, 1.0, 1.0, 1.0, 1.0)]
    assert [bad for _, _, bad, _, _ in seen] == [1, 0, 0, 0, 0]
    assert [lr for _, _, _, lr, _ in seen] == [0.25, 0.25, 0.5, 0.75, 1.0]
    assert [scale for *_, scale in seen] == [65536.0, *[32768.0] * 4]
    assert int(training.applied) == 4
    (master,) = training.parameters
    assert master.item() == pytest.approx(-2.5 / 65536)


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
@pytest.mark.parametrize("recipe", [Bf16Pure(kahan=True), Bf16Pure(rounding="stochastic"), PURE])
def test_a_skipped_update_leaves_bf16_weights_and_state_as_they_are(
    implementation: str, recipe: Recipe
) -> None:
    part = AdamW(lr=1e-2, implementation=implementation)
    training = linear_training(recipe, part, 1.0, 3.0)
    train(training, micro(1.0, 2.0), updates=3)
    weight = training.model.w.detach().clone()
    state = {k: v.clone() for k, v in training.optimizer.state[training.model.w].items()}
    ((_, _, bad, _, _),) = train(training, micro(torch.nan, 1.0))
    assert bad == 1
    assert torch.equal(training.model.w, weight)
    after = training.optimizer.state[training.model.w]
    assert all(torch.equal(state[key], after[key]) for key in state)


# --- whole jobs ---------------------------------------------------------------------------------


def test_fp16_weights_train_with_masters_and_are_evaluated_on_them() -> None:
    job = job_of("precision=fp16_master", "precision.scaling.init=1024")
    training = job.training
    assert {p.dtype for p in training.model.parameters()} == {torch.float16}
    assert {p.dtype for p in training.parameters} == {torch.float32}
    usual = job_of("precision=fp32").training
    for master, parameter in zip(training.parameters, usual.parameters, strict=True):
        assert torch.equal(master, parameter)
    account, trained = probe(training, job.feed.probes(job.updates))
    assert trained.contradiction() is None
    assert trained.dispatched.contradiction("fp16") is None
    assert account is not None
    masters = sum(p.nbytes for p in training.parameters)
    assert account.at_peak["parameters"] == masters // 2
    assert account.at_peak["optimizer_state"] >= 3 * masters
    before = job.evaluation.run(training.model, 0).eval_loss
    assert before == job_of("precision=fp32").evaluation.run(usual.model, 0).eval_loss
    draws = job.feed.draws()
    outcomes = [measured_update(training, lambda: next(draws), Quiet()) for _ in range(2)]
    assert [o.figures.tolist()[2] for o in outcomes] == [0, 0]  # type: ignore
    for name, parameter in training.model.named_parameters():
        assert torch.equal(training.masters[name].half(), parameter)
    with job.parts.precision.evaluation(training.model):
        for name, parameter in training.model.named_parameters():
            assert torch.equal(training.masters[name], parameter)
    assert {p.dtype for p in training.model.parameters()} == {torch.float16}


def test_pure_bf16_stores_nothing_wider_and_is_evaluated_in_fp32() -> None:
    job = job_of("precision=bf16_pure")
    account, trained = probe(job.training, job.feed.probes(job.updates))
    assert trained.contradiction(may_round_away=True) is None
    assert trained.dispatched.contradiction("bf16") is None
    usual = job_of("precision=fp32").training
    assert account is not None
    ours, theirs = (sum(p.nbytes for p in t.parameters) for t in (job.training, usual))
    assert 2 * ours == theirs
    assert account.at_peak["parameters"] == ours
    assert account.at_peak["gradients"] <= ours
    with job.parts.precision.evaluation(job.training.model):
        assert {p.dtype for p in job.training.model.parameters()} == {torch.float32}
    assert {p.dtype for p in job.training.model.parameters()} == {torch.bfloat16}


def test_gains_at_one_that_bf16_cannot_move_are_reported_and_contradict_only_elsewhere() -> None:
    job = job_of("precision=bf16_pure", "optimizer.lr=1e-4", "schedule=constant")
    _, trained = probe(job.training, job.feed.probes(job.updates), account=False)
    gains = {n for n, p in job.training.model.named_parameters() if bool((p == 1).all())}
    assert gains and gains <= set(trained.unchanged)
    assert "no update changes" in str(trained.contradiction())
    kept = job_of("precision=bf16_pure", "precision.kahan=true", "optimizer.lr=1e-4")
    assert kept.parts.precision.may_round_away


def test_stochastic_rounding_and_compensation_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="kahan: given true; allowed: false"):
        Bf16Pure(rounding="stochastic", kahan=True)
    with pytest.raises(ValueError, match="rounding: given up; allowed: nearest, stochastic"):
        Bf16Pure(rounding="up")


def test_the_share_of_weights_whose_update_rounded_away_is_counted_by_hand() -> None:
    before = {"a": torch.tensor([1.0, 2.0, 3.0, 4.0]).bfloat16(), "b": torch.ones(2)}
    after = torch.tensor([1.0, 2.5, 3.0, 4.0]).bfloat16()
    after.grad = torch.tensor([1.0, 1.0, 0.0, 1.0]).bfloat16()
    wide = torch.ones(2)
    wide.grad = torch.ones(2)
    assert lost_share([("a", after), ("b", wide)], before) == pytest.approx(2 / 3)
    assert lost_share([("b", wide)], before) is None


def test_small_updates_are_lost_in_pure_bf16_and_not_with_compensation() -> None:
    shares = []
    for words in ((), ("precision.rounding=stochastic",)):
        job = job_of("precision=bf16_pure", "optimizer.lr=1e-5", "schedule=constant", *words)
        shares.append(probe(job.training, job.feed.probes(2), account=False)[1].lost_share)
    assert shares[0] is not None and shares[1] is not None
    assert shares[0] > 0.5 > shares[0] - shares[1] > 0


def test_a_compiled_optimizer_and_weights_rounded_one_by_one_are_refused() -> None:
    with pytest.raises(UserError, match=r"optimizer\.implementation: given compiled"):
        job_of("precision=bf16_pure", "precision.kahan=true", "optimizer.implementation=compiled")
