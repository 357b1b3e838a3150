"""Every recipe of `conf/precision`: it builds, trains, and its evidence shows what it declares."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.assemble import Job, assemble, lacking, realised
from runner.checks import build_parts, check
from runner.config import conf_dir
from runner.contracts import Unsupported
from runner.forwarding.runs import is_timed
from runner.measure.probe import Trained, probe
from runner.precision.conversion import conversion_of, converted_flops
from runner.step import measured_update
from tests.support import Quiet
from tests.test_assemble import CPU, SMALL, corpus
from tests.test_checks import config
from tests.test_cli import TINY, folders, parent_and_children, record_of, run

RECIPES = sorted(path.stem for path in (conf_dir() / "precision").glob("*.yaml"))
HARDWARE = {"tf32", "fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_gw_hp", "fp8_delayed"}
HARDWARE |= {"fp8_blockwise", "mxfp8", "nvfp4", "int8"}
ANYWHERE = {"fp32", "bf16", "fp16", "bf16_pure", "fp16_master", "int4", "ternary"}


def job_of(*words: str) -> tuple[Job, str | None]:
    """A job as the worker builds it, and why its recipe is emulated."""
    chosen = config(*SMALL, "model.width=32", "emulate=true", *words)
    parts, reason = realised(chosen, build_parts(chosen), CPU)
    return assemble(chosen, parts, CPU, corpus()), reason


def contradictions(job: Job, trained: Trained) -> list[str]:
    """What the worker would end the run for."""
    recipe, model, seen = job.parts.precision, job.training.model, trained.dispatched
    found = [trained.contradiction(may_round_away=recipe.may_round_away)]
    if conversion_of(model) is None:
        found.append(seen.contradiction(recipe.formats["compute"]))
    found.append(seen.conversion_contradiction(converted_flops(model, trained.tokens.slots)))
    return [text for text in found if text]


def test_every_recipe_of_the_specification_is_there() -> None:
    assert set(RECIPES) >= HARDWARE | ANYWHERE


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_trains_and_its_evidence_shows_its_formats(name: str) -> None:
    job, reason = job_of(f"precision={name}", "accum=2")
    assert (reason is not None) == (name in HARDWARE)
    _, trained = probe(job.training, job.feed.probes(2), account=False)
    assert contradictions(job, trained) == []
    weights = {n: p.detach().clone() for n, p in job.training.trained.items()}
    draws = job.feed.draws()
    for _ in range(2):
        outcome = measured_update(job.training, lambda: next(draws), Quiet())
        assert outcome.figures is not None
        loss, norm, skipped, _, _ = outcome.figures.tolist()
        assert skipped or (math.isfinite(norm) and loss == pytest.approx(math.log(272), abs=0.5))
    moved = [n for n, p in job.training.trained.items() if not torch.equal(p, weights[n])]
    assert moved or skipped
    held_out = job.evaluation.run(job.training.model, 0).eval_loss
    assert held_out == pytest.approx(math.log(272), abs=0.5)
    done = conversion_of(job.training.model)
    if done is not None:
        assert set(done.converted) == {
            f"blocks.0.{layer}" for layer in ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
        }
        assert trained.dispatched.shares_of(converted_flops(job.training.model, 1)).keys() == {
            " x ".join(sorted(pair)) for pair in done.products.values()
        }


@pytest.mark.parametrize("name", sorted(HARDWARE))
def test_without_emulation_the_recipe_is_refused_on_a_cpu_with_the_hint(name: str) -> None:
    chosen = config(f"precision={name}")
    with pytest.raises(
        Unsupported, match=r"needs a CUDA device; this job runs on cpu.*emulate=true"
    ):
        realised(chosen, build_parts(chosen), CPU)


def test_capabilities_are_those_of_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device of each generation is refused, by its compute capability."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Chip")
    monkeypatch.setattr("runner.assemble.find_spec", lambda name: object())
    least = {}
    for name in HARDWARE:
        recipe = build_parts(config(f"precision={name}")).precision
        for have in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0)):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, h=have: h)
            if lacking(recipe, torch.device("cuda", 0)) is None:
                least[name] = have
                break
    assert least == {
        **dict.fromkeys(("tf32", "int8"), (8, 0)),
        **dict.fromkeys(("fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_gw_hp"), (8, 9)),
        "fp8_delayed": (8, 9),
        "fp8_blockwise": (9, 0),
        **dict.fromkeys(("mxfp8", "nvfp4"), (10, 0)),
    }


def test_a_profile_of_an_emulation_is_refused() -> None:
    (fault,) = check({**config("emulate=true"), "profile": True})
    assert fault.key == "profile" and fault.next_step == "profile=false"


# --- what an emulated run leaves behind ---------------------------------------------------------

CLOCKED = re.compile(
    r"_s$|_per_s|^time$|seconds|mfu|phase_shares|step_s|wall|timings|timeline|clock_"
)


def names_of(value: Any) -> set[str]:
    """Every key of nested JSON whose value is not null."""
    if isinstance(value, dict):
        inner = set().union(*map(names_of, value.values()))
        return inner | {key for key, entry in value.items() if entry is not None}
    return set().union(*map(names_of, value)) if isinstance(value, list) else set()


@pytest.mark.slow
def test_an_emulated_run_tells_no_time_and_no_rate_anywhere(launch: Path, corpora: Path) -> None:
    words = ("precision=bf16,fp8_tensorwise", "emulate=true", "eval.every=2")
    done = run(launch, corpora, "-m", *TINY, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    _, (native, *emulated) = parent_and_children(launch)
    assert native.data.tags["emulated"] == "false"
    assert {"summary/step_s_median", "time/step_s"} <= set(native.data.metrics)
    assert "ignored: cpu does this recipe's arithmetic itself" in done.stdout
    kept = {"loss/train", "loss/eval", "summary/eval_loss", "summary/train_loss"}
    for child, folder in zip(emulated, folders(launch)[1:], strict=True):
        assert child.data.tags["emulated"] == "true"
        names = set(child.data.metrics)
        assert kept <= names
        assert not [n for n in names if is_timed(n) or n.startswith(("time/", "tokens/"))]
        record = json.loads((folder / "record.json").read_text())
        lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
        found = names_of({k: v for k, v in record.items() if k != "config"}) | names_of(lines)
        assert "loss" in found and "eval_loss" in found
        assert not [name for name in found if CLOCKED.search(name)]
        assert record["environment"]["emulated"] is True
        assert record["evidence"]["converted_layers"]["value"]["count"] == 4
    text = done.stdout[done.stdout.index("[2/2]") : done.stdout.index("comparison against")]
    assert "emulated (precision: Float8 needs a CUDA device" in text
    assert not re.search(r"\d (ms|s)\b|tokens/s|step time", text)
    shown = done.stdout[done.stdout.index("comparison against") :]
    assert "Emulated setups have no time and no ratio of memory" in shown.replace("\n  ", " ")


@pytest.mark.slow
def test_without_emulation_a_sweep_lists_refusals_and_the_others_run(
    launch: Path, corpora: Path
) -> None:
    done = run(launch, corpora, "-m", *TINY, "precision=int4,mxfp8")
    assert done.returncode == 1
    parent, children = parent_and_children(launch)
    (child,) = children
    assert child.data.tags["setup"].startswith("precision=int4 ")
    told = parent.data.tags["mlflow.note.content"]
    assert told.count("Mxfp8 needs a CUDA device; this job runs on cpu; emulate=true") == 1
    assert [record_of(folder).status for folder in folders(launch)] == ["ok", "unsupported"]


def test_an_emulation_is_not_compiled() -> None:
    chosen = config("precision=mxfp8", "emulate=true", "compile=default")
    with pytest.raises(Unsupported, match="its emulation runs eagerly: compile=off"):
        realised(chosen, build_parts(chosen), CPU)


@pytest.mark.long
def test_narrow_weights_compile_and_train_as_they_do_eagerly() -> None:
    curves = []
    for mode in ("off", "default"):
        job, _ = job_of("precision=int4", f"compile={mode}")
        draws = job.feed.draws()
        outcomes = [measured_update(job.training, lambda d=draws: next(d), Quiet()) for _ in "123"]
        curves.append([o.figures.tolist()[0] for o in outcomes])  # type: ignore
    assert curves[1] == pytest.approx(curves[0], abs=2e-3)
