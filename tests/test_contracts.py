"""One fake part for each contract runs through the real update, loop side and checks included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from runner import contracts
from runner.assemble import Job, assemble
from runner.checks import Parts, check
from runner.contracts import (
    IGNORE,
    Attention,
    Batching,
    Corpus,
    Counts,
    Data,
    Example,
    Fault,
    Lever,
    LossLever,
    MicroBatch,
    Objective,
    Recipe,
)
from runner.step import measured_update
from tests.support import Quiet
from tests.test_checks import config

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Shapes:
    layers: int = 1
    heads: int = 1
    width: int = 4
    head_width: int = 4
    positions: int = 300
    vocab: int = 16
    params: int = 64
    matmul_params: int = 64


class UniformAttention:
    """Every query averages all keys up to its own position."""

    def plan(self, segments: Tensor | None, like: Tensor) -> Any:
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Any, dropout_p: float) -> Tensor:
        counts = torch.arange(1, v.shape[-2] + 1, dtype=v.dtype)[:, None]
        return v.cumsum(-2) / counts


class FakeModel(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.description = Shapes()
        self.attention = UniformAttention()
        self.blocks = nn.ModuleList()
        weight = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
        self.embed = nn.Parameter(weight)

    @property
    def head_weight(self) -> Tensor:
        return self.embed

    def hidden(
        self, input_ids: Tensor, positions: Tensor | None, segments: Tensor | None
    ) -> Tensor:
        x = self.embed[input_ids][:, None]
        return self.attention.attend(x, x, x, None, 0.0)[:, 0]


@dataclass(frozen=True, kw_only=True)
class FakeSpec:
    def describe(self) -> Shapes:
        return Shapes()

    def build(self, seed: int) -> nn.Module:
        return FakeModel(seed)


@dataclass(frozen=True, kw_only=True)
class FakeData:
    setup_keys: ClassVar[frozenset[str]] = frozenset()

    def load(self, *, seq_len: int, cache: str) -> Corpus:
        made = [
            Example(ids=np.arange(n, dtype=np.int32) % 16, loss=np.ones(n, dtype=bool))
            for n in (3, 5, 4, 6)
        ]
        return Corpus(train=made, eval=made[:2], fingerprint="fake", vocab=16, pad_id=0)


@dataclass(frozen=True, kw_only=True)
class OneByOne:
    """Each example its own micro-batch, whatever the size."""

    numerics: ClassVar[contracts.Numerics] = "same"

    def micro_batches(
        self, examples: Sequence[Example], *, size: int, pad_id: int, seq_len: int
    ) -> list[MicroBatch]:
        return [self._one(example) for example in examples]

    def _one(self, example: Example) -> MicroBatch:
        ids = torch.from_numpy(example.ids.astype(np.int64))[None]
        targets = torch.cat([ids[:, 1:], torch.full((1, 1), IGNORE)], dim=1)
        n = example.length
        return MicroBatch(
            input_ids=ids,
            targets=targets,
            lengths=(n,),
            counts=Counts(useful=n - 1, nonpad=n, slots=n),
        )


@dataclass(frozen=True, kw_only=True)
class DoubleWeight:
    """Every target weighs 2 and the divisor is the number of examples."""

    def weights(self, micro: MicroBatch) -> Tensor | None:
        return torch.full(micro.targets.shape, 2.0)

    def denominator(self, micros: Sequence[MicroBatch]) -> float:
        return float(sum(micro.examples for micro in micros))


@dataclass(frozen=True, kw_only=True)
class FakeRecipe(Recipe):
    formats: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("storage", "compute", "accumulate", "state"), "fp32"
    )

    def prepare(self, model: nn.Module) -> nn.Module:
        model.prepared = True
        return model


class Recorder:
    """What the fake levers were asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []


@dataclass(frozen=True, kw_only=True)
class FakeLever(Lever):
    recorder: Recorder

    def apply(self, model: nn.Module) -> None:
        assert model.prepared
        self.recorder.calls.append("apply")

    @contextmanager
    def _noted(self, what: str) -> Any:
        self.recorder.calls.append(f"{what} in")
        yield
        self.recorder.calls.append(f"{what} out")

    def forward(self) -> Any:
        return self._noted("forward")

    def backward(self) -> Any:
        return self._noted("backward")

    def conflicts(self, job: Mapping[str, Any]) -> Sequence[Fault]:
        return [Fault(key="memory.fake", given="x", allowed="y", next_step="z")]


