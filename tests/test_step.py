"""Tests of runner/step.py: one update, checked against sums worked by hand."""

from __future__ import annotations

import math
import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from runner.contracts import Counts, MicroBatch, Recipe, ScalePolicy
from runner.measure.clock import HostClock
from runner.objective import TokenMean
from runner.optimizer import AdamW, Sgd
from runner.records import PHASES
from runner.step import measured_update
from tests.support import (
    Quiet,
    example,
    examples,
    padded,
    reference_gradient,
    relative_difference,
    tiny_gpt,
    training_of,
    weights,
)

# --- the specification's scalar model: y = theta * x, loss (theta x - y)**2 / 2 ---------------


class Scalar(nn.Module):
    """One parameter; `hidden` is its prediction for the inputs hidden in the ids."""

    def __init__(self, theta: float = 1.0) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(theta))
        self.head_weight = torch.ones(())

    def hidden(self, input_ids: Tensor, positions: object, segments: object) -> Tensor:
        return self.theta * input_ids.float()


class HalfSquare:
    """Sum over examples of prediction**2 / 2 (all targets are 0)."""

    def loss_sum(
        self, hidden: Tensor, head_weight: Tensor, targets: Tensor, weights: Tensor | None
    ) -> Tensor:
        return (hidden**2).sum() / 2


class Examples(TokenMean):
    """The mean over examples."""

    def denominator(self, micros: object) -> float:
        return sum(micro.examples for micro in micros)  # type: ignore


def scalar_micro(*inputs: int) -> MicroBatch:
    ids = torch.tensor(inputs)[:, None]
    return MicroBatch(
        input_ids=ids,
        targets=torch.zeros_like(ids),
        lengths=(1,) * len(inputs),
        counts=Counts(useful=len(inputs), nonpad=len(inputs), slots=len(inputs)),
    )


def scalar_training(**changes: object):  # type: ignore
    rate = Sgd(lr=0.1)
    return training_of(Scalar(), loss=HalfSquare(), objective=Examples(), optimizer=rate, **changes)


def test_two_micro_batches_make_one_update_with_gradient_5_and_parameter_half() -> None:
    training = scalar_training()
    outcome = measured_update(training, lambda: [scalar_micro(1), scalar_micro(3)], Quiet())
    loss, norm, bad, lr, _ = outcome.figures.tolist()
    assert loss == 2.5  # (0.5 + 4.5) / 2
    assert norm == 5.0  # not 10, the unnormalised sum
    assert (bad, lr) == (0.0, pytest.approx(0.1))
    assert training.model.theta.item() == pytest.approx(0.5)
    assert float(training.model.theta.grad) == 5.0


def test_one_combined_batch_gives_the_same_update() -> None:
    training = scalar_training()
    measured_update(training, lambda: [scalar_micro(1, 3)], Quiet())
    assert training.model.theta.item() == pytest.approx(0.5)


def test_scaled_gradients_accumulate_as_4_then_40_and_unscale_once_to_5() -> None:
    training = scalar_training(policy=ScalePolicy(init=8.0))
    seen: list[float] = []
    training.model.theta.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad)))
    outcome = measured_update(training, lambda: [scalar_micro(1), scalar_micro(3)], Quiet())
    assert seen == [4.0, 40.0]  # 8 * 0.5, then + 8 * 4.5
    assert float(training.model.theta.grad) == 5.0
    assert outcome.figures.tolist()[1] == 5.0
    assert outcome.figures.tolist()[4] == 8.0
    assert training.model.theta.item() == pytest.approx(0.5)


def test_an_early_unscale_would_be_seen() -> None:
    training = scalar_training(policy=ScalePolicy(init=8.0))
    divided = iter([True, False])

    def early(parameter: Tensor) -> None:
        if next(divided):
            parameter.grad /= 8

    training.model.theta.register_post_accumulate_grad_hook(early)
    measured_update(training, lambda: [scalar_micro(1), scalar_micro(3)], Quiet())
    assert float(training.model.theta.grad) == (0.5 + 36) / 8  # not the intended 5


@pytest.mark.parametrize("implementation", ["fused", "foreach", "plain"])
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_a_nonfinite_gradient_skips_the_update_and_lowers_the_scale(
    implementation: str, poison: float
) -> None:
    rate = Sgd(lr=0.1, implementation=implementation)
    training = training_of(
        Scalar(),
        loss=HalfSquare(),
        objective=Examples(),
        optimizer=rate,
        policy=ScalePolicy(init=65536.0),
    )

    def spoil(parameter: Tensor) -> None:
        parameter.grad.fill_(poison)

    handle = training.model.theta.register_post_accumulate_grad_hook(spoil)
    outcome = measured_update(training, lambda: [scalar_micro(1)], Quiet())
    assert outcome.figures.tolist()[2] == 1.0
    assert training.model.theta.item() == 1.0
    assert float(training.scaler.scale) == 32768.0
    assert int(training.applied) == 0
    handle.remove()
    measured_update(training, lambda: [scalar_micro(1)], Quiet())
    assert int(training.applied) == 1
    assert training.model.theta.item() == pytest.approx(0.9)


