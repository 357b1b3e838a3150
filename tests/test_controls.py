"""Backend controls: one API, set and read back; attention and recomputation keep their formats."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from runner.contracts import Recipe
from runner.measure.kernels import product_kernels
from runner.precision.autocast import Autocast
from runner.precision.controls import drift, set_controls
from runner.precision.tf32 import Tf32
from runner.step import measured_update
from tests.support import Quiet
from tests.test_assemble import job_of


@pytest.fixture(autouse=True)
def plain_controls() -> Iterator[None]:
    """Leave torch's process-wide switches as the recipes' default has them."""
    yield
    set_controls(Recipe().controls())


def test_sums_of_products_are_fp32_unless_a_recipe_asks_for_less() -> None:
    matmul = torch.backends.cuda.matmul
    set_controls(Recipe().controls())
    assert not matmul.allow_bf16_reduced_precision_reduction
    assert not matmul.allow_fp16_reduced_precision_reduction
    assert not matmul.allow_fp16_accumulation
    less = Autocast(dtype="bfloat16", reduced_sums=True)
    set_controls(less.controls())
    assert matmul.allow_bf16_reduced_precision_reduction
    assert not matmul.allow_fp16_reduced_precision_reduction
    assert less.formats["accumulate"] == "fp32, partial sums bf16"
    assert Autocast(dtype="float16").formats["accumulate"] == "fp32"


def test_controls_that_stay_as_they_were_set_do_not_drift() -> None:
    for recipe in (Recipe(), Tf32(), Autocast(dtype="float16", reduced_sums=True)):
        assert drift(set_controls(recipe.controls())) is None


def test_the_older_flags_show_as_drift() -> None:
    seen = set_controls(Recipe().controls())
    torch.set_float32_matmul_precision("high")
    text = drift(seen)
    assert text is not None
    assert "torch.backends.cuda.matmul.fp32_precision is 'tf32' at the end, not 'ieee'" in text


def test_a_mixture_that_torch_refuses_to_read_shows_as_drift(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Mixed:
        @property
        def fp32_precision(self) -> str:
            raise RuntimeError("mix of the legacy and new APIs\nmore")

    monkeypatch.setattr(torch.backends, "cudnn", Mixed())
    text = drift({"cudnn.fp32_precision": "ieee"})
    assert text == "torch refuses to read its precision controls (mix of the legacy and new APIs)"


def test_kernels_of_products_are_counted_by_name_and_others_left_out() -> None:
    def event(name: str, where: str = "CUDA") -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=SimpleNamespace(name=where))

    gemm = "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x64x128"
    events = [event(gemm), event(gemm), event("nvjet_tst_128x8"), event("flash_fwd_kernel")]
    others = [event("vectorized_elementwise_kernel"), event("aten::mm", "CPU")]
    assert product_kernels([*events, *others]) == {
        gemm: 2,
        "nvjet_tst_128x8": 1,
        "flash_fwd_kernel": 1,
    }


# --- C27: what is computed again is computed in the same formats --------------------------------


def forward_formats(*words: str) -> tuple[list[str], list[float], list[torch.Tensor]]:
    """dtypes that linear layers gave in three updates (recomputation included), losses, gradients
    of the last one."""
    job = job_of("model.layers=2", *words)
    seen: list[str] = []

    def note(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        seen.append(str(output.dtype))

    for module in job.training.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(note)
    draws = job.feed.draws()
    losses = []
    for _ in range(3):
        outcome = measured_update(job.training, lambda: next(draws), Quiet())
        assert outcome.figures is not None
        losses.append(outcome.figures.tolist()[0])
    gradients = [p.grad for p in job.training.parameters if p.grad is not None]
    return seen, losses, gradients


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure", "fp16_master", "int4"])
def test_c27_checkpointing_computes_again_in_the_same_formats(precision: str) -> None:
    words = (f"precision={precision}",)
    plain, losses, gradients = forward_formats(*words)
    again, same_losses, same_gradients = forward_formats(*words, "memory/checkpointing=full")
    # 3 updates of 2 blocks of 4 layers; the last layer of a block saves nothing that is missing,
    # so torch stops before it.
    assert (len(plain), len(again)) == (3 * 2 * 4, 3 * 2 * (4 + 3))
    assert set(again) == set(plain)
    assert len(set(plain)) == 1
    assert same_losses == pytest.approx(losses, abs=1e-6)
    for own, other in zip(same_gradients, gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-6)
