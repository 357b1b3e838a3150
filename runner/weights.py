"""Final weights as safetensors, and starting from another run's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from runner.contracts import Fault, UserError
from runner.states import WEIGHTS


def unique_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and persistent buffer once, tied ones under their first name."""
    yield from model.named_parameters(remove_duplicate=True)
    persistent = model.state_dict(keep_vars=True)
    parameters = {id(p) for p in model.parameters()}
    seen: set[int] = set()
    for name, tensor in persistent.items():
        if id(tensor) not in parameters and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def save_weights(
    model: nn.Module,
    folder: Path,
    facts: Mapping[str, str],
    merged: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write the model's weights, or those `merged` from it, into a run folder, whole or not at
    all."""
    path = folder / WEIGHTS
    weights = dict(unique_tensors(model)) if merged is None else merged
    tensors = {name: t.detach().cpu().contiguous() for name, t in weights.items()}
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"format": "pt", **facts})
    partial.replace(path)
    return path


def load_weights(model: nn.Module, folder: Path, key: str = "model.init") -> str:
    """Copy another run's final weights into `model`; returns the sha256 of their file.

    Names and shapes must be the same on both sides. Raises UserError.
    """
    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            _refuse_difference(dict(unique_tensors(model)), file, path, key)
            with torch.no_grad():
                for name, tensor in unique_tensors(model):
                    tensor.copy_(file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise UserError(
            Fault(
                key=key,
                given=str(path),
                allowed=f"a run folder with its final {WEIGHTS} ({error})",
                next_step="name the folder of a run that ended ok",
            )
        ) from error
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _refuse_difference(own: Mapping[str, Tensor], file: safe_open, path: Path, key: str) -> None:
    stored = set(file.keys())  # type: ignore[no-untyped-call]
    wrong = [f"{name} is missing" for name in own if name not in stored]
    wrong += [f"{name} is not in this model" for name in sorted(stored - set(own))]
    for name in own:
        if name in stored:
            found = file.get_slice(name)  # type: ignore[no-untyped-call]
            shape = tuple(found.get_shape())
            if shape != tuple(own[name].shape):
                wrong.append(f"{name} has shape {shape}, not {tuple(own[name].shape)}")
    if wrong:
        raise UserError(
            Fault(
                key=key,
                given=f"{path}: {len(wrong)} differences, first: {wrong[0]}",
                allowed="weights of the same architecture and shapes",
                next_step="choose the model that the run was made with",
            )
        )
