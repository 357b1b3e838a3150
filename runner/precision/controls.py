"""torch's backend controls, by dotted name: one API, set and read back.

Only the `fp32_precision` family is used. Once one of its settings is made, torch refuses to read
the older flags (`allow_tf32`, `get_float32_matmul_precision`), so the two are never mixed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def _place(name: str) -> tuple[Any, str]:
    """The backend object and the attribute that a dotted name means."""
    owner, _, attribute = name.rpartition(".")
    backend: Any = torch.backends
    for step in owner.split("."):
        backend = getattr(backend, step)
    return backend, attribute


Controls = Mapping[str, str | bool]


def set_controls(controls: Controls) -> dict[str, str | bool]:
    """Set torch's backend controls by dotted name and return them as read back.

    Raises RuntimeError when a control does not keep its value.
    """
    seen: dict[str, str | bool] = {}
    for name, value in controls.items():
        backend, attribute = _place(name)
        setattr(backend, attribute, value)
        seen[name] = getattr(backend, attribute)
        if seen[name] != value:
            raise RuntimeError(f"torch.backends.{name} reads {seen[name]!r} after {value!r}")
    return seen


def drift(controls: Controls) -> str | None:
    """Which controls no longer have the value they were given, or None: something in the process
    has used torch's older flags, or set these itself."""
    try:
        found = {name: getattr(*_place(name)) for name in controls}
    except RuntimeError as error:
        return f"torch refuses to read its precision controls ({str(error).splitlines()[0]})"
    changed = [
        f"torch.backends.{name} is {found[name]!r} at the end, not {value!r}"
        for name, value in controls.items()
        if found[name] != value
    ]
    return "; ".join(changed) or None


@contextmanager
def controls_set(controls: Controls) -> Iterator[None]:
    """Set controls inside, and what was there before afterwards."""
    before = {name: getattr(*_place(name)) for name in controls}
    set_controls(controls)
    try:
        yield
    finally:
        set_controls(before)
