"""Models of `transformers` train as the project's own do, or are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from runner.assemble import Job, assemble, realised
from runner.checks import build_parts, check
from runner.contracts import Fault, Unsupported, UserError
from runner.data.packed import pack
from runner.hub.model import Hub
from runner.measure.probe import probe
from runner.planning.prediction import predict
from runner.planning.target import target_of
from runner.step import measured_update
from tests.support import Quiet, examples
from tests.test_assemble import CPU, corpus
from tests.test_checks import config

SMALL = ("seq_len=32", "batch=4", "optimizer.lr=3e-3", "schedule=constant")
OWN = {
    "gpt2": (
        "model=gpt_tiny",
        "model.layers=2",
        "model.heads=4",
        "model.width=32",
        "model.positions=32",
        "model.vocab=264",
    ),
    "llama": (
        "model=llama_tiny",
        "model.layers=2",
        "model.heads=4",
        "model.kv_heads=2",
        "model.width=32",
        "model.mlp_width=48",
        "model.positions=32",
        "model.vocab=264",
    ),
}
CONFIGS: dict[str, Any] = {
    "gpt2": transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=32, n_positions=32, vocab_size=264, initializer_range=0.2
    ),
    "llama": transformers.LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=32,
        intermediate_size=48,
        max_position_embeddings=32,
        vocab_size=264,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.2,
    ),
}
NAMES = {
    "gpt2": {
        "embed.weight": "wte.weight",
        "position.weight": "wpe.weight",
        "norm.": "ln_f.",
        "blocks.": "h.",
        "norm_1.": "ln_1.",
        "norm_2.": "ln_2.",
        "attn.qkv.": "attn.c_attn.",
        "attn.out.": "attn.c_proj.",
        "mlp.up.": "mlp.c_fc.",
        "mlp.down.": "mlp.c_proj.",
    },
    "llama": {
        "embed.weight": "embed_tokens.weight",
        "blocks.": "layers.",
        "norm_1.": "input_layernorm.",
        "norm_2.": "post_attention_layernorm.",
        "attn.q.": "self_attn.q_proj.",
        "attn.k.": "self_attn.k_proj.",
        "attn.v.": "self_attn.v_proj.",
        "attn.out.": "self_attn.o_proj.",
        "mlp.gate.": "mlp.gate_proj.",
        "mlp.up.": "mlp.up_proj.",
        "mlp.down.": "mlp.down_proj.",
    },
}


def saved(folder: Path, family: Any, seed: int = 0) -> Path:
    """A folder with config and weights, as `transformers` writes them."""
    chosen = CONFIGS[family] if isinstance(family, str) else family
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformers.AutoModelForCausalLM.from_config(chosen).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp(family), family)


def job(*words: str) -> Job:
    chosen = config(*SMALL, *words)
    return assemble(chosen, build_parts(chosen), CPU, corpus(train=examples(*range(4, 32))))


def losses(made: Job) -> list[float]:
    draws = made.feed.draws()
    found = []
    for _ in range(6):
        outcome = measured_update(made.training, lambda: next(draws), Quiet())
        assert outcome.figures is not None
        found.append(outcome.figures.tolist()[0])
    return [*found, made.evaluation.run(made.training.model, 6).eval_loss]


@torch.no_grad()
def copy_weights(own: nn.Module, theirs: Any, family: str) -> None:
    """The library's weights under the project's names."""
    stored = dict(theirs.base_model.named_parameters())
    for name, parameter in own.named_parameters():
        other = name
        for mine, its in NAMES[family].items():
            other = other.replace(mine, its) if mine in other else other
        found = stored[other]
        transposed = family == "gpt2" and name.endswith("weight") and ".c_" in other
        parameter.copy_(found.T if transposed else found)


# --- equal to the library and to the project's own --------------------------------------------


def test_logits_are_those_of_the_library(folder: Path) -> None:
    model = Hub(path=str(folder)).build(0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = torch.randint(264, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        own = model.hidden(ids) @ model.head_weight.T
        torch.testing.assert_close(own, theirs.eval()(ids).logits, rtol=1e-5, atol=1e-5)


def test_shapes_are_those_of_the_projects_own_model(folder: Path, family: str) -> None:
    found = Hub(path=str(folder)).describe()
    own = build_parts(config(*OWN[family], *SMALL)).model.describe()
    for name in ("layers", "heads", "kv_heads", "width", "head_width", "mlp_width", "positions"):
        assert getattr(found, name) == getattr(own, name), name
    assert (found.vocab, found.params, found.matmul_params) == (
        own.vocab,
        own.params,
        own.matmul_params,
    )


@pytest.mark.parametrize("batching", ["packed", "padded"])
def test_losses_are_those_of_the_projects_own_model(
    folder: Path, family: str, batching: str
) -> None:
    hub = job("model=hf", f"model.path='{folder}'", f"batching={batching}", "accum=2")
    own = job(*OWN[family], f"batching={batching}", "accum=2")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    copy_weights(own.training.model, theirs, family)
    expected = losses(own)
    assert expected[0] - expected[-2] > 0.05
    assert losses(hub) == pytest.approx(expected, abs=1e-5)


def test_a_packed_document_is_as_if_alone(folder: Path) -> None:
    """Case C08, through the library's layers."""
    model = Hub(path=str(folder)).build(0)
    documents = examples(5, 6, 1, 9)
    row = pack(documents)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def squares(*inputs: Any) -> tuple[Tensor, Tensor]:
        found = model.hidden(*inputs)[0] @ model.head_weight.T
        return found, found.square().sum()

    together, total = squares(row.input_ids, row.positions, row.segments)
    gradients = torch.autograd.grad(total, parameters)
    alone = [squares(torch.from_numpy(d.ids.astype("int64"))[None]) for d in documents]
    expected = torch.autograd.grad(torch.stack([s for _, s in alone]).sum(), parameters)
    assert (together - torch.cat([x for x, _ in alone])).abs().max() < 1e-5
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


