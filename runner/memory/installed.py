"""Whether the library that a lever stands on is here, and its import. Imports none of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


def absent(lever: str, extra: str, *modules: str) -> str | None:
    """Why the lever cannot be pulled here, or None when every module is installed; `extra` is
    the project's own that brings them."""
    missing = [module for module in modules if find_spec(module) is None]
    if not missing:
        return None
    needed = " and ".join(missing)
    return f"{lever} needs {needed}, not installed here: pip install 'fullstep[{extra}]'"


@contextmanager
def without_warnings(logger: str) -> Iterator[None]:
    """Inside, what a library logs below an error is not shown."""
    found = logging.getLogger(logger)
    before = found.level
    found.setLevel(logging.ERROR)
    try:
        yield
    finally:
        found.setLevel(before)
