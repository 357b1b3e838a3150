"""Tests of runner/weights.py (case C37) and of the controls of recipes (case C25)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from models.gpt import GPT
from runner.assemble import assemble, realised
from runner.checks import build_parts
from runner.contracts import Unsupported, UserError
from runner.precision.controls import controls_set, set_controls
from runner.precision.tf32 import Tf32
from runner.states import WEIGHTS
from runner.weights import load_weights, save_weights
from tests.support import tiny_gpt
from tests.test_assemble import CPU, SMALL, corpus
from tests.test_checks import config


def logits(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(10)[None]
    return model.hidden(ids, None, None) @ model.head_weight.T  # type: ignore


def untied(seed: int) -> nn.Module:
    return GPT(layers=1, heads=2, width=16, positions=64, vocab=264, tied=False).build(seed)


@pytest.mark.parametrize("make", [tiny_gpt, lambda seed: untied(seed)])
def test_a_round_trip_keeps_every_logit_and_ties_what_was_tied(make, tmp_path: Path) -> None:  # type: ignore
    saved, loaded = make(seed=0), make(seed=1)
    tied = saved.head_weight.data_ptr() == saved.embed.weight.data_ptr()
    assert not torch.equal(logits(saved), logits(loaded))
    save_weights(saved, tmp_path, {})
    load_weights(loaded, tmp_path)
    assert torch.equal(logits(saved), logits(loaded))
    assert (loaded.head_weight.data_ptr() == loaded.embed.weight.data_ptr()) == tied
    stored = load_file(tmp_path / WEIGHTS)
    assert len(stored) == len(list(saved.named_parameters()))
    assert sum(t.numel() for t in stored.values()) == saved.description.params


@pytest.mark.parametrize("saver", [False, True])
@pytest.mark.parametrize("loader", [False, True])
def test_compiled_and_plain_models_share_their_names(
    saver: bool, loader: bool, tmp_path: Path
) -> None:
    one, two = tiny_gpt(seed=0), tiny_gpt(seed=1)
    for model, compiled in ((one, saver), (two, loader)):
        if compiled:
            model.compile(backend="eager")
    save_weights(one, tmp_path, {})
    load_weights(two, tmp_path)
    assert not any("_orig_mod" in name for name in load_file(tmp_path / WEIGHTS))
    assert torch.equal(logits(one), logits(two))


def test_weights_of_another_shape_or_architecture_are_refused_by_name(tmp_path: Path) -> None:
    save_weights(tiny_gpt(), tmp_path, {})
    with pytest.raises(UserError, match="weight has shape"):
        load_weights(GPT(layers=2, heads=2, width=32, positions=64, vocab=272).build(0), tmp_path)
    deeper = GPT(layers=3, heads=2, width=32, positions=64, vocab=264).build(0)
    before = [p.clone() for p in deeper.parameters()]
    with pytest.raises(UserError, match=r"blocks\.2.* is missing"):
        load_weights(deeper, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, deeper.parameters(), strict=True))


def test_a_folder_without_weights_or_with_half_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a run folder with its final"):
        load_weights(tiny_gpt(), tmp_path)
    path = save_weights(tiny_gpt(), tmp_path, {})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="a run folder with its final"):
        load_weights(tiny_gpt(), tmp_path)


def test_a_job_starts_from_another_run_s_weights(tmp_path: Path) -> None:
    chosen = config(*SMALL)
    first = assemble(chosen, build_parts(chosen), CPU, corpus())
    with torch.no_grad():
        for parameter in first.training.parameters:
            parameter.add_(1.0)
    save_weights(first.training.model, tmp_path, {})
    chosen = {**chosen, "model": {**chosen["model"], "init": str(tmp_path)}, "seed": 9}
    second = assemble(chosen, build_parts(chosen), CPU, corpus())
    for a, b in zip(first.training.parameters, second.training.parameters, strict=True):
        assert torch.equal(a, b)
    assert second.initial_weights is not None
    assert first.initial_weights is None


def test_controls_are_put_back_after_a_change() -> None:
    set_controls({"cuda.matmul.fp32_precision": "tf32"})
    with controls_set({"cuda.matmul.fp32_precision": "ieee"}):
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    set_controls({"cuda.matmul.fp32_precision": "ieee"})


def test_tf32_evaluates_in_ieee_fp32() -> None:
    recipe = Tf32()
    set_controls(recipe.controls())
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    with recipe.evaluation(tiny_gpt()):
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.cudnn.fp32_precision == "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    set_controls(super(Tf32, recipe).controls())


def test_tf32_is_refused_on_a_cpu() -> None:
    parts = build_parts(config("precision=tf32"))
    with pytest.raises(Unsupported, match="Tf32 needs a CUDA device"):
        realised(config(), parts, CPU)


def test_no_older_precision_flag_is_used_anywhere() -> None:
    root = Path(__file__).resolve().parent.parent
    older = ("allow_tf32", "float32_matmul_precision")
    for path in [*root.glob("runner/**/*.py"), *root.glob("models/**/*.py")]:
        code = (
            path.read_text()
            .replace("`allow_tf32`", "")
            .replace("`get_float32_matmul_precision`", "")
        )
        assert not any(word in code for word in older), path
