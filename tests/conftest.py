"""Fixtures that several test files share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

# Two test processes share the processors; each, and every job it starts, computes on one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty store; making its tables takes seconds, so tests copy the file."""
    from runner.tracking import MlflowCalls

    path = tmp_path_factory.getbasetemp() / "template.db"
    MlflowCalls(f"sqlite:///{path}")
    return path


@pytest.fixture
def launch(template: Path, tmp_path: Path) -> Path:
    """A launch folder with an empty store in it."""
    shutil.copy(template, tmp_path / "mlflow.db")
    return tmp_path


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of tokenized corpora that all tests of a session share, in all its processes."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "corpora"


@pytest.fixture(scope="session")
def sweep(template: Path, corpora: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A launch folder in which a sweep of two tiny jobs, FP32 and FP16, has run."""
    from tests.test_cli import TINY, run

    everything = ("plan.predict=true", "numerics.probe=true")
    launch = tmp_path_factory.mktemp("sweep")
    shutil.copy(template, launch / "mlflow.db")
    done = run(launch, corpora, "-m", *TINY, "precision=fp32,fp16", "seed=0", *everything)
    assert done.returncode == 0, done.stdout + done.stderr
    return launch
