"""Tests for models/llama.py and models/llama_network.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn

from models.llama import Llama, RopeScaling
from models.llama_network import LlamaNetwork, stretched
from runner.config import build
from runner.contracts import IGNORE

CONF = Path(__file__).parent.parent / "conf" / "model"
SMALL = Llama(layers=2, heads=4, kv_heads=2, width=32, mlp_width=48, positions=64, vocab=100)


@pytest.fixture
def network() -> LlamaNetwork:
    """The small model with weights wide enough that every mistake shows in the logits."""
    network = SMALL.build(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return network


def logits_of(network: LlamaNetwork, *inputs: Tensor | None) -> Tensor:
    return F.linear(network.hidden(*inputs), network.head_weight)


def ids_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed))


def reference(network: LlamaNetwork) -> Any:
    """transformers' Llama with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    spec = network.spec
    config = LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.width,
        intermediate_size=spec.mlp_width,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        max_position_embeddings=spec.positions,
        rms_norm_eps=spec.norm_eps,
        rope_parameters=rope_parameters(spec),
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    missing = model.load_state_dict(dict(renamed(network.state_dict())), strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"])
    model.tie_weights()
    return model


def rope_parameters(spec: Llama) -> dict[str, Any]:
    """transformers' settings for the rotary wavelengths of `spec`."""
    scaling = spec.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": spec.rope_theta}
    return {
        "rope_type": "llama3",
        "rope_theta": spec.rope_theta,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_positions,
    }


NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def renamed(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Our tensors under transformers' names."""
    for name, tensor in tensors.items():
        place, kind = name.rsplit(".", 1)
        prefix = ""
        if place.startswith("blocks."):
            _, number, place = place.split(".", 2)
            prefix = f"model.layers.{number}."
        yield f"{prefix}{NAMES[place]}.{kind}", tensor


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


# --- shapes -----------------------------------------------------------------------------------


def test_parameters_and_matrices_are_counted_by_hand() -> None:
    # per layer q and out 2*32*32, k and v 2*32*16, three matrices of 32*48: 7,680; two norms of
    # 32; embedding 100*32; last norm 32
    shapes = SMALL.describe()
    assert shapes.matmul_params == 2 * 7_680 + 3_200
    assert shapes.params == 2 * (7_680 + 64) + 3_200 + 32
    assert sum(p.numel() for p in SMALL.build(0).parameters()) == shapes.params
    assert (shapes.head_width, shapes.kv_heads) == (8, 2)


def test_the_configured_1b_model_has_the_published_parameter_count() -> None:
    assert configured("llama_1b").describe().params == 1_235_814_400


def configured(name: str) -> Llama:
    fields: Any = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    spec = build(fields, key="model")
    assert isinstance(spec, Llama)
    return spec


def test_an_untied_head_adds_its_own_matrix_and_no_work() -> None:
    shape = {"layers": 2, "heads": 4, "kv_heads": 2, "width": 32, "mlp_width": 48}
    untied = Llama(**shape, positions=64, vocab=100, tied=False)
    assert untied.describe().params == SMALL.describe().params + 3_200
    assert untied.describe().matmul_params == SMALL.describe().matmul_params
    assert sum(p.numel() for p in untied.build(0).parameters()) == untied.describe().params


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kv_heads", 3, "kv_heads: given 3; allowed: a divisor of heads=4"),
        ("width", 36, "width: given 36; allowed: a multiple of 2 \\* heads=8"),
        ("rope_theta", 0.0, "rope_theta: given 0.0"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_by_name(field: str, value: float, message: str) -> None:
    shape: dict[str, Any] = {"layers": 2, "heads": 4, "kv_heads": 2, "width": 32, "mlp_width": 48}
    with pytest.raises(ValueError, match=message):
        Llama(**(shape | {"positions": 64, "vocab": 100, field: value}))


def test_the_same_seed_gives_the_same_weights_and_gains_start_at_one() -> None:
    first = SMALL.build(3).state_dict()
    torch.rand(5)
    second = SMALL.build(3).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["blocks.0.norm_1.weight"].eq(1).all()


# --- against transformers ---------------------------------------------------------------------


def test_the_configured_1b_model_turns_its_pairs_as_the_published_one_does() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    spec = configured("llama_1b")
    settings = {"hidden_size": spec.width, "num_attention_heads": spec.heads}
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            **settings,
            max_position_embeddings=spec.positions,
            rope_parameters=rope_parameters(spec),
        )
    )
    with torch.device("meta"):
        ours = LlamaNetwork(spec)
    positions = torch.tensor([[0, 1, 77, 8191, 100_000]])
    cos, sin = ours.angles(positions)
    expected = theirs(torch.zeros(1), positions)
    half = spec.width // spec.heads // 2
    for found, wanted in zip((cos, sin), expected, strict=True):
        # the last bit of a frequency of 1 is 0.006 radians at position 100,000
        torch.testing.assert_close(found[0, 0, :4], wanted[0, :4, :half], atol=1e-3, rtol=0)
        torch.testing.assert_close(found[0, 0, :2], wanted[0, :2, :half], atol=1e-6, rtol=0)
        torch.testing.assert_close(found[0, 0], wanted[0, :, :half], atol=2e-2, rtol=0)


def test_a_stretched_pair_by_hand() -> None:
    scaling = RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=100
    )
    # 5 turns in 100 positions are kept; 0.5 turns are slowed 8 times; 2.5 lie halfway between
    turns = torch.tensor([5.0, 4.0, 2.5, 1.0, 0.5])
    found = stretched(turns * 2 * math.pi / 100, scaling) * 100 / (2 * math.pi)
    expected = torch.tensor([5.0, 4.0, 2.5 * (1 + 1 / 8) / 2, 1 / 8, 0.5 / 8])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    with pytest.raises(ValueError, match="high_freq_factor: given 1"):
        RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=1.0)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "stretched"])
