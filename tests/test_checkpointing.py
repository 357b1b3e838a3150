"""Tests of runner/memory/checkpointing.py: same losses and gradients, fewer activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.assemble import assemble
from runner.checks import build_parts
from runner.measure.probe import probe
from runner.memory.attention import Attention
from runner.memory.checkpointing import SAVED, Blocks, Budget, Selective, kept_operators
from runner.precision.autocast import Autocast
from runner.step import measured_update
from tests.support import Quiet, examples, padded, relative_difference, tiny_gpt, training_of
from tests.test_assemble import CPU, SMALL, corpus
from tests.test_checks import config, refused

LEVERS = {
    "full": Blocks(every=1),
    "every second": Blocks(every=2),
    "selective": Selective(),
    "selective by matmul": Selective(save=("matmul",)),
}


def update(lever: Any, *, double: bool, dropout: float = 0.0, **changes: Any) -> tuple[Any, ...]:
    """Loss, gradients and the random state after one update; None for no lever."""
    model = tiny_gpt(dropout=dropout, double=double)
    if lever is not None:
        lever.apply(model)
    job = training_of(model, **changes)
    torch.manual_seed(5)
    outcome = measured_update(job, lambda: padded(examples(9, 23, 12), 2), Quiet())
    gradients = [p.grad for p in model.parameters()]
    return outcome.figures.tolist()[0], gradients, torch.get_rng_state()  # type: ignore


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("lever", list(LEVERS))
def test_c30_losses_gradients_and_random_state_are_those_without_it(
    lever: str, dropout: float
) -> None:
    loss, gradients, state = update(None, double=True, dropout=dropout)
    other, found, after = update(LEVERS[lever], double=True, dropout=dropout)
    assert other == loss
    assert relative_difference(found, gradients) < 1e-12
    assert torch.equal(after, state)


@pytest.mark.parametrize("lever", list(LEVERS))
def test_float32_gradients_agree(lever: str) -> None:
    loss, gradients, _ = update(None, double=False)
    other, found, _ = update(LEVERS[lever], double=False)
    assert other == loss
    assert relative_difference(found, gradients) < 1e-5


@pytest.mark.parametrize("lever", list(LEVERS))
def test_c27_recomputation_runs_in_the_autocast_of_the_forward_pass(lever: str) -> None:
    recipe = Autocast(dtype="bfloat16")
    seen: list[tuple[torch.dtype, bool]] = []

    def note(module: nn.Module, inputs: object, output: Tensor) -> None:
        seen.append((output.dtype, torch._C._current_graph_task_id() >= 0))

    model = tiny_gpt()
    LEVERS[lever].apply(model)
    model.blocks[0].mlp.up.register_forward_hook(note)  # type: ignore
    measured_update(training_of(model, recipe=recipe), lambda: padded(examples(9), 1), Quiet())
    assert seen == [(torch.bfloat16, False), (torch.bfloat16, True)]
    loss, gradients, _ = update(None, double=False, recipe=recipe)
    other, found, _ = update(LEVERS[lever], double=False, recipe=recipe)
    assert other == pytest.approx(loss, abs=1e-6)
    assert relative_difference(found, gradients) < 1e-6


def test_c27_recomputation_attends_with_the_kernel_of_the_forward_pass() -> None:
    # The choice of the kernel is a context too: without it in backward another kernel would run.
    words = ("memory/attention=math", "memory/checkpointing=full")
    chosen = config(*SMALL, *words)
    job = assemble(chosen, build_parts(chosen), CPU, corpus())
    dispatched = probe(job.training, job.feed.probes(2))[1].dispatched
    assert dispatched.attention_operators == ("math",)
    assert Attention(backend="math").backward() is not None
    assert Attention(backend="auto").backward() is None


def live(*words: str) -> tuple[int, Any]:
    """Saved activations at their own maximum, and what the last untimed update dispatched."""
    chosen = config("seq_len=64", "batch=4", "model.layers=4", *words)
    job = assemble(chosen, build_parts(chosen), CPU, corpus())
    account, trained = probe(job.training, job.feed.probes(2))
    return account.largest_by_category["saved_activations"], trained.dispatched  # type: ignore


def test_fewer_activations_are_kept_the_more_is_recomputed() -> None:
    kept = {}
    again = {}
    for option in ("none", "every", "selective", "full"):
        kept[option], seen = live(f"memory/checkpointing={option}")
        again[option] = seen.recomputed
    assert kept["full"] < kept["every"] < kept["none"]
    assert kept["full"] < kept["selective"] < kept["none"]
    # Products of a block forward are 12 d^2 a token (24 d^2 FLOPs) and attention; torch stops a
    # recomputation early, before the last product, whose output nothing in the block needs.
    assert again["none"] == again["selective"] == 0
    assert again["full"] == 2 * again["every"] > 0


def test_recomputed_flops_are_the_forward_products_of_the_blocks_but_the_last_one() -> None:
    model = tiny_gpt()  # d 32, 2 layers, 2 heads
    Blocks().apply(model)
    _, trained = probe(training_of(model), [padded(examples(16), 1)])
    tokens, d, layers = 16, 32, 2
    products = 2 * tokens * (3 * d * d + d * d + 4 * d * d)  # qkv, out, up; never down
    attention = 2 * 2 * d * tokens * tokens
    assert trained.dispatched.recomputed == layers * (products + attention)
    assert Blocks().contradiction(trained.dispatched) is None
    plain = probe(training_of(tiny_gpt()), [padded(examples(16), 1)])[1].dispatched
    assert plain.recomputed == 0
    assert plain.total == trained.dispatched.total - trained.dispatched.recomputed
    assert "no matrix product again" in str(Blocks().contradiction(plain))


def test_evaluation_recomputes_nothing_and_is_the_same() -> None:
    words = [*SMALL, "memory/checkpointing=full"]
    losses = []
    for chosen in (config(*SMALL), config(*words)):
        job = assemble(chosen, build_parts(chosen), CPU, corpus())
        losses.append(job.evaluation.run(job.training.model, 0).eval_loss)
    assert losses[0] == losses[1]


def test_what_only_the_compiler_can_do_and_what_it_cannot_are_refused_with_reasons() -> None:
    (fault,) = refused("memory/checkpointing=budget")
    assert (fault.key, "compile=default" in fault.next_step) == ("memory/checkpointing", True)
    (fault,) = refused("memory/checkpointing=selective", "compile=default")
    assert "budget" in fault.next_step
    for option in ("budget", "full", "every"):
        assert config(f"memory/checkpointing={option}", "compile=default")


@pytest.mark.parametrize(
    ("option", "value"),
    [("every", "every=0"), ("budget", "share=1.5"), ("selective", "save=[]"), ("full", "every=x")],
)
def test_values_out_of_range_are_faults(option: str, value: str) -> None:
    words = (f"memory/checkpointing={option}", f"memory.checkpointing.{value}")
    (fault,) = refused(*words, *(["compile=default"] if option == "budget" else []))
    assert fault.key == f"memory.checkpointing.{value.partition('=')[0]}"


def test_every_operator_that_a_word_names_exists_in_torch() -> None:
    names = [name for word in SAVED.values() for name in word]
    assert len(kept_operators(list(SAVED))) == len(names)


def test_the_budget_is_in_force_while_torch_compiles_and_gone_afterwards() -> None:
    from torch._functorch import config as functorch

    before = functorch.activation_memory_budget
    with Budget(share=0.25).forward():
        assert functorch.activation_memory_budget == 0.25
    assert functorch.activation_memory_budget == before


@pytest.mark.long
@pytest.mark.parametrize(
    ("lever", "backend"),
    [(Blocks(), "aot_eager"), (Budget(share=0.0), "aot_eager_decomp_partition")],
)
def test_compiled_models_recompute_too_and_give_the_same_gradients(
    lever: Any, backend: str
) -> None:
    kept = []
    found = []
    for chosen in (None, lever):
        torch._dynamo.reset()
        model = tiny_gpt()
        if chosen is not None:
            chosen.apply(model)
        model.compile(backend=backend, dynamic=True)
        contexts = (lambda: [lever.forward()]) if isinstance(chosen, Budget) else list
        job = training_of(model, forward_contexts=contexts)
        saved: list[int] = []

        def pack(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            measured_update(job, lambda: padded(examples(9, 23, 12), 2), Quiet())
        kept.append(sum(saved))
        found.append([p.grad for p in model.parameters()])
    assert kept[1] < 0.75 * kept[0]
    assert relative_difference(found[1], found[0]) < 1e-5  # type: ignore
