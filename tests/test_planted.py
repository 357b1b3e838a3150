"""Bad recipes, planted: each is caught by the check that is there for it, and none is a win."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.test_cli import client_of, folders, parent_and_children, record_of, run

pytestmark = pytest.mark.slow

RECIPES = '''
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar
from runner.precision.fp32 import Fp32
from runner.contracts import Numerics

@dataclass(frozen=True, kw_only=True)
class ThreeLevels(Fp32):
    """Every gradient rounded to three levels of its tensor: minus, zero, plus."""
    numerics: ClassVar[Numerics] = "close"

    def prepare(self, model):
        def round_gradient(parameter):
            level = parameter.grad.abs().max()
            parameter.grad.copy_((parameter.grad / level).round() * level)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(round_gradient)
        return model

@dataclass(frozen=True, kw_only=True)
class HalfDeaf(Fp32):
    """Every other tensor gets no gradient."""
    numerics: ClassVar[Numerics] = "close"

    def prepare(self, model):
        for parameter in list(model.parameters())[::2]:
            parameter.register_hook(lambda gradient: gradient * 0)
        return model
'''
JOB = (
    "data=pydocs",
    "seq_len=32",
    "batch=8",
    "updates=60",
    "warmup=2",
    "eval.examples=200",
    "model.layers=1",
    "model.width=32",
    "model.heads=2",
    "model.positions=32",
    "plan.predict=false",
    "numerics.probe=false",
)


def test_bad_recipes_are_failed_or_errors_and_never_a_win(launch: Path, corpora: Path) -> None:
    (launch / "bad.py").write_text(RECIPES)
    options = launch / "own" / "precision"
    options.mkdir(parents=True)
    (options / "three_levels.yaml").write_text("_target_: bad.ThreeLevels\n")
    (options / "half_deaf.yaml").write_text("_target_: bad.HalfDeaf\n")
    own = (f"--config-dir={launch / 'own'}", "allow=[bad]")
    sweep = "precision=fp32,three_levels,half_deaf"
    done = run(launch, corpora, "-m", *own, *JOB, sweep, "seed=0,1")
    assert done.returncode == 1, done.stderr
    (report,) = launch.glob("runs/*/*/comparison.json")
    contrasts = json.loads(report.read_text())["contrasts"]
    found = {one["setup"].partition(" ")[0]: one for one in contrasts}
    verdicts = {name: one["verdict"]["word"] for name, one in found.items()}
    assert verdicts["precision=three_levels"] == "failed"
    assert verdicts["precision=half_deaf"] == "error"
    for name in ("precision=three_levels", "precision=half_deaf"):
        assert "win" not in json.dumps(found[name]["ratios"])
    parent, children = parent_and_children(launch)
    artifacts = client_of(launch).list_artifacts(parent.info.run_id)
    files = {"comparison.md", "comparison.csv", "comparison.json", "report.html", "jobs.json"}
    assert {artifact.path for artifact in artifacts} >= files
    tags = {r.data.params["precision._target_"]: r.data.tags["quality"] for r in children}
    assert tags["runner.precision.fp32.Fp32"] == "baseline"
    assert tags["bad.ThreeLevels"] == "failed"
    assert tags["bad.HalfDeaf"] == "error"
    assert "comparison against precision=fp32" in done.stdout
    for folder in folders(launch):
        record = record_of(folder)
        if "HalfDeaf" in record.config["precision"]["_target_"]:
            assert record.status == "error"
            assert "no gradient reaches" in record.message
            assert "useful_tokens_per_s" not in record.summary
