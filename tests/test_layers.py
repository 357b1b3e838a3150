"""Imports point one way, and the launching side stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "runner").rglob("*.py")) + sorted((ROOT / "models").rglob("*.py"))

RANKS = {
    "runner.contracts": 0,
    "runner.formats": 7,
    "runner.units": 0,
    "runner.largest": 0,
    "runner.advice": 4,
    "runner.measure.shortage": 7,
    "runner.records": 1,
    "runner.states": 1,
    "runner.accounting": 2,
    "runner.numerics": 2,
    "runner.config": 2,
    "runner.diagnosis": 2,
    "runner.locking": 2,
    "runner.timeline": 2,
    "runner.compiling": 2,
    "runner.data": 3,
    "runner.objective": 3,
    "runner.optimizer": 3,
    "runner.schedule": 3,
    "runner.precision": 3,
    "runner.memory": 3,
    "runner.memory.lowrank": 4,
    "runner.forwarding": 3,
    "runner.hub": 3,
    "runner.tracking": 4,
    "runner.checks": 4,
    "runner.readback": 5,
    "runner.comparison": 6,
    "runner.reporting": 7,
    "runner.report": 8,
    "runner.compare": 9,
    "runner.door": 3,
    "runner.overrides": 4,
    "runner.compose": 5,
    "runner.journal": 4,
    "runner.environment": 4,
    "runner.measure.account": 4,
    "runner.measure.allocator": 4,
    "runner.measure.derive": 4,
    "runner.measure.evidence": 5,
    "runner.measure.gradients": 7,
    "runner.measure.kernels": 4,
    "runner.measure.live": 4,
    "runner.measure.places": 4,
    "runner.measure.storages": 4,
    "runner.measure.flops": 4,
    "runner.measure.peaks": 4,
    "runner.measure.clock": 4,
    "runner.step": 5,
    "runner.weights": 4,
    "runner.evaluation": 6,
    "runner.feed": 6,
    "runner.ahead": 7,
    "runner.measure.probe": 6,
    "runner.measure.looks": 7,
    "runner.measure.profiling": 7,
    "runner.loop": 8,
    "runner.assemble": 8,
    "runner.planning.target": 5,
    "runner.planning.arithmetic": 5,
    "runner.planning.faked": 5,
    "runner.planning.remembered": 5,
    "runner.planning.extrapolated": 5,
    "runner.planning": 9,
    "runner.plan": 13,
    "runner.outcome": 9,
    "runner.settling": 10,
    "runner.worker": 10,
    "runner.terminal": 6,
    "runner.launch": 11,
    "runner.sync": 11,
    "runner.sweeps": 12,
    "runner.running": 12,
    "runner.__main__": 13,
}
"""A module may import modules of its own rank or below, never above."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def rank_of(name: str) -> int | None:
    """The rank of the longest listed prefix."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        found = RANKS.get(".".join(parts[:length]))
        if found is not None:
            return found
    return None


def imports(path: Path, *, top_only: bool = False) -> set[str]:
    """Modules imported anywhere in the file, or only when it is loaded (typing apart)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_point_one_way(path: Path) -> None:
    name = module_name(path)
    if name in ("runner", "runner.measure", "runner.planning"):
        return
    if name.startswith("models"):
        assert not any(used.split(".")[0] == "runner" for used in imports(path))
        return
    own = rank_of(name)
    assert own is not None, f"{name} has no rank in RANKS"
    above = {
        used
        for used in imports(path, top_only=True)
        if used.startswith("runner.") and (rank_of(used) or 0) > own
    }
    assert not above, f"{name} imports {above}"


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_hydra_and_mlflow_have_one_place_each(path: Path) -> None:
    name = module_name(path)
    packages = {used.split(".")[0] for used in imports(path)}
    if name not in ("runner.door", "runner.overrides", "runner.compose", "runner.running"):
        assert "hydra" not in packages
    if name != "runner.tracking":
        assert "mlflow" not in packages


def loaded_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after running `code`."""
    script = (
        f"{code}\nimport sys\nprint(' '.join(sorted({{m.split('.')[0] for m in sys.modules}})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.splitlines()[-1].split())


HEAVY = {"torch", "mlflow", "datasets", "transformers", "pandas", "scipy", "matplotlib"}


def test_the_edge_loads_no_heavy_library() -> None:
    assert not loaded_after("import runner.__main__, runner.running, runner.sync") & HEAVY
    assert not loaded_after("import runner.compare, runner.report") & HEAVY


def test_no_part_named_in_the_configuration_loads_a_heavy_library() -> None:
    targets = set()
    for path in (ROOT / "conf").rglob("*.yaml"):
        node = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(node, dict) and "_target_" in node:
            targets.add(node["_target_"].rpartition(".")[0])
    assert len(targets) > 8
    assert not loaded_after("import " + ", ".join(sorted(targets))) & HEAVY


def test_help_answers_without_torch() -> None:
    code = "import runner.__main__ as m\nassert m.main(['--help']) == 0"
    assert not loaded_after(code) & HEAVY
