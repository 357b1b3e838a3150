"""Tests for ../runner/advice.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.advice import levers_against, options
from runner.checks import build_parts
from runner.compose import command_of
from runner.door import parser

KINDS = {"parameters", "gradients", "optimizer_state", "saved_activations", "scores", "logits"}


def job(*words: str) -> Any:
    return command_of(parser().parse_args(["device=cpu", *words]), Path.cwd()).jobs[0].config


def against(kind: str, *words: str) -> Sequence[str]:
    config = job(*words)
    parts = build_parts(config)
    return levers_against(
        kind,
        config,
        description=parts.model.describe(),
        recipe=parts.precision,
        device=torch.device("cpu"),
    )


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


def test_logits_are_made_smaller_by_the_loss_levers_and_a_smaller_micro_batch_alone() -> None:
    named = against("logits")
    assert named[-1] == "accum=2"
    assert set(named) == {"memory/loss=chunked", "memory/loss=fused", "accum=2"}
    assert against("logits", "memory/loss=chunked", "accum=16") == ["memory/loss=fused"]


def test_levers_that_conflict_or_cannot_run_here_are_not_named() -> None:
    named = against("saved_activations")
    assert "memory/checkpointing=full" in named
    assert "memory/checkpointing=budget" not in named  # needs compile
    assert "memory/offload=activations" not in named  # a CPU has nothing to move to
    assert "memory/checkpointing=selective" not in against("saved_activations", "compile=default")


@pytest.mark.parametrize("kind", ["gradients", "optimizer_state", "parameters"])
def test_state_is_not_said_to_shrink_with_the_micro_batch(kind: str) -> None:
    assert not [words for words in against(kind) if words.startswith("accum")]


def test_low_bit_moments_are_named_for_optimizer_state_only() -> None:
    assert "memory/optimizer_state=8bit" in against("optimizer_state")
    assert not [w for w in against("gradients") if w.startswith("memory/optimizer_state")]
