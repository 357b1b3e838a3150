"""Where an update is: which module runs, or which one a backward operation belongs to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from runner.measure.live import HEAD

WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")

LEAF = 1 << 63
"""Nodes that accumulate into leaves are numbered from here on, whenever they were made."""


def bare(path: str) -> str:
    """A module path or parameter name without the levels that wrappers put in."""
    return ".".join(level for level in path.split(".") if level not in WRAPPERS)


class Places:
    """Which module the update is in.

    In a backward pass no module runs. Each of its nodes was numbered when the forward pass made
    it, so the number tells the module. Numbers are counted by thread: where recomputation runs
    in a thread of its own (as it does on CUDA) they would be mistaken, and nothing is said.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._paths: list[str] = []
        self._thread = get_ident()
        self._one_thread = True

    def now(self, phase: str) -> str:
        """Path of the module that runs, `head` outside the model, empty where not known."""
        if self._stack:
            return self._stack[-1]
        if phase == "forward":
            return HEAD
        return self._made_by() if phase == "backward" and self._one_thread else ""

    def clear(self) -> None:
        """Forget modules that an exception left."""
        self._stack.clear()

    def follow(self, module: nn.Module, path: str) -> Iterable[RemovableHandle]:
        """Hook a module; returns the handles."""

        def entered(*_: Any) -> None:
            self._stack.append(path)
            self._mark(path)

        def left(*_: Any) -> None:
            while self._stack and self._stack.pop() != path:
                pass
            self._mark(self._stack[-1] if self._stack else HEAD)

        yield module.register_forward_pre_hook(entered)
        yield module.register_forward_hook(left, always_call=True)

    def _mark(self, path: str) -> None:
        self._one_thread = self._one_thread and get_ident() == self._thread
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._paths.append(path)

    def _made_by(self) -> str:
        node = torch._C._current_autograd_node()
        if node is None or node._sequence_nr() >= LEAF:
            return ""
        number = bisect_right(self._starts, node._sequence_nr()) - 1
        return self._paths[number] if number >= 0 else ""