# --- any split of the same examples is the same update (cases C01, C02) -----------------------

UNEQUAL = (2, 3, 6, 13)  # 1, 2, 5 and 12 targets


@pytest.mark.parametrize("size", [4, 2, 1])
@pytest.mark.parametrize(("double", "bound"), [(False, 1e-5), (True, 1e-10)])
def test_unequal_examples_weigh_by_their_targets_in_any_split(
    size: int, double: bool, bound: float
) -> None:
    chosen = examples(*UNEQUAL)
    model = tiny_gpt(double=double)
    loss, gradients = reference_gradient(model, chosen)
    before = weights(model)
    outcome = measured_update(training_of(model), lambda: padded(chosen, size), Quiet())
    change = [before[name] - p.detach() for name, p in model.named_parameters()]
    assert outcome.counts.useful == 20
    assert outcome.figures.tolist()[0] == pytest.approx(loss, rel=1e-6)
    assert relative_difference(change, gradients) < bound


def test_the_mean_of_micro_batch_means_would_be_far_off() -> None:
    chosen = examples(*UNEQUAL)
    model = tiny_gpt()
    _, right = reference_gradient(model, chosen)
    means = [reference_gradient(model, [one])[1] for one in chosen]
    naive = [torch.stack(parts).mean(0) for parts in zip(*means, strict=True)]
    assert relative_difference(naive, right) > 0.1


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 20), min_size=1, max_size=8),
    split=st.integers(0, 2**32),
)
def test_any_split_of_a_ragged_batch_has_the_same_gradient(lengths: list[int], split: int) -> None:
    chosen = examples(*lengths)
    model = tiny_gpt(double=True)
    _, gradients = reference_gradient(model, chosen)
    cuts = random.Random(split)
    micros, rest = [], list(chosen)
    while rest:
        size = cuts.randint(1, len(rest))
        micros += padded(rest[:size], size)
        rest = rest[size:]
    before = weights(model)
    measured_update(training_of(model), lambda: micros, Quiet())
    change = [before[name] - p.detach() for name, p in model.named_parameters()]
    assert relative_difference(change, gradients) < 1e-10


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_micro_batch_without_targets_contributes_nothing(order: tuple[int, int]) -> None:
    full, masked = example(9), example(7, masked=7)
    alone = tiny_gpt()
    expected = measured_update(training_of(alone), lambda: padded([full], 1), Quiet())
    model = tiny_gpt()
    pair = [(full, masked)[i] for i in order]
    outcome = measured_update(training_of(model), lambda: padded(pair, 1), Quiet())
    assert outcome.figures.tolist()[0] == pytest.approx(expected.figures.tolist()[0], rel=1e-6)
    assert outcome.counts.useful == 8
    same = [p.detach() for p in alone.parameters()]
    assert relative_difference([p.detach() for p in model.parameters()], same) < 1e-6


def test_an_update_without_any_target_is_not_applied() -> None:
    model = tiny_gpt()
    before = weights(model)
    training = training_of(model)
    micros = padded([example(5, masked=5)], 1)
    outcome = measured_update(training, lambda: micros, Quiet())
    assert outcome.figures is None
    assert int(training.applied) == 0
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


# --- clipping (cases C18, C22) ----------------------------------------------------------------