@pytest.mark.parametrize("lengths", [[20, 20, 20], [12, 20, 7]], ids=["full", "padded"])
def test_logits_and_gradients_equal_those_of_transformers(
    network: LlamaNetwork, lengths: list[int], scaled: bool
) -> None:
    if scaled:
        scaling = RopeScaling(factor=8.0, original_positions=16)
        unscaled = logits_of(network, ids_of(3, 20))
        network.spec = replace(network.spec, rope_scaling=scaling)
        assert (logits_of(network, ids_of(3, 20)) - unscaled).abs().max() > 0.01
    theirs = reference(network)
    real = torch.arange(20) < torch.tensor(lengths)[:, None]
    ids = torch.where(real, ids_of(3, 20), 0)
    targets = torch.where(real, ids_of(3, 20, seed=1), IGNORE)
    ours_logits = logits_of(network, ids)
    their_logits = theirs(ids, attention_mask=real.long()).logits
    torch.testing.assert_close(ours_logits[real], their_logits[real], atol=1e-5, rtol=1e-5)
    summed_loss(ours_logits, targets).div(sum(lengths)).backward()
    summed_loss(their_logits, targets).div(sum(lengths)).backward()
    expected = gradients(theirs)
    for name, gradient in renamed(gradients(network)):
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4, msg=name)


# --- packing and positions --------------------------------------------------------------------


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """Documents of 5 and 6 tokens and 2 slots of padding in one row."""
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0, 0]])
    segments = torch.tensor([[0] * 5 + [1] * 6 + [-1] * 2])
    return ids_of(1, 13), positions, segments


def test_a_packed_document_has_the_logits_it_has_alone(network: LlamaNetwork) -> None:
    ids, positions, segments = packed()
    row = logits_of(network, ids, positions, segments)
    alone = [logits_of(network, ids[:, :5]), logits_of(network, ids[:, 5:11])]
    torch.testing.assert_close(row[:, :11], torch.cat(alone, dim=1), atol=1e-5, rtol=0)


