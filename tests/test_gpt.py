"""Tests for models/gpt.py, models/gpt_network.py and models/attention.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn

from models.attention import CausalAttention, block_causal_mask
from models.gpt import GPT
from models.gpt_network import GPTNetwork
from runner.contracts import IGNORE, Attention

CONF = Path(__file__).parent.parent / "conf" / "model"
SMALL = GPT(layers=2, heads=2, width=32, positions=64, vocab=100)


@pytest.fixture
def network() -> GPTNetwork:
    """The small model with weights wide enough that every mistake shows in the logits."""
    return widened(SMALL.build(0))


def widened(network: GPTNetwork) -> GPTNetwork:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return network


def logits_of(network: GPTNetwork, *inputs: Tensor | None) -> Tensor:
    return F.linear(network.hidden(*inputs), network.head_weight)


def ids_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed))


def reference(network: GPTNetwork) -> Any:
    """transformers' GPT-2 with the same weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    spec = network.spec
    config = GPT2Config(
        vocab_size=spec.vocab,
        n_positions=spec.positions,
        n_embd=spec.width,
        n_layer=spec.layers,
        n_head=spec.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    model.load_state_dict(dict(renamed(network.state_dict())), strict=False)
    model.tie_weights()
    return model


NAMES = {
    "embed": "transformer.wte",
    "position": "transformer.wpe",
    "norm": "transformer.ln_f",
    "norm_1": "ln_1",
    "norm_2": "ln_2",
    "attn.qkv": "attn.c_attn",
    "attn.out": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def renamed(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Our tensors under transformers' names, matrices of Conv1D transposed."""
    for name, tensor in tensors.items():
        place, kind = name.rsplit(".", 1)
        prefix = ""
        if place.startswith("blocks."):
            _, number, place = place.split(".", 2)
            prefix = f"transformer.h.{number}."
        conv = prefix and place.split(".")[0] in ("attn", "mlp") and kind == "weight"
        yield f"{prefix}{NAMES[place]}.{kind}", tensor.T if conv else tensor


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, gradient in renamed(ours):
        torch.testing.assert_close(gradient, theirs[name], atol=1e-5, rtol=1e-4, msg=name)


# --- shapes -----------------------------------------------------------------------------------


def test_c32_a_tied_embedding_is_counted_once() -> None:
    # 100*32 + 16*32 + 2 * (3168 + 1056 + 4224 + 4128 + 128) + 64
    spec = GPT(layers=2, heads=2, width=32, positions=16, vocab=100)
    assert spec.describe().params == 29_184
    assert sum(p.numel() for p in spec.build(0).parameters()) == 29_184


def test_an_untied_head_adds_its_own_matrix_and_no_work() -> None:
    tied = GPT(layers=2, heads=2, width=32, positions=16, vocab=100)
    untied = GPT(layers=2, heads=2, width=32, positions=16, vocab=100, tied=False)
    assert untied.describe().params == 29_184 + 3_200
    assert sum(p.numel() for p in untied.build(0).parameters()) == 29_184 + 3_200
    assert untied.describe().matmul_params == tied.describe().matmul_params


def test_matmul_params_are_the_matrices_that_every_token_meets() -> None:
    # per layer 32*96 + 32*32 + 32*128 + 128*32 = 12,288; head 100*32
    spec = GPT(layers=2, heads=2, width=32, positions=16, vocab=100)
    assert spec.describe().matmul_params == 2 * 12_288 + 3_200


def test_another_mlp_ratio_changes_counts_and_network_alike() -> None:
    # per layer 3168 + 1056 + (32*64+64) + (64*32+32) + 128 = 8,544
    spec = GPT(layers=2, heads=2, width=32, positions=16, vocab=100, mlp_ratio=2)
    assert spec.describe().params == 3_200 + 512 + 2 * 8_544 + 64
    assert sum(p.numel() for p in spec.build(0).parameters()) == spec.describe().params
    assert spec.describe().mlp_width == 64


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("gpt2_small", 124_439_808),
        ("gpt2_medium", 354_823_168),
        ("gpt2_large", 774_030_080),
        ("gpt2_xl", 1_557_611_200),
    ],
)
def test_the_configured_shapes_have_the_published_parameter_counts(name: str, params: int) -> None:
    assert configured(name).describe().params == params


def configured(name: str) -> GPT:
    fields = OmegaConf.load(CONF / f"{name}.yaml")
    assert fields.pop("_target_") == "models.gpt.GPT"
    return GPT(**{str(key): value for key, value in fields.items()})


def test_the_default_model_pads_258_byte_ids_to_a_multiple_of_16() -> None:
    assert configured("gpt_tiny").vocab == 272 == math.ceil(258 / 16) * 16


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("layers", 0, "layers: given 0"),
        ("heads", 3, "width: given 32; allowed: a multiple of heads=3"),
        ("vocab", -1, "vocab: given -1"),
        ("dropout", 1.0, "dropout: given 1.0"),
        ("init_std", 0.0, "init_std: given 0.0"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_by_name(field: str, value: float, message: str) -> None:
    shape: dict[str, Any] = {"layers": 2, "heads": 2, "width": 32, "positions": 16, "vocab": 100}
    with pytest.raises(ValueError, match=message):
        GPT(**(shape | {field: value}))


# --- initial weights --------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_weights_whatever_ran_before() -> None:
    first = SMALL.build(3).state_dict()
    torch.rand(5)
    second = SMALL.build(3).state_dict()
    other = SMALL.build(4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])


def test_building_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    SMALL.build(0)
    assert torch.equal(torch.rand(3), expected)


def test_residual_projections_start_smaller_by_the_root_of_twice_the_depth() -> None:
    # 0.02 / sqrt(2 * 8) = 0.005; 4 * 64**2 numbers per matrix put the estimate within 2 %
    network = GPT(layers=8, heads=2, width=64, positions=16, vocab=100).build(0)
    stacked = {
        name: torch.stack([block.get_parameter(f"{name}.weight") for block in network.blocks])
        for name in ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
    }
    expected = {"attn.qkv": 0.02, "attn.out": 0.005, "mlp.up": 0.02, "mlp.down": 0.005}
    for name, weights in stacked.items():
        assert weights.std().item() == pytest.approx(expected[name], rel=0.02), name
    assert network.get_parameter("blocks.3.mlp.up.bias").abs().max() == 0
    assert network.get_parameter("norm.weight").eq(1).all()


def test_the_network_is_float32_even_where_the_default_is_not() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        network = SMALL.build(0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    assert torch.equal(network.embed.weight, SMALL.build(0).embed.weight)


# --- against transformers ---------------------------------------------------------------------


def test_logits_and_gradients_equal_those_of_transformers(network: GPTNetwork) -> None:
    theirs = reference(network)
    ids, targets = ids_of(3, 20), ids_of(3, 20, seed=1)
    ours_logits, their_logits = logits_of(network, ids), theirs(ids).logits
    torch.testing.assert_close(ours_logits, their_logits, atol=1e-5, rtol=1e-5)
    summed_loss(ours_logits, targets).div(60).backward()
    summed_loss(their_logits, targets).div(60).backward()
    assert_same_gradients(gradients(network), gradients(theirs))


def test_right_padding_gives_the_logits_and_gradients_of_transformers(network: GPTNetwork) -> None:
    theirs = reference(network)
    lengths = torch.tensor([12, 20, 7])
    real = torch.arange(20) < lengths[:, None]
    ids = torch.where(real, ids_of(3, 20), 0)
    targets = torch.where(real, ids_of(3, 20, seed=1), IGNORE)
    ours_logits = logits_of(network, ids)
    their_logits = theirs(ids, attention_mask=real.long()).logits
    torch.testing.assert_close(ours_logits[real], their_logits[real], atol=1e-5, rtol=1e-5)
    summed_loss(ours_logits, targets).div(39).backward()
    summed_loss(their_logits, targets).div(39).backward()
    assert_same_gradients(gradients(network), gradients(theirs))


# --- packing ----------------------------------------------------------------------------------


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """Documents of 5 and 6 tokens and 2 slots of padding in one row."""
    ids = ids_of(1, 13)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0, 0]])
    segments = torch.tensor([[0] * 5 + [1] * 6 + [-1] * 2])
    return ids, positions, segments


