"""A real A/A: one setup against itself under another name, measured again and again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runner import report
from runner.compose import command_of
from runner.door import parser
from runner.precision.fp32 import Fp32
from runner.running import run

SWEEPS = 10
JOB = (
    "data=pydocs",
    "seq_len=32",
    "batch=8",
    "updates=14",
    "warmup=2",
    "eval.examples=8",
    "model.layers=1",
    "model.width=32",
    "model.heads=2",
    "model.positions=32",
    "tracking=off",
    "checkpoint.final=false",
    "allow=[tests]",
    "device=cpu",
    "process=inline",
    "plan.predict=false",
)


@dataclass(frozen=True, kw_only=True)
class Twin(Fp32):
    """FP32 under another name: another setup, to whoever looks at the configuration."""


TARGETS = ("runner.precision.fp32.Fp32", "tests.test_same_setup.Twin")


def one_sweep(folder: Path, corpora: Path) -> dict[str, Any]:
    """What a sweep over both names and three seeds says of the second name."""
    folder.mkdir()
    target = f"precision._target_={','.join(TARGETS)}"
    words = ["-m", f"cache='{corpora}'", *JOB, target, "seed=0,1,2"]
    command = command_of(parser().parse_args(words), folder)
    assert run(command, folder, words) == 0
    (path,) = folder.glob("runs/*/*/comparison.json")
    (contrast,) = json.loads(path.read_text())["contrasts"]
    assert contrast["ratios"]["step_s_median"]["seeds"] == 3
    return dict(contrast)


@pytest.mark.slow
@pytest.mark.timing
def test_a_setup_hardly_ever_wins_against_itself(
    tmp_path: Path, corpora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "page", lambda comparison: "")  # nobody looks at its plots
    contrasts = [one_sweep(tmp_path / str(number), corpora) for number in range(SWEEPS)]
    assert {contrast["verdict"]["word"] for contrast in contrasts} == {"passed"}
    wins = [
        (number, metric, found["value"])
        for number, contrast in enumerate(contrasts)
        for metric, found in contrast["ratios"].items()
        if found["outcome"] == "win"
    ]
    assert len({number for number, _, _ in wins}) <= 1, wins
