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


WARNING = ("torchao", "torch.utils._pytree")
"""Loggers of what loading torchao warns of: libraries of CUDA kernels that cannot be loaded, and
its own use of torch. Neither matters to a lever, which uses none of these."""


@contextmanager
def loading_torchao() -> Iterator[None]:
    """Inside, torchao is imported, or a library that imports it, without its warnings."""
    loggers = [logging.getLogger(name) for name in WARNING]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
