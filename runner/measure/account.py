"""The memory account of one whole update, on real or on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from runner.measure.derive import LayerShapes, account_of
from runner.measure.live import HEAD, Log, MemoryAccount
from runner.measure.places import Places, bare
from runner.measure.storages import Follow, Storages, plain_tensors, resizes_seen

__all__ = ["MemoryAccount", "MemoryTracker"]


class MemoryTracker:
    """Watches one update and says where its memory was.

    model, optimizer: what the update trains; the optimizer's state should exist already, as it
    does from the second update on. inputs: tensors of the batch that exist already. masters: by
    parameter name, what the optimizer changes in its stead; it counts as its state. grids: (rows,
    length) of each micro-batch in order, where what a layer keeps is to be told. rounding: of each
    storage's bytes, as an allocator rounds them up. held: bytes that the device's allocator holds
    when the update begins; what of them belongs to no tensor above is counted as unattributed.

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
        masters: Mapping[str, Tensor] | None = None,
        grids: Sequence[tuple[int, int]] = (),
        rounding: int = 1,
        held: int | None = None,
    ) -> None:
        self._storages = Storages(next(model.parameters()).device, rounding)
        self._places = Places()
        self._masters = {m: f"{bare(name)}.master" for name, m in (masters or {}).items()}
        self._names = {p: bare(name) for name, p in model.named_parameters()} | self._masters
        self._optimizer = optimizer
        self._vocab = getattr(getattr(model, "description", None), "vocab", None)
        self._shapes = layer_shapes(model, grids)
        self._model: nn.Module | None = model
        self._inputs = tuple(inputs)
        self._held = held
        self._stack = ExitStack()

    def enter(self, phase: str) -> None:
        """From now on the update is in `phase`."""
        self._note_owners()
        self._places.clear()
        self._storages.enter(phase)

    def account(self) -> MemoryAccount:
        """The account of the update that was watched."""
        return account_of(self._storages.log, self._shapes)

    @property
    def log(self) -> Log:
        """Every birth and death of the update that was watched."""
        return self._storages.log

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
        self._masters.clear()

    def _take_in_what_exists(self, model: nn.Module) -> None:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._storages.existing(tensor, "parameters", bare(name))
        for master, name in self._masters.items():
            self._storages.existing(master, "optimizer_state", name)
        for parameter, name in self._names.items():
            if parameter.grad is not None:
                self._storages.existing(parameter.grad, "gradients", f"{name}.grad")
        for tensor, name in self._states():
            self._storages.existing(tensor, "optimizer_state", name)
        for tensor in self._inputs:
            self._storages.existing(tensor, "inputs", "input")
        if self._held is not None:
            self._storages.beside(self._held, "held beside tensors: workspaces of libraries")

    def _states(self) -> Iterable[tuple[Tensor, str]]:
        """Every tensor of the optimizer, with its name; in-place rates belong to it too."""
        if self._optimizer is None:
            return
        names: Mapping[Any, str] = self._names
        for parameter, state in self._optimizer.state.items():
            name = names.get(parameter, "parameter")
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


def layer_shapes(model: nn.Module, grids: Sequence[tuple[int, int]]) -> LayerShapes | None:
    """What the count of a layer's tensors needs, from a model that describes itself."""
    description = getattr(model, "description", None)
    if description is None or not grids:
        return None
    return LayerShapes(
        layers=description.layers, width=description.width, heads=description.heads, grids=grids
    )


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
