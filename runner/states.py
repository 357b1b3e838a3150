"""The small files that a worker and its launching process share in a run folder. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
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


def read_ticket(folder: Path) -> dict[str, Any]:
    """The launching process's `job.yaml`: config, command, setup name, launch folder, sweep."""
    from omegaconf import OmegaConf

    ticket = OmegaConf.to_container(OmegaConf.load(folder / JOB), resolve=True)
    assert isinstance(ticket, dict)
    return {str(key): value for key, value in ticket.items()}


def place_of(ticket: Mapping[str, Any]) -> dict[str, Any]:
    """Where the run stands among others: the `job` of its record."""
    return {key: ticket.get(key) for key in ("setup", "swept", "axes", "sweep_id")}