@dataclass(frozen=True, kw_only=True)
class FakeLoss(Lever):
    def loss_sum(
        self, hidden: Tensor, head_weight: Tensor, targets: Tensor, weights: Tensor | None
    ) -> Tensor:
        logprobs = (hidden @ head_weight.T).log_softmax(-1)
        picked = logprobs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        used = (targets != IGNORE) * (1.0 if weights is None else weights)
        return -(picked * used).sum()


@dataclass(frozen=True, kw_only=True)
class FakeClear(Lever):
    def clear_gradients(self) -> Callable[[torch.optim.Optimizer], None]:
        return lambda optimizer: optimizer.zero_grad()


@dataclass(frozen=True, kw_only=True)
class FakeSgd:
    setup_keys: ClassVar[frozenset[str]] = frozenset()
    lr: float = 1.0
    skips_on_device: bool = False

    def build(self, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr)


@dataclass(frozen=True, kw_only=True)
class Flat:
    def factors(self, updates: int) -> list[float]:
        return [0.5] * updates


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def job(recorder: Recorder) -> Job:
    parts = Parts(
        model=FakeSpec(),
        data=FakeData(),
        batching=OneByOne(),
        objective=DoubleWeight(),
        precision=FakeRecipe(),
        optimizer=FakeSgd(),
        schedule=Flat(),
        tracking=None,
        levers={
            "memory.fake": FakeLever(recorder=recorder),
            "memory.loss": FakeLoss(),
            "memory.gradients": FakeClear(),
        },
    )
    chosen = {**config(), "batch": 4, "accum": 2, "clip": None}
    return assemble(chosen, parts, CPU, FakeData().load(seq_len=8, cache=""))


def test_the_fakes_meet_their_protocols() -> None:
    assert isinstance(FakeData(), Data)
    assert isinstance(OneByOne(), Batching)
    assert isinstance(DoubleWeight(), Objective)
    assert isinstance(FakeLoss(), LossLever)
    assert isinstance(UniformAttention(), Attention)


def test_an_update_uses_every_contract_and_nothing_else(job: Job, recorder: Recorder) -> None:
    before = job.training.model.embed.detach().clone()
    listener = Quiet()
    outcome = measured_update(job.training, lambda: next(job.feed.draws()), listener)
    loss, norm, bad, lr, _ = outcome.figures.tolist()
    assert outcome.counts == Counts(useful=2 + 4 + 3 + 5, nonpad=18, slots=18)
    assert lr == 0.5
    assert recorder.calls[0] == "apply"
    pairs = ["forward in", "forward out", "backward in", "backward out"]
    assert recorder.calls[1:] == pairs * 4
    # The loss by hand: twice the summed cross-entropy over 4 examples.
    reference = before.clone().requires_grad_()
    total: Any = 0.0
    for example in job.corpus.train:
        ids = torch.from_numpy(example.ids.astype(np.int64))
        x = reference[ids]
        hidden = x.cumsum(0) / torch.arange(1, len(ids) + 1)[:, None]
        logits = (hidden @ reference.T)[:-1]
        total = total + 2 * nn.functional.cross_entropy(logits, ids[1:], reduction="sum")
    (gradient,) = torch.autograd.grad(total / 4, reference)
    assert loss == pytest.approx(total.item() / 4, rel=1e-6)
    assert norm == pytest.approx(gradient.norm().item(), rel=1e-5)
    torch.testing.assert_close(job.training.model.embed.detach(), before - 0.5 * gradient)
    assert not bad


def test_a_lever_s_conflicts_are_faults_of_the_job(recorder: Recorder) -> None:
    own = {"_target_": f"{__name__}.Conflicted"}
    base = config()
    chosen = {**base, "allow": [__name__.split(".")[0]], "memory": {**base["memory"], "x": own}}
    assert [fault.key for fault in check(chosen)] == ["memory.fake"]


@dataclass(frozen=True, kw_only=True)
class Conflicted(Lever):
    """A lever that no job may have."""

    def conflicts(self, job: Mapping[str, Any]) -> Sequence[Fault]:
        return [Fault(key="memory.fake", given="x", allowed="y", next_step="z")]
