"""The memory account of one whole update, on real or on fake tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from threading import get_ident
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from runner.measure.live import MemoryAccount, account_of
from runner.measure.storages import Follow, Storages, plain_tensors, resizes_seen

__all__ = ["MemoryAccount", "MemoryTracker"]

HEAD = "head"
"""Where the forward pass is when it has left the model: head and loss."""

WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")

LEAF = 1 << 63
"""Nodes that accumulate into leaves are numbered from here on, whenever they were made."""


class MemoryTracker:
    """Watches one update and says where its memory was.

    model, optimizer: what the update trains; the optimizer's state should exist already, as it
    does from the second update on. inputs: tensors of the batch that exist already.

    Use: `with tracker:` around exactly one update that calls `tracker.enter(phase)` at each phase
    boundary, then `tracker.account()`. Counts what is on the device of the model's first
    parameter: the bytes of storages that torch's operations return. What a kernel allocates and
    frees inside one operation is not seen. The update computes what it computes unwatched;
    nothing of it is kept alive, and no hook stays behind.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        inputs: Iterable[Tensor] = (),
    ) -> None:
        self._storages = Storages(next(model.parameters()).device)
        self._places = Places()
        self._names = {p: bare(name) for name, p in model.named_parameters()}
        self._optimizer = optimizer
        self._vocab = getattr(getattr(model, "description", None), "vocab", None)
        self._model: nn.Module | None = model
        self._inputs = tuple(inputs)
        self._stack = ExitStack()

    def enter(self, phase: str) -> None:
        """From now on the update is in `phase`."""
        self._note_owners()
        self._places.clear()
        self._storages.enter(phase)

    def account(self) -> MemoryAccount:
        """The account of the update that was watched."""
        return account_of(self._storages.log)

    def __enter__(self) -> MemoryTracker:
        assert self._model is not None, "a tracker watches one update"
        self._take_in_what_exists(self._model)
        self._hook(self._model)
        self._stack.enter_context(saved_tensors_hooks(self._pack, lambda tensor: tensor))
        self._stack.enter_context(resizes_seen(self._storages))
        self._stack.enter_context(Follow(self._storages, self._describe))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()
        self._note_owners()
        self._storages.forget()
        self._model = self._optimizer = None
        self._inputs = ()
        self._names.clear()

    def _take_in_what_exists(self, model: nn.Module) -> None:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._storages.existing(tensor, "parameters", bare(name))
        for parameter, name in self._names.items():
            if parameter.grad is not None:
                self._storages.existing(parameter.grad, "gradients", f"{name}.grad")
        for tensor, name in self._states():
            self._storages.existing(tensor, "optimizer_state", name)
        for tensor in self._inputs:
            self._storages.existing(tensor, "inputs", "input")

    def _states(self) -> Iterable[tuple[Tensor, str]]:
        """Every tensor of the optimizer, with its name; in-place rates belong to it too."""
        if self._optimizer is None:
            return
        for parameter, state in self._optimizer.state.items():
            name = self._names.get(parameter, "parameter")  # type: ignore[call-overload]
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield value, f"{name}.{key}"
        for number, group in enumerate(self._optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, Tensor):
                    yield value, f"group {number}.{key}"

    def _note_owners(self) -> None:
        """Give what the update made for gradients and optimizer state its role and name."""
        for parameter, name in self._names.items():
            if parameter.grad is not None:
                self._own(parameter.grad, "gradients", f"{name}.grad")
        for tensor, name in self._states():
            self._own(tensor, "optimizer_state", name)

    def _own(self, tensor: Tensor, role: str, name: str) -> None:
        for plain in plain_tensors(tensor):
            life = self._storages.find(plain)
            if life is not None and life.role in (None, "unattributed"):
                life.role, life.label, life.where = role, name, ""

    def _hook(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            for handle in self._places.follow(module, bare(name) or "model"):
                self._stack.callback(handle.remove)
        for parameter, name in self._names.items():
            if parameter.requires_grad and parameter.is_leaf:
                self._stack.callback(hook_first(parameter, self._accumulated(name)).remove)

    def _accumulated(self, name: str) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._own(parameter.grad, "gradients", f"{name}.grad")

        return note

    def _pack(self, tensor: Tensor) -> Tensor:
        for plain in plain_tensors(tensor):
            life = self._storages.find(plain)
            if life is not None:
                life.packed = True
        return tensor

    def _describe(self, tensor: Tensor, operation: str) -> tuple[str, str]:
        phase = self._storages.phase
        where = self._places.now(phase)
        wide = tensor.ndim > 1 and tensor.shape[-1] == self._vocab
        if where == HEAD and wide and operation in ("mm", "addmm", "bmm"):
            operation = "logits" if phase == "forward" else "gradient of logits"
        return operation, where


def hook_first(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Hook a parameter's accumulated gradient before the hooks that are there already: one of
    them may use the gradient and clear it."""
    register: Any = parameter.register_post_accumulate_grad_hook
    handle: RemovableHandle = register(hook)
    hooks: Any = parameter._post_accumulate_grad_hooks
    # autograd calls them in order of insertion, which `move_to_end` does not change
    for number in [number for number in hooks if number != handle.id]:
        hooks[number] = hooks.pop(number)
    return handle


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
