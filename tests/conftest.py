"""Fixtures that several test files share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


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
    """A cache of tokenized corpora that all tests of a session share."""
    return tmp_path_factory.getbasetemp() / "corpora"