# --- in every recipe, lever and batching ------------------------------------------------------


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[float]:
    """Losses of the plain job on the stored model."""
    return losses(job("model=hf", f"model.path='{folder}'", "batching=packed"))


@pytest.mark.parametrize(
    "words",
    [
        ("precision=bf16",),
        ("precision=fp16",),
        ("precision=bf16_pure",),
        ("precision=fp16_master",),
        ("precision=int8",),
        ("precision=fp8_rowwise", "emulate=true"),
        ("memory/optimizer_state=8bit",),
        ("memory/checkpointing=full",),
        ("memory/checkpointing=selective",),
        ("memory/loss=chunked", "memory.loss.tokens=7"),
        ("memory/attention=math",),
        ("batching.head=targets",),
    ],
    ids=" ".join,
)
def test_recipes_and_levers_apply(
    folder: Path, expected: list[float], words: tuple[str, ...]
) -> None:
    made = job("model=hf", f"model.path='{folder}'", "batching=packed", *words)
    _, trained = probe(made.training, made.feed.probes(2))
    assert trained.contradiction() is None
    close = 2e-2 if words[0].startswith(("precision", "memory/optimizer_state")) else 1e-4
    close = 5e-2 if "emulate=true" in words else close  # three bits of mantissa
    assert losses(made) == pytest.approx(expected, abs=close)
    kernel = "math" if "math" in words[0] else "_scaled_dot_product_flash_attention_for_cpu"
    assert trained.dispatched.attention_operators == (kernel,)


@pytest.mark.parametrize("name", ["fp32", "fp8_delayed"])
def test_a_hub_model_is_emulated_and_predicted_to_the_account_it_then_has(
    folder: Path, name: str
) -> None:
    """Emulation needs no library for a GPU; the prediction loads and proves nothing."""
    chosen = config(
        *SMALL, "model=hf", f"model.path='{folder}'", f"precision={name}", "emulate=true"
    )
    parts, reason = realised(chosen, build_parts(chosen), CPU)
    made = assemble(chosen, parts, CPU, corpus(train=examples(*range(4, 32))))
    assert (reason is None) == (name == "fp32")
    micros = made.feed.probes(1)[-1]
    predicted = predict(chosen, parts, micros, target=target_of(CPU))
    account, trained = probe(made.training, [micros])
    assert account is not None and trained.contradiction() is None
    assert predicted.peak_bytes == pytest.approx(account.peak_bytes, rel=1e-3)
    assert predicted.flops == trained.dispatched.total