class Pair(nn.Module):
    """loss = w . [3, 4] (half of it from each micro-batch when there are two)."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, dtype=dtype))
        self.head_weight = torch.ones(())

    def hidden(self, input_ids: Tensor, positions: object, segments: object) -> Tensor:
        return self.w * torch.tensor([3.0, 4.0]) * len(input_ids)


class Sum:
    def loss_sum(
        self, hidden: Tensor, head_weight: Tensor, targets: Tensor, weights: Tensor | None
    ) -> Tensor:
        return hidden.sum()


@pytest.mark.parametrize("micros", [1, 2])
def test_clipping_and_the_logged_norm_see_unscaled_gradients(micros: int) -> None:
    training = training_of(
        Pair(), loss=Sum(), objective=Examples(), clip=1.0, policy=ScalePolicy(init=65536.0)
    )
    outcome = measured_update(training, lambda: [scalar_micro(1)] * micros, Quiet())
    assert outcome.figures.tolist()[1] == pytest.approx(5.0)
    assert training.model.w.tolist() == pytest.approx([-0.6, -0.8], rel=1e-5)


@pytest.mark.parametrize("gradient", [[1.0, math.inf], [1e20, 1e20]])
def test_a_norm_that_overflows_skips_the_update_without_a_scaler(gradient: list[float]) -> None:
    training = training_of(Pair(), loss=Sum(), objective=Examples(), clip=1.0)

    def replace_gradient(parameter: Tensor) -> None:
        parameter.grad.copy_(torch.tensor(gradient))

    training.model.w.register_post_accumulate_grad_hook(replace_gradient)
    outcome = measured_update(training, lambda: [scalar_micro(1)], Quiet())
    assert outcome.figures.tolist()[1] == math.inf
    assert outcome.figures.tolist()[2] == 1.0
    assert training.model.w.tolist() == [0.0, 0.0]


def test_small_updates_accumulate_in_fp32_parameters_over_100_updates() -> None:
    class One(Scalar):
        def hidden(self, input_ids: Tensor, positions: object, segments: object) -> Tensor:
            return self.theta * torch.ones(())

    training = training_of(
        One(),
        loss=Sum(),
        objective=Examples(),
        optimizer=AdamW(lr=1e-4),
        recipe=Recipe(),
    )
    for _ in range(100):
        measured_update(training, lambda: [scalar_micro(1)], Quiet())
    assert float(training.model.theta.detach()) == pytest.approx(0.99, abs=1e-5)


# --- nothing waits for the device -------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Counts the tensors that the host reads."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", [None, ScalePolicy()])
def test_the_host_reads_no_tensor_during_an_update_that_skips_on_the_device(
    policy: ScalePolicy | None,
) -> None:
    training = training_of(tiny_gpt(), optimizer=AdamW(lr=0.1), policy=policy, clip=1.0)
    training.optimizer.step = lambda: None  # on a CPU the fused kernel itself reads the rate
    with Reads() as reads:
        measured_update(training, lambda: padded(examples(5, 9), 1), Quiet())
    assert reads.count == 0
    with reads:
        float(training.applied)
    assert reads.count == 1


# --- phases -----------------------------------------------------------------------------------

SLEEP_S = 0.05


class Slow(Scalar):
    """Sleeps in a chosen phase of the update."""

    where = ""

    def hidden(self, input_ids: Tensor, positions: object, segments: object) -> Tensor:
        if self.where == "forward":
            time.sleep(SLEEP_S)
        out = super().hidden(input_ids, positions, segments)
        if self.where == "backward":
            out.register_hook(lambda _: time.sleep(SLEEP_S))
        return out


def phase_times(where: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Median phase times over 7 updates with a sleep planted in `where`."""
    model = Slow()
    model.where = where
    training = training_of(model, loss=HalfSquare(), objective=Examples(), optimizer=Sgd(lr=1e-6))
    if where == "optimizer":
        step = training.optimizer.step
        training.optimizer.step = lambda: (time.sleep(SLEEP_S), step())[1]  # type: ignore
    if where == "transfer":
        import runner.step

        move = runner.step.to_device
        monkeypatch.setattr(runner.step, "to_device", lambda *a: (time.sleep(SLEEP_S), move(*a))[1])

    def draw() -> list[MicroBatch]:
        if where == "data":
            time.sleep(SLEEP_S)
        return [scalar_micro(1)]

    clock = HostClock()
    closed = []
    for _ in range(8):
        closed.append(clock.start("other"))
        measured_update(training, draw, clock)
        if where == "other":
            time.sleep(SLEEP_S)
    closed.append(clock.stop())
    times = [clock.times(interval).exposed for interval in closed[2:] if interval]
    return {phase: sorted(t[phase] for t in times)[len(times) // 2] for phase in PHASES}


@pytest.mark.timing
@pytest.mark.parametrize("where", PHASES)
def test_a_sleep_lengthens_its_own_phase_and_no_other(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        plain = phase_times("", patch)
    slowed = phase_times(where, monkeypatch)
    grown = {phase: slowed[phase] - plain[phase] for phase in PHASES}
    assert grown.pop(where) == pytest.approx(SLEEP_S, abs=0.005)
    assert all(abs(change) < 0.002 for change in grown.values()), grown


@pytest.mark.timing
def test_phases_partition_the_update_and_updates_partition_the_loop() -> None:
    training = scalar_training()
    clock = HostClock()
    closed = []
    begin = time.perf_counter()
    for _ in range(20):
        closed.append(clock.start("other"))
        measured_update(training, lambda: [scalar_micro(1), scalar_micro(3)], clock)
    closed.append(clock.stop())
    wall = time.perf_counter() - begin
    times = [clock.times(interval) for interval in closed if interval]
    assert len(times) == 20
    for one in times:
        assert sum(one.exposed.values()) == pytest.approx(one.total, rel=1e-9)
    assert sum(one.total for one in times) == pytest.approx(wall, rel=0.01)


def test_an_update_enters_its_phases_in_the_order_of_the_design() -> None:
    listener = Quiet()
    measured_update(scalar_training(), lambda: [scalar_micro(1), scalar_micro(3)], listener)
    micro = ["transfer", "forward", "backward"]
    assert listener.phases == ["data", "optimizer", *micro, *micro, "optimizer", "other"]