def test_packing_needs_the_mask_and_not_the_positions(network: LlamaNetwork) -> None:
    # case C08: only distances enter a rotary model
    ids, positions, segments = packed()
    alone = logits_of(network, ids[:, 5:11])
    by_mask = logits_of(network, ids, None, segments)[:, 5:11]
    torch.testing.assert_close(by_mask, alone, atol=1e-5, rtol=0)
    assert (logits_of(network, ids, positions, None)[:, 5:11] - alone).abs().max() > 0.01


def test_a_pair_is_turned_by_position_over_its_wavelength() -> None:
    # width of a head 8, base 10,000: pair 1 turns by 10000 ** (-2 / 8) = 0.1 for each position
    network = SMALL.build(0)
    cos, sin = network.angles(torch.tensor([[0, 3]]))
    assert cos.shape == (1, 1, 2, 4)
    assert cos[0, 0, :, 1].tolist() == pytest.approx([1.0, math.cos(0.3)])
    assert sin[0, 0, :, 0].tolist() == pytest.approx([0.0, math.sin(3.0)])


def test_positions_stay_apart_where_the_model_is_stored_in_bfloat16() -> None:
    network = SMALL.build(0).bfloat16()
    cos, _ = network.angles(torch.tensor([[512, 513]]))
    assert cos.dtype == torch.float32
    assert cos[0, 0, :, 0].tolist() == pytest.approx([math.cos(512), math.cos(513)], abs=1e-4)


def test_a_row_longer_than_the_positions_is_refused(network: LlamaNetwork) -> None:
    with pytest.raises(ValueError, match="rows of 65 tokens, but the model has positions=64"):
        network.hidden(ids_of(1, 65))


# --- what levers do to a model ----------------------------------------------------------------


def test_checkpointed_blocks_give_the_same_gradients(network: LlamaNetwork) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    ids, targets = ids_of(2, 9), ids_of(2, 9, seed=1)
    summed_loss(logits_of(network, ids), targets).backward()
    plain = gradients(network)
    network.zero_grad()
    network.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in network.blocks)
    summed_loss(logits_of(network, ids), targets).backward()
    wrapped = {
        name.replace("._checkpoint_wrapped_module", ""): gradient
        for name, gradient in gradients(network).items()
    }
    assert wrapped.keys() == plain.keys()
    assert all(torch.equal(wrapped[name], plain[name]) for name in plain)


def test_compiling_in_place_traces_one_graph_and_keeps_the_result(network: LlamaNetwork) -> None:
    from torch._dynamo.testing import CompileCounter

    ids, positions, segments = packed()
    plain = network.hidden(ids, positions, segments)
    counter = CompileCounter()
    torch.compiler.reset()
    network.compile(backend=counter, fullgraph=True)
    torch.testing.assert_close(network.hidden(ids, positions, segments), plain)
    assert counter.frame_count == 1
    torch.compiler.reset()


def test_under_autocast_queries_reach_attention_in_bfloat16(network: LlamaNetwork) -> None:
    formats: list[torch.dtype] = []
    inner = network.attention

    class Watching:
        def plan(self, segments: Tensor | None, like: Tensor) -> Any:
            return inner.plan(segments, like)

        def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Any, dropout_p: float) -> Tensor:
            formats.extend((q.dtype, k.dtype, v.dtype))
            return inner.attend(q, k, v, plan, dropout_p)

    ids = ids_of(2, 9)
    plain = network.hidden(ids)
    network.attention = Watching()
    with torch.autocast("cpu", torch.bfloat16):
        low = network.hidden(ids)
    assert set(formats) == {torch.bfloat16}
    assert 1e-4 < (low - plain).abs().max() / plain.abs().max() < 0.05


def test_fake_tensors_go_through_forward_and_backward() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        network = LlamaNetwork(SMALL)
        ids = torch.zeros(2, 9, dtype=torch.int64)
        logits_of(network, ids, ids, ids).sum().backward()
    assert gradients(network).keys() == dict(network.named_parameters()).keys()
