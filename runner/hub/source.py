"""Where a model of the hub's layout is: a folder, or a name. Reads JSON only, no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG = "config.json"
NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def folder_of(path: str) -> Path | None:
    """The folder that `path` names, or None where it is a name on the hub."""
    folder = Path(path).expanduser()
    return folder if folder.is_dir() else None


def read_config(path: str, revision: str | None) -> Mapping[str, Any]:
    """The model's config as its JSON says. Raises ValueError that names the field `path`."""
    folder = folder_of(path)
    try:
        file = folder / CONFIG if folder is not None else Path(_fetched(path, revision))
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        text = str(error).partition("\n")[0]
        raise ValueError(f"path: given {path}; allowed: {ALLOWED} ({text})") from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise ValueError(f"path: given {path}; allowed: {ALLOWED} (it names no model_type)")
    return found


ALLOWED = f"a folder with {CONFIG}, or a name on the hub that can be reached"


def _fetched(name: str, revision: str | None) -> str:
    """The config of a name on the hub, from its cache where it is there. Raises OSError."""
    if not NAME.fullmatch(name):
        raise OSError("there is no such folder")
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise OSError("a name needs the package huggingface_hub") from error
    found: str = hf_hub_download(name, CONFIG, revision=revision)
    return found


def refuse_without_weights(path: str) -> None:
    """Raise ValueError for a folder without safetensors: other formats can run code."""
    folder = folder_of(path)
    if folder is not None and not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"path: given {path} without *.safetensors; allowed: weights as safetensors, "
            "or random_init=true, which needs the config alone"
        )
