"""Every option of every group composes, builds and declares what its contract asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.checks import build_parts, check
from runner.compose import command_of
from runner.config import conf_dir
from runner.contracts import Lever, Recipe
from runner.door import parser
from runner.states import WEIGHTS

OPTIONS = sorted(
    path.relative_to(conf_dir()).with_suffix("")
    for path in conf_dir().rglob("*.yaml")
    if path.parent not in (conf_dir(), conf_dir() / "experiment")
)
EXPERIMENTS = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))


HUB = Path(__file__).parent / "hub"
FORMATS = ("jsonl", "json", "csv", "parquet", "text")
NEEDED = {
    "memory/checkpointing/budget": ["compile=default"],
    "data/hub": ["data.name=owner/name"],
    "data/tokenizer/hf": ["data.tokenizer.path=folder"],
    "model/hf": [f"model.path={HUB}", "model.random_init=true"],
    **{f"data/{name}": [f"data.files={__file__}"] for name in FORMATS},
}
"""What an option cannot go without."""


def test_there_are_options_for_every_group() -> None:
    groups = {str(option.parent) for option in OPTIONS}
    assert groups >= {"model", "data", "batching", "objective", "precision", "optimizer"}
    assert groups >= {"schedule", "tracking", "memory/gradients", "memory/loss"}


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_the_option_composes_and_builds(option: Path, tmp_path: Path) -> None:
    words = [f"{option.parent}={option.name}", *NEEDED.get(str(option), [])]
    if str(option.parent) == "memory/adapter":
        (tmp_path / WEIGHTS).touch()
        words.append(f"model.init={tmp_path}")
    (plan,) = command_of(parser().parse_args(words), Path("/tmp/nowhere")).jobs
    assert check(plan.config) == []
    parts = build_parts(plan.config)
    assert isinstance(parts.precision, Recipe)
    assert parts.precision.numerics in ("same", "close")
    assert set(parts.precision.formats) == {"storage", "compute", "accumulate", "state"}
    assert all(isinstance(lever, Lever) for lever in parts.levers.values())
    assert parts.model.describe().params > 0


def test_no_folder_shadows_a_scalar_of_the_root() -> None:
    scalars = {"batch", "accum", "updates", "epochs", "warmup", "seed", "seq_len", "device"}
    assert not any((conf_dir() / name).exists() for name in scalars)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_named_experiment_is_a_whole_comparison_with_repeats(name: str) -> None:
    words = ["-m", f"experiment={name}"]
    command = command_of(parser().parse_args(words), Path("/tmp/nowhere"))
    setups = {plan.setup for plan in command.jobs}
    assert len(setups) > 1
    assert {plan.config["seed"] for plan in command.jobs} == {0, 1, 2}
    assert len(command.jobs) == 3 * len(setups)
    assert not any("experiment" in setup for setup in setups)


def test_the_experiments_of_the_manual_are_there() -> None:
    expected = {"precision_sweep", "memory_ladder", "accumulation", "batching", "attention"}
    assert set(EXPERIMENTS) >= expected