def test_a_packed_document_has_the_logits_it_has_alone(network: GPTNetwork) -> None:
    ids, positions, segments = packed()
    row = logits_of(network, ids, positions, segments)
    alone = [logits_of(network, ids[:, :5]), logits_of(network, ids[:, 5:11])]
    torch.testing.assert_close(row[:, :11], torch.cat(alone, dim=1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("left_out", ["positions", "segments"])
def test_packing_needs_both_positions_and_segments(network: GPTNetwork, left_out: str) -> None:
    # without either the second document differs (case C08), so the test above can fail
    ids, positions, segments = packed()
    inputs = (ids, None, segments) if left_out == "positions" else (ids, positions, None)
    alone = logits_of(network, ids[:, 5:11])
    assert (logits_of(network, *inputs)[:, 5:11] - alone).abs().max() > 0.01


def test_padding_of_a_packed_row_is_finite_forward_and_backward(network: GPTNetwork) -> None:
    ids, positions, segments = packed()
    row = logits_of(network, ids, positions, segments)
    row.sum().backward()
    assert row.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(network).values())


def test_the_mask_opens_a_segment_to_itself_and_to_the_past_only() -> None:
    mask = block_causal_mask(torch.tensor([[0, 0, 1, 1, -1]]))
    expected = [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == expected


# --- the seam and what levers do to a model ---------------------------------------------------


def test_another_attention_put_into_the_model_is_the_one_that_runs(network: GPTNetwork) -> None:
    class Values:
        def plan(self, segments: Tensor | None, like: Tensor) -> str:
            return "plan"

        def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Any, dropout_p: float) -> Tensor:
            assert plan == "plan"
            return v

    ids = ids_of(2, 9)
    before = network.hidden(ids)
    network.attention = Values()
    # attention to nothing but oneself: every position is as if it were alone in its row
    alone = network.hidden(ids[:, 4:5], torch.tensor([[4], [4]]))
    torch.testing.assert_close(network.hidden(ids)[:, 4:5], alone)
    assert not torch.allclose(before[:, 4:5], alone)


def test_fewer_key_heads_attend_as_if_each_were_repeated() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 7, 8, generator=generator) for heads in (4, 2, 2))
    attention: Attention = CausalAttention()
    whole = attention.attend(q, k, v, None, 0.0)
    for head in range(4):
        scores = q[:, head] @ k[:, head // 2].transpose(1, 2) / math.sqrt(8)
        weights = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf).softmax(-1)
        torch.testing.assert_close(whole[:, head], weights @ v[:, head // 2])
    half = attention.attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), None, 0.0)
    torch.testing.assert_close(half.float(), whole, atol=0.03, rtol=0.02)