def test_random_weights_need_the_config_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"without \*\.safetensors"):
        Hub(path=str(tmp_path))
    before = torch.get_rng_state()
    one, two, other = (Hub(path=str(tmp_path), random_init=True).build(s) for s in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.head_weight, other.head_weight)


def test_dropout_is_zero_unless_asked_for(folder: Path, family: str) -> None:
    ids = torch.arange(9)[None]
    model = Hub(path=str(folder)).build(0).train()
    assert torch.equal(model.hidden(ids), model.hidden(ids))
    wet = Hub(path=str(folder), dropout=0.5).build(0).train()
    assert not torch.equal(wet.hidden(ids), wet.hidden(ids))
    assert torch.equal(wet.eval().hidden(ids), model.hidden(ids))
    kept = Hub(path=str(folder), dropout=None).build(0).train()
    # GPT-2's config drops a tenth, Llama's nothing.
    assert torch.equal(kept.hidden(ids), kept.hidden(ids)) == (family == "llama")


def test_rotary_angles_stay_float32_when_the_weights_do_not(tmp_path: Path) -> None:
    model = Hub(path=str(saved(tmp_path, "llama"))).build(0)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(torch.bfloat16)
    assert model.head_weight.dtype == torch.bfloat16
    assert before
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


# --- what is refused --------------------------------------------------------------------------


def fault_of(*words: str) -> Fault:
    """The one fault of a command."""
    with pytest.raises(UserError) as caught:
        config("seq_len=16", *words)
    (fault,) = caught.value.faults
    return fault


def written(folder: Path, **changes: Any) -> Path:
    values = CONFIGS["llama"].to_dict() | changes
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_local_experts": 4}, "num_local_experts=4: a mixture of experts"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: capped logits"),
        ({"alibi": True}, "alibi: ALiBi"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map: code of its own"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type=dynamic"),
        ({"vocab_size": None}, "a config without vocab_size"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_would_be_trained_wrongly_is_refused_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    path = written(tmp_path, **changes)
    fault = fault_of("model=hf", f"model.path='{path}'", "model.random_init=true")
    assert fault.key == "model.path"
    assert named in str(fault)


def test_a_path_must_be_given_and_lead_to_a_config(tmp_path: Path) -> None:
    fault = fault_of("model=hf")
    assert (fault.key, fault.given) == ("model.path", "nothing")
    fault = fault_of("model=hf", f"model.path='{tmp_path}'", "model.random_init=true")
    assert fault.key == "model.path"
    assert "a folder with config.json" in fault.allowed


def test_a_sliding_window_bounds_the_length_of_documents(tmp_path: Path) -> None:
    """Within its window such a model sees everything; beyond it, it would not."""
    chosen = transformers.MistralConfig(
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        hidden_size=16,
        intermediate_size=16,
        max_position_embeddings=64,
        vocab_size=264,
        sliding_window=16,
    )
    path = saved(tmp_path, chosen)
    words = ("model=hf", f"model.path='{path}'")
    fault = fault_of(*words, "seq_len=17")
    assert (fault.key, fault.allowed) == ("seq_len", "up to the model's positions, 16")
    assert check(config(*words, "seq_len=16")) == []
    model = Hub(path=str(path)).build(0)
    model.hidden(torch.zeros(1, 16, dtype=torch.int64))
    with pytest.raises((Unsupported, ValueError), match="16"):
        model.hidden(torch.zeros(1, 17, dtype=torch.int64))


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        (
            transformers.BloomConfig(
                n_layer=1, n_head=2, hidden_size=16, vocab_size=264, max_position_embeddings=16
            ),
            "layers attend through the library",
        ),
        (
            transformers.GPTJConfig(
                n_layer=1, n_head=2, n_embd=16, vocab_size=264, n_positions=16, rotary_dim=4
            ),
            "head that is not one plain matrix",
        ),
        (
            transformers.BertConfig(
                num_hidden_layers=1,
                num_attention_heads=2,
                hidden_size=16,
                intermediate_size=16,
                vocab_size=264,
                max_position_embeddings=16,
            ),
            "head that is not one plain matrix",
        ),
    ],
    ids=["alibi", "head bias", "both directions"],
)
def test_an_architecture_that_does_otherwise_is_refused_when_it_is_built(
    tmp_path: Path, chosen: Any, named: str
) -> None:
    chosen.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["max_position_embeddings"] = 16
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises((UserError, Unsupported), match=named):
        Hub(path=str(tmp_path), random_init=True).build(0)


