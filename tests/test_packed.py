"""Packed rows: documents that share a row are trained as if each were alone."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.documents import Documents
from models.gpt import GPT
from models.llama import Llama
from runner.assemble import Job, assemble
from runner.checks import build_parts
from runner.contracts import IGNORE, Counts, Example
from runner.data.packed import Packed, pack
from runner.measure.evidence import MATH
from runner.measure.probe import probe
from runner.objective import SequenceMean
from runner.outcome.work import flops_of
from runner.step import measured_update
from tests.support import PAD, Quiet, example, examples, training_of
from tests.test_assemble import CPU, SMALL, corpus
from tests.test_batching import four_documents
from tests.test_checks import config

FLASH = "_scaled_dot_product_flash_attention_for_cpu"
KERNELS = {
    "auto": nullcontext,
    "math": lambda: sdpa_kernel(SDPBackend.MATH),
    "flash": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
}
FAMILIES = {
    "gpt": GPT(layers=2, heads=4, width=32, positions=32, vocab=264, init_std=0.2),
    "llama": Llama(
        layers=2, heads=4, kv_heads=2, width=32, mlp_width=48, positions=32, vocab=264, init_std=0.2
    ),
}


def packed(chosen: list[Example], size: int) -> list[Any]:
    return Packed().micro_batches(chosen, size=size, pad_id=PAD, seq_len=64)


def test_every_tensor_of_a_packed_row_is_as_worked_by_hand() -> None:
    one, two = example(3), example(4, masked=2)
    one = Example(ids=torch.tensor([7, 8, 9]).numpy(), loss=one.loss)
    two = Example(ids=torch.tensor([1, 2, 3, 4]).numpy(), loss=two.loss)
    micro = packed([one, two], 2)[0]
    assert micro.input_ids.tolist() == [[7, 8, 9, 1, 2, 3, 4]]
    # No target lies behind the end of its document: 9 is not followed by 1.
    assert micro.targets.tolist() == [[8, 9, IGNORE, IGNORE, 3, 4, IGNORE]]
    assert micro.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert micro.sequence.tolist() == [[0, 0, 0, 1, 1, 1, 1]]
    assert micro.segments.lengths == micro.lengths == (3, 4)
    assert micro.segments.bounds.tolist() == [0, 3, 7]
    assert micro.segments.segments().tolist() == [[0, 0, 0, 1, 1, 1, 1]]
    assert micro.counts == Counts(useful=4, nonpad=7, slots=7)


def test_packed_slots_are_the_real_tokens_for_any_split() -> None:
    """Case C38: the same useful and non-pad tokens as padded, and no slot more."""
    for size in (1, 2, 4):
        micros = packed(four_documents(), size)
        total = sum((micro.counts for micro in micros), Counts())
        assert total == Counts(useful=15, nonpad=20, slots=20)
    assert [micro.counts.slots for micro in packed(four_documents(), 2)] == [5, 15]


def test_an_overlong_example_is_refused() -> None:
    with pytest.raises(ValueError, match="41 tokens; allowed: up to 40"):
        Packed().micro_batches(examples(41), size=1, pad_id=PAD, seq_len=40)


def logits(model: nn.Module, *inputs: Any) -> Tensor:
    hidden = model.hidden(*inputs)  # type: ignore[operator]
    found: Tensor = hidden @ model.head_weight.T  # type: ignore[operator]
    return found


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_document_is_as_if_alone(family: str, kernel: str) -> None:
    """Case C08: logits and gradients, learned and rotary positions, every kernel of a CPU."""
    model = FAMILIES[family].build(0)
    documents = [example(n, seed=n) for n in (5, 6, 1, 9)]
    row = pack(documents)
    parameters = list(model.parameters())
    with KERNELS[kernel]():
        together = logits(model, row.input_ids, row.positions, row.segments)[0]
        gradients = torch.autograd.grad(together.square().sum(), parameters)
        alone = [
            logits(model, torch.from_numpy(d.ids.astype("int64"))[None], None, None)[0]
            for d in documents
        ]
        expected = torch.autograd.grad(
            torch.stack([x.square().sum() for x in alone]).sum(), parameters
        )
    assert (together - torch.cat(alone)).abs().max() < 1e-5
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("left_out", ["positions", "segments"])
def test_learned_positions_need_boundaries_and_reset_positions(left_out: str) -> None:
    """Case C08: either one alone changes the second document's logits."""
    model = FAMILIES["gpt"].build(0)
    second = example(6, seed=1)
    row = pack([example(5), second])
    alone = logits(model, torch.from_numpy(second.ids.astype("int64"))[None], None, None)
    inputs = {"positions": row.positions, "segments": row.segments} | {left_out: None}
    wrong = logits(model, row.input_ids, inputs["positions"], inputs["segments"])[:, 5:]
    assert (wrong - alone).abs().max() > 1e-2


def test_rotary_positions_need_the_boundaries_only() -> None:
    model = FAMILIES["llama"].build(0)
    second = example(6, seed=1)
    row = pack([example(5), second])
    alone = logits(model, torch.from_numpy(second.ids.astype("int64"))[None], None, None)
    counted_on = logits(model, row.input_ids, None, row.segments)[:, 5:]
    assert (counted_on - alone).abs().max() < 1e-5
    not_isolated = logits(model, row.input_ids, row.positions, None)[:, 5:]
    assert (not_isolated - alone).abs().max() > 1e-2


def test_the_mask_of_the_same_documents_gives_the_same_states() -> None:
    model = FAMILIES["llama"].build(1)
    row = pack(examples(5, 3, 8))
    assert isinstance(row.segments, Documents)
    by_mask = model.hidden(row.input_ids, row.positions, row.segments.segments())
    by_document = model.hidden(row.input_ids, row.positions, row.segments)
    torch.testing.assert_close(by_mask, by_document, rtol=1e-5, atol=1e-5)


