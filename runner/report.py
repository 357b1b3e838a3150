"""A comparison for people: lines for the terminal, and the files that a sweep's run carries."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from runner.comparison.results import Comparison
from runner.records import write_atomically
from runner.reporting.page import page
from runner.reporting.texts import comma_separated, lines, markdown

__all__ = ["lines", "write"]


def write(comparison: Comparison, folder: Path) -> list[Path]:
    """Write comparison.md, comparison.csv, comparison.json and report.html into `folder`."""
    texts = {
        "comparison.md": markdown(comparison),
        "comparison.csv": comma_separated(comparison),
        "comparison.json": json.dumps(asdict(comparison), allow_nan=False, indent=1),
        "report.html": page(comparison),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_atomically(folder / name, text)
    return [folder / name for name in texts]