def test_dropout_acts_in_training_and_not_in_evaluation() -> None:
    network = GPT(layers=2, heads=2, width=32, positions=64, vocab=100, dropout=0.5).build(0)
    ids = ids_of(2, 9)
    torch.manual_seed(0)
    assert not torch.equal(network.hidden(ids), network.hidden(ids))
    network.eval()
    plain = SMALL.build(0)
    assert torch.equal(network.hidden(ids), plain.hidden(ids))


def test_a_row_longer_than_the_positions_is_refused(network: GPTNetwork) -> None:
    with pytest.raises(ValueError, match="rows of 65 tokens, but the model has positions=64"):
        network.hidden(ids_of(1, 65))


def test_checkpointed_blocks_give_the_same_gradients(network: GPTNetwork) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    ids, targets = ids_of(2, 9), ids_of(2, 9, seed=1)
    summed_loss(logits_of(network, ids), targets).backward()
    plain = gradients(network)
    network.zero_grad()
    network.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in network.blocks)
    summed_loss(logits_of(network, *(ids, None, None)), targets).backward()
    wrapped = {
        name.replace("._checkpoint_wrapped_module", ""): gradient
        for name, gradient in gradients(network).items()
    }
    assert wrapped.keys() == plain.keys()
    assert all(torch.equal(wrapped[name], plain[name]) for name in plain)


def test_compiling_in_place_traces_one_graph_and_keeps_the_result(network: GPTNetwork) -> None:
    from torch._dynamo.testing import CompileCounter

    ids, positions, segments = packed()
    plain = network.hidden(ids, positions, segments)
    counter = CompileCounter()
    torch.compiler.reset()
    network.compile(backend=counter, fullgraph=True)
    torch.testing.assert_close(network.hidden(ids, positions, segments), plain)
    assert counter.frame_count == 1
    torch.compiler.reset()


def test_under_autocast_the_matrices_run_in_bfloat16(network: GPTNetwork) -> None:
    formats: list[torch.dtype] = []
    network.get_submodule("blocks.0.mlp.up").register_forward_hook(
        lambda module, inputs, output: formats.append(output.dtype)
    )
    ids = ids_of(2, 9)
    plain = network.hidden(ids)
    with torch.autocast("cpu", torch.bfloat16):
        low = network.hidden(ids)
    assert formats == [torch.float32, torch.bfloat16]
    assert 1e-4 < (low - plain).abs().max() / plain.abs().max() < 0.05


def test_fake_tensors_go_through_forward_and_backward() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        network = GPTNetwork(SMALL)
        ids = torch.zeros(2, 9, dtype=torch.int64)
        logits_of(network, ids, ids, ids).sum().backward()
    assert gradients(network)["embed.weight"].shape == (100, 32)
    assert gradients(network).keys() == dict(network.named_parameters()).keys()