def test_scaled_logits_are_scaled(tmp_path: Path) -> None:
    chosen = transformers.GraniteConfig(
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        hidden_size=16,
        intermediate_size=16,
        max_position_embeddings=16,
        vocab_size=264,
        logits_scaling=8.0,
        attention_multiplier=0.03,
        initializer_range=0.3,
    )
    path = saved(tmp_path, chosen)
    model = Hub(path=str(path)).build(0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    ids = torch.arange(9)[None]
    own = model.hidden(ids) @ model.head_weight.T
    torch.testing.assert_close(own, theirs.eval()(ids).logits, rtol=1e-5, atol=1e-6)
    unscaled = model.hidden(ids) / model.logit_factor @ model.head_weight.T
    assert (unscaled - own).abs().max() > 0.1 * own.abs().max()


def test_a_damaged_file_of_the_model_is_named_by_its_folder_and_reason(tmp_path: Path) -> None:
    path = saved(tmp_path, "gpt2")
    (path / "model.safetensors").write_bytes(b"\x10" + b"\0" * 7 + b"garbage")
    with pytest.raises(UserError, match=r"model\.path: given .*deserializing header"):
        Hub(path=str(path)).build(0)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, "layer_norm_epsilon": "x"}))
    with pytest.raises(
        UserError, match=r"model\.path: given .*'layer_norm_epsilon' expected float"
    ):
        Hub(path=str(path), random_init=True).build(0)


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    written(tmp_path, num_hidden_layers=3)
    with pytest.raises(UserError, match="missing_keys"):
        Hub(path=str(tmp_path)).build(0)
    written(tmp_path, num_hidden_layers=1)
    with pytest.raises(UserError, match="unexpected_keys"):
        Hub(path=str(tmp_path)).build(0)


def test_the_record_knows_the_stored_weights_by_their_values(folder: Path, tmp_path: Path) -> None:
    base = ("model=hf", f"model.path='{folder}'")
    again = saved(tmp_path, transformers.AutoConfig.from_pretrained(folder), seed=1)
    digests = [job(*base).initial_weights, job("model=hf", f"model.path='{again}'").initial_weights]
    assert job(*base).initial_weights == digests[0] != digests[1]
    assert job(*base, "model.random_init=true").initial_weights is None


@pytest.mark.long
def test_compiled_layers_do_not_depend_on_the_lengths_of_documents(folder: Path) -> None:
    model = Hub(path=str(folder)).build(0)
    graphs = 0

    def backend(module: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return module.forward

    rows = [pack(examples(*lengths)) for lengths in ((5, 6, 7), (4, 9), (8, 3, 2, 6))]
    plain = [model.hidden(row.input_ids, row.positions, row.segments) for row in rows]
    model.attention.within = torch.compiler.disable(model.attention.within)
    model.compile(backend=backend, dynamic=True)
    seen = []
    for row, expected in zip(rows, plain, strict=True):
        torch.testing.assert_close(model(row.input_ids, row.positions, row.segments), expected)
        seen.append(graphs)
    assert seen[0] > 0
    assert seen[-1] == seen[0]


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_adapters_are_put_beside_stored_weights(folder: Path, family: str, adapter: str) -> None:
    attention = "attn" if family == "gpt2" else "self_attn"
    words = (
        "model=hf",
        f"model.path='{folder}'",
        f"memory/adapter={adapter}",
        f"memory.adapter.targets=[{attention}]",
        "batching=packed",
    )
    made = job(*words)
    # in + out of every matrix of attention, of which the llama has four, two of them narrower
    widths = {"gpt2": (32 + 96) + (32 + 32), "llama": 4 * 32 + (32 + 16 + 16 + 32)}[family]
    trainable = [p for p in made.training.model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trainable) == 2 * 8 * widths
    shapes = made.parts.model.describe()
    assert made.description.params == shapes.params + 2 * 8 * widths
    assert made.description.frozen_matmul_params == shapes.matmul_params
    found = losses(made)
    assert found[-2] < found[0]
    with pytest.raises(UserError, match="adapters of random weights"):
        job(*words, "model.random_init=true")
