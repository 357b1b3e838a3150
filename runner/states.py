"""The small files that a worker and its launching process share in a run folder. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

JOB = "job.yaml"
STATE = "state.json"
WEIGHTS = "weights.safetensors"


def read_state(folder: Path) -> dict[str, Any]:
    """What the worker last said of itself; empty before it said anything."""
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return state