# --- whole jobs -------------------------------------------------------------------------------


def job(*words: str) -> Job:
    chosen = config(*SMALL, *words)
    return assemble(chosen, build_parts(chosen), CPU, corpus())


def curve(*words: str) -> list[float]:
    made = job(*words)
    draws = made.feed.draws()
    found = []
    for _ in range(8):
        outcome = measured_update(made.training, lambda: next(draws), Quiet())
        assert outcome.figures is not None
        found.append(outcome.figures.tolist()[0])
    return [*found, made.evaluation.run(made.training.model, 8).eval_loss]


@pytest.mark.parametrize("model", ["gpt_tiny", "llama_tiny"])
def test_every_batching_gives_the_same_loss_curve_in_fp32(model: str) -> None:
    words = (f"model={model}", "accum=2", "optimizer.lr=3e-3", "schedule=constant")
    reference = curve(*words, "batching=padded")
    assert reference[0] - reference[-2] > 0.01
    for batching in ("padded_max", "bucketed", "packed"):
        found = curve(*words, f"batching={batching}")
        assert found == pytest.approx(reference, abs=1e-4)
        assert curve(*words, f"batching={batching}", "batching.head=targets") == pytest.approx(
            reference, abs=1e-4
        )


@pytest.mark.parametrize(
    ("kernel", "expected"), [("auto", FLASH), ("flash", FLASH), ("math", MATH)]
)
def test_packing_keeps_the_evidence_of_the_kernel(kernel: str, expected: str) -> None:
    made = job("batching=packed", f"memory/attention={kernel}")
    seen = probe(made.training, made.feed.probes(2))[1]
    assert seen.dispatched.attention_operators == (expected,)
    assert seen.contradiction() is None


def test_the_mean_over_sequences_knows_packed_examples_apart() -> None:
    """Examples of 2, 3 and 4 targets: each target weighs one over its example's number."""
    row = packed(examples(3, 4, 5), 3)[0]
    weights = SequenceMean().weights(row)
    assert weights is not None
    third, fourth = 1 / 3, 1 / 4
    expected = [0.5, 0.5, 0, third, third, third, 0, fourth, fourth, fourth, fourth, 0]
    assert weights[0].tolist() == pytest.approx(expected)
    assert SequenceMean().denominator([row]) == 3


def test_documents_may_use_all_positions_of_the_model_each() -> None:
    """Case C49: a row longer than the model's positions is fine, a document is not."""
    model = FAMILIES["gpt"].build(0)
    row = pack(examples(32, 32))
    assert model.hidden(row.input_ids, row.positions, row.segments).shape == (1, 64, 32)
    with pytest.raises(ValueError, match="rows of 64 tokens, but the model has positions=32"):
        model.hidden(row.input_ids, None, None)


def test_compiled_code_does_not_depend_on_the_lengths() -> None:
    model = FAMILIES["gpt"].build(0)
    graphs = 0

    def backend(module: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    rows = [pack(examples(*lengths)) for lengths in ((5, 6, 7), (4, 9), (8, 3, 2, 6), (7, 7))]
    plain = [model.hidden(row.input_ids, row.positions, row.segments) for row in rows]
    model.attention.within = torch.compiler.disable(model.attention.within)
    model.compile(backend=backend, dynamic=True)
    seen = []
    for row, expected in zip(rows, plain, strict=True):
        torch.testing.assert_close(model(row.input_ids, row.positions, row.segments), expected)
        seen.append(graphs)
    assert seen[0] > 0
    assert seen[-1] == seen[1], "documents of other lengths were compiled again"


def test_sgd_moves_the_same_for_the_head_on_targets_and_on_all() -> None:
    chosen = [example(12, masked=5), example(3, masked=3), example(9, masked=1, seed=2)]
    moved = []
    for head in ("all", "targets"):
        model = FAMILIES["gpt"].build(0).double()
        before = [p.detach().clone() for p in model.parameters()]
        micros = Packed(head=head).micro_batches(chosen, size=1, pad_id=PAD, seq_len=64)
        assert [micro.places is None for micro in micros] == [head == "all"] * 3
        measured_update(training_of(model), lambda micros=micros: micros, Quiet())
        moved.append([p.detach() - b for p, b in zip(model.parameters(), before, strict=True)])
    for a, b in zip(*moved, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)
        assert b.abs().max() > 0


def test_model_flops_leave_out_the_head_where_no_logits_are_computed() -> None:
    """One layer of width 16, MLP 64, 272 rows: matrices 12 * 256 = 3,072, head 4,352. Documents
    of 4 and 3 tokens have 7 tokens, 5 targets, 10 + 6 pairs of 2 heads of 8."""
    tokens = Counts(useful=5, nonpad=7, slots=7)
    everywhere = flops_of(job("batching=packed", "model.vocab=272"), (4, 3), tokens)
    assert everywhere == 3 * (2 * (3_072 + 4_352) * 7 + 4 * 2 * 8 * 16)
    sparse = job("batching=packed", "batching.head=targets", "model.vocab=272")
    assert flops_of(sparse, (4, 3), tokens) == everywhere - 3 * 2 * 4_352 * 2


def test_the_head_on_targets_shrinks_the_logits_to_the_targets() -> None:
    made = job("batching=padded", "batching.head=targets")
    micros = made.feed.probes(2)
    account, _ = probe(made.training, micros)
    assert account is not None
    (logits,) = [item for item in account.largest if item.name == "log_softmax"]
    assert logits.shape == (max(m[-1].counts.useful for m in micros), 272)
