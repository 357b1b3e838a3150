"""Tests for ../runner/advice.py, and of what each lever says it leaves of an object."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from runner.advice import largest_of, node_of, options, recipes_against, smaller_with
from runner.assemble import lacking
from runner.checks import build_parts
from runner.compose import command_of
from runner.config import conf_dir
from runner.door import parser
from runner.largest import Largest
from runner.measure.live import LiveObject, MemoryAccount

KINDS = {"parameters", "gradients", "optimizer_state", "saved_activations", "scores", "logits"}
CPU = torch.device("cpu")
LOGITS = {"kind": "logits", "name": "logits", "where": "head", "shape": (2048, 272)}
UP = {"name": "addmm", "where": "blocks.0.mlp.up", "shape": (2048, 256)}
GELU = {"name": "gelu", "where": "blocks.0.mlp", "shape": (16, 128, 256)}
MOMENT = {"kind": "optimizer_state", "name": "embed.weight.exp_avg", "shape": (272, 64)}
MATRIX = {"kind": "parameters", "name": "blocks.0.mlp.up.weight", "shape": (256, 64)}


@cache
def composed() -> Any:
    args = parser().parse_args(["device=cpu"])
    return command_of(args, Path.cwd(), to_run=False).jobs[0].config


def job(*words: str) -> Any:
    """The default job with these overrides, put in without Hydra: it takes longer than the rest."""
    config = deepcopy(dict(composed()))
    for word in words:
        key, _, value = word.partition("=")
        *path, name = key.replace("/", ".").split(".")
        place = config
        for level in path:
            place = place[level]
        option = conf_dir() / key / f"{value}.yaml"
        place[name] = node_of(option) if option.exists() else yaml.safe_load(value)
    return config


def lacks(recipe: Any) -> str | None:
    return lacking(recipe, CPU)


def seen(config: Any, **given: Any) -> Largest:
    """An object of a job of the tiny GPT: 16 examples of 128 tokens, 2 layers, width 64, 272 words.

    As saved, of a micro-batch, in a block, unless it is said otherwise."""
    shapes = build_parts(config).model.describe()
    rows, length = config["batch"] // config["accum"], config["seq_len"]
    plain: dict[str, Any] = {
        "kind": "saved_activations",
        "name": "gelu",
        "where": "",
        "bytes": 2**21,
        "dtype": "float32",
        "phase": "backward",
        "layers": shapes.layers,
        "width": shapes.width,
        "vocab": shapes.vocab,
        "accum": config["accum"],
        "rows": rows,
        "length": length,
        "slots": rows * length,
    }
    return Largest(**{**plain, **given})


def against(given: dict[str, Any], *words: str, **more: Any) -> Sequence[str]:
    config = job(*words)
    found = seen(config, **given, **more)
    return smaller_with(found, config, build_parts(config), CPU, lacks)


def of(group: str, named: Sequence[str]) -> set[str]:
    """The options of a group among what is named."""
    return {word.partition("=")[2] for word in named if word.startswith(f"{group}=")}


def test_every_option_of_every_lever_says_what_it_reduces_in_known_words() -> None:
    found = {option.words: set(option.lever.reduces()) for option in options()}
    assert all(reduced <= KINDS for reduced in found.values())
    idle = {words for words, reduced in found.items() if not reduced}
    assert idle == {
        "memory/adapter=none",
        "memory/attention=auto",
        "memory/attention=math",
        "memory/checkpointing=none",
        "memory/gradients=zero",
        "memory/loss=full",
        "memory/offload=none",
        "memory/optimizer_state=fp32",
    }


def test_no_lever_leaves_less_of_what_it_does_not_reduce() -> None:
    found = seen(job(), **UP)
    for option in options():
        for kind in (KINDS | {"temporaries", "inputs"}) - set(option.lever.reduces()):
            assert option.lever.leaves(replace(found, kind=kind)) == 1, option.words


# --- logits -----------------------------------------------------------------------------------


def test_logits_are_made_smaller_by_the_loss_levers_and_a_smaller_micro_batch_alone() -> None:
    assert against(LOGITS) == ["memory/loss=chunked", "memory/loss=fused", "accum=2"]


def test_chunks_as_large_as_the_micro_batch_are_not_named() -> None:
    """8 examples of 128 tokens are one chunk of 1024."""
    half = {**LOGITS, "shape": (1024, 272)}
    assert of("memory/loss", against(half, "accum=2")) == {"fused"}
    # torch's own chunks: 1024 tokens over ceil(272 / 64) = 5, up to a power of two: 256
    smaller = against({**LOGITS, "shape": (256, 272)}, "accum=2", "memory/loss=fused")
    assert smaller == ["accum=4"]
    # with as many words as the states are wide, torch makes one chunk
    assert not of("memory/loss", against(half, "accum=2", "model.vocab=64", "model.width=64"))


def test_micro_batches_above_a_chunk_are_halved_until_they_are_below_it() -> None:
    """2048 and 1024 tokens have the same chunk of 1024."""
    assert against({**LOGITS, "shape": (1024, 272)}, "memory/loss=chunked") == [
        "memory/loss=fused",
        "accum=4",
    ]


def test_the_gradient_of_the_heads_weight_is_no_logits() -> None:
    assert against({**LOGITS, "shape": (272, 64)}) == []


# --- activations ------------------------------------------------------------------------------


def test_levers_that_conflict_or_cannot_run_here_are_not_named() -> None:
    named = against(GELU)
    assert of("memory/checkpointing", named) == {"full", "every", "selective"}  # budget: compile
    assert not of("memory/offload", named)  # a CPU has nothing to move to
    assert "selective" not in of("memory/checkpointing", against(GELU, "compile=default"))


def test_selective_checkpointing_is_not_named_for_what_it_keeps() -> None:
    assert of("memory/checkpointing", against(UP)) == {"full", "every"}


def test_checkpointing_that_recomputes_fewer_blocks_is_not_named_in_its_place() -> None:
    assert not of("memory/checkpointing", against(UP, "memory/checkpointing=full"))
    named = against(UP, "memory/checkpointing=every", "model.layers=6")
    assert of("memory/checkpointing", named) == {"full"}


@pytest.mark.parametrize(
    ("layers", "every", "left"),
    # blocks 0, 2 of 4 are recomputed: 1 and 3 are kept; of 3 blocks the last is recomputed too
    [(4, 1, 1 / 4), (4, 2, 2 / 4), (3, 2, 2 / 3), (1, 1, 1), (5, 4, 4 / 5)],
)
def test_checkpointing_leaves_the_blocks_that_keep_theirs_and_the_one_at_work(
    layers: int, every: int, left: float
) -> None:
    from runner.memory.checkpointing import Blocks

    assert Blocks(every=every).leaves(seen(job(), **UP, layers=layers)) == pytest.approx(left)


def test_what_no_block_made_is_not_checkpointed_away() -> None:
    outside = {"name": "native_layer_norm", "where": "norm", "shape": (16, 128, 64)}
    assert against(outside) == ["accum=2"]
    assert against({**outside, "where": "blocks.0", "name": "add"}) == ["accum=2"]


def test_a_kernel_without_scores_is_named_for_scores_but_not_for_a_mask() -> None:
    scores = {"kind": "scores", "name": "bmm", "where": "blocks.0.attn", "shape": (32, 128, 128)}
    assert of("memory/attention", against(scores, "memory/attention=math")) == {"flash"}
    assert not of("memory/attention", against(scores, dtype="bool"))


def test_an_object_that_does_not_grow_with_the_micro_batch_is_not_said_to_shrink_with_it() -> None:
    assert not of("accum", against({**GELU, "name": "to_copy", "shape": (256, 64)}))
    assert not of("accum", against({**MOMENT, "kind": "temporaries"}))
    assert of("accum", against(GELU)) == {"2"}


# --- state ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gradients", "optimizer_state", "parameters"])
def test_state_is_not_said_to_shrink_with_the_micro_batch(kind: str) -> None:
    assert not of("accum", against({**MATRIX, "kind": kind}))


def test_moments_of_more_bits_are_not_named_in_place_of_fewer() -> None:
    betas = "optimizer.betas=[0.9,0.95]"
    state = "memory/optimizer_state"
    assert of(state, against(MOMENT, betas)) == {"bf16", "8bit", "4bit"}
    assert of(state, against(MOMENT, betas, f"{state}=8bit")) == {"4bit"}
    assert not of(state, against(MOMENT, betas, f"{state}=4bit"))
    assert not of(state, against({**MATRIX, "kind": "gradients"}))
    # torchao leaves tensors of fewer than 4096 elements in FP32
    assert not of(state, against({**MOMENT, "shape": (63, 65)}, betas))
    # and there is one optimizer at most
    kept = ("precision=bf16_pure", "precision.kahan=true")
    assert not of(state, against(MOMENT, *kept, dtype="bfloat16"))


def test_released_gradients_help_only_before_there_are_any() -> None:
    gradient = {**MATRIX, "kind": "gradients"}
    zero = "memory/gradients=zero"
    assert of("memory/gradients", against(gradient, zero, phase="forward")) == {"none"}
    assert not of("memory/gradients", against(gradient, zero, phase="optimizer"))
    assert not of("memory/gradients", against(gradient, zero, "accum=2", phase="forward"))


def test_adapters_are_named_for_what_they_freeze() -> None:
    start = "model.init=/some/run"
    assert of("memory/adapter", against({**MATRIX, "kind": "gradients"}, start)) == {
        "lora",
        "qlora",
    }
    assert of("memory/adapter", against(MATRIX, start)) == {"qlora"}
    embedding = {**MATRIX, "name": "embed.weight"}
    assert not of("memory/adapter", against(embedding, start))
    own = {**MATRIX, "kind": "gradients", "name": "blocks.0.mlp.up.lora_A.default.weight.grad"}
    assert not of("memory/adapter", against(own, start, "memory/adapter=lora"))


def test_offloading_is_named_for_what_is_large_enough() -> None:
    lever = next(o.lever for o in options() if o.words == "memory/offload=activations")
    config = job()
    assert lever.leaves(seen(config, **GELU)) == 0
    assert lever.leaves(seen(config, **GELU, bytes=2**20 - 1)) == 1
    assert lever.leaves(seen(config, name="gelu", where="norm", shape=(16, 128, 64))) == 1


# --- recipes ----------------------------------------------------------------------------------


def test_recipes_are_named_for_what_they_store_in_sixteen_bits() -> None:
    assert of("precision", against(UP)) == {"bf16", "bf16_pure", "fp16", "fp16_master"}
    assert of("precision", against(MATRIX)) == {"bf16_pure"}
    assert of("precision", against(MOMENT)) == {"bf16_pure"}
    assert not of("precision", against(LOGITS))  # the loss is computed in FP32
    assert not of("precision", against(UP, "precision=bf16", dtype="bfloat16"))


def test_a_recipe_that_the_device_lacks_is_not_named() -> None:
    config = job()
    found = seen(config, **UP)
    assert recipes_against(found, config, lambda recipe: "not here") == []


# --- from the account -------------------------------------------------------------------------


def test_the_object_of_an_account_knows_its_job() -> None:
    item = LiveObject(
        bytes=8,
        shape=(4, 2),
        dtype="float32",
        name="logits",
        where="head",
        category="temporaries",
        birth="forward",
        death=None,
    )
    account = MemoryAccount(
        peak_bytes=8,
        peak_phase="forward",
        start_bytes=0,
        at_peak={},
        largest_by_category={},
        peak_by_phase={},
        largest=(item,),
        curve=(),
        by_category={},
        scaled=2.0,
    )
    config = job("batch=4", "accum=2", "seq_len=32")
    shapes = build_parts(config).model.describe()
    found = largest_of(account, config, shapes)
    assert found is not None
    assert (found.kind, found.rows, found.length, found.slots) == ("logits", 2, 32, 128)
