"""The built wheel, installed elsewhere, runs by itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from runner.records import RunRecord
from tests.test_cli import TINY, stored

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("runner", "models", "conf")
LISTENER = """
import atexit, json, os, sys
from pathlib import Path

opened = set()

def listen(event, values):
    if event == "open" and isinstance(values[0], str):
        opened.add(os.path.abspath(values[0]))

def tell():
    Path(os.environ["OPENED"], str(os.getpid())).write_text(json.dumps(sorted(opened)))

if "OPENED" in os.environ:
    atexit.register(tell)
    sys.addaudithook(listen)
"""
"""Notes every file that a process of the fresh environment opens from Python."""


def called(*words: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Output of a command that must end with 0."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**clean, **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that nothing is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in PACKAGES:
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    words = ("wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    called(sys.executable, "-m", "pip", *words, "--wheel-dir", source / "dist", ".", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@dataclass(frozen=True, kw_only=True)
class Fresh:
    """An environment that has the wheel and sees the libraries of this one, not its checkout."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def opened(self) -> dict[int, list[str]]:
        """Files that each process which has ended opened."""
        notes = (self.folder / "opened").glob("*")
        return {int(note.name): json.loads(note.read_text()) for note in notes}

    def run(self, *words: str, cwd: Path) -> str:
        """Output of a command with this environment's Python."""
        (self.folder / "opened").mkdir(exist_ok=True)
        return called(self.python, *words, cwd=cwd, env={"OPENED": str(self.folder / "opened")})


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    called(sys.executable, "-m", "venv", "--without-pip", folder, cwd=wheel.parent)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    # A folder named in a .pth file is searched, but .pth files inside it are not obeyed: the
    # libraries are found, and an editable installation of this project is not.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    (packages / "sitecustomize.py").write_text(LISTENER)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    called(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=wheel.parent)
    return Fresh(folder=folder)


def test_the_wheel_holds_every_module_and_every_option_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "conf/memory/loss/full.yaml" in expected
    assert names == expected


def test_help_outside_the_checkout_lists_the_options_of_the_wheel(
    fresh: Fresh, tmp_path: Path
) -> None:
    listing = fresh.run("-m", "runner", "--help", cwd=tmp_path).partition("== Config ==")[0]
    groups = dict(line.split(": ") for line in listing.splitlines() if ": " in line)
    for group in ("precision", "memory/gradients", "data"):
        shipped = {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}
        assert set(groups[group].split(", ")) == shipped


def test_a_job_outside_the_checkout_trains_without_a_file_of_the_checkout(
    fresh: Fresh, launch: Path, corpora: Path
) -> None:
    before = set(fresh.opened())
    fresh.run("-m", "runner", f"cache='{corpora}'", *TINY, "precision=bf16", cwd=launch)
    (folder,) = [path.parent for path in launch.rglob("record.json") if "runs" in path.parts]
    record = RunRecord.read(folder)
    assert record is not None
    assert (record.status, record.summary["updates_applied"]) == ("ok", 4)
    assert [run.info.status for run in stored(launch)] == ["FINISHED"]
    processes = {pid: files for pid, files in fresh.opened().items() if pid not in before}
    assert len(processes) >= 2  # the launching process and its worker
    files = {name for opened in processes.values() for name in opened}
    libraries = sysconfig.get_path("purelib")
    own = [f for f in files if f.startswith(f"{ROOT}/") and not f.startswith(f"{libraries}/")]
    assert own == []
    inside = [f for f in files if f.startswith(f"{fresh.folder}/")]
    for name in ("conf/config.yaml", "conf/precision/bf16.yaml", "conf/memory/loss/full.yaml"):
        assert any(f.endswith(f"/site-packages/{name}") for f in inside)
    for package, module in (("runner", "worker"), ("models", "gpt_network")):
        pattern = rf".*/site-packages/{package}/(__pycache__/)?{module}\.(cpython-.*\.pyc|py)"
        assert any(re.fullmatch(pattern, f) for f in inside)
