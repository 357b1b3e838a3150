"""Fake tensors for a whole training job: shapes and formats of everything, bytes of nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from models.documents import Documents
from runner.contracts import MicroBatch
from runner.measure.storages import DEVICE, device_of
from runner.planning.remembered import Remembered, key_of

FUSED = frozenset(f"aten::_fused_{algorithm}_" for algorithm in ("adam", "adamw", "sgd", "adagrad"))


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers where a job reads a number from a fake tensor, which has none, and does nothing where
    torch would compute on real ones for want of a shape rule: fused optimizers, which make no
    tensor.

    A number that torch knows is itself. The update's flag for a gradient that is not finite is 0:
    what an update needs that is applied is wanted. Every other number is 1, as an optimizer's
    count of its steps may be.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._remembered = Remembered()
        self._flag: weakref.ref[Tensor] | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation, or answer for it."""
        if func is DEVICE:
            return device_of(args[0])
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default and unknown(args[0]):
            flag = self._flag is not None and self._flag() is args[0]
            return 0.0 if flag else 1.0 if args[0].is_floating_point() else 1
        if func._schema.name in FUSED and not func._schema.returns:
            return None
        out = self._run(func, args, kwargs or {})
        if func is aten.rsub.Scalar:  # `1 - finite` is how the step makes its flag
            self._flag = weakref.ref(out)
        return out

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        key = key_of(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        out: Any = self._remembered.result(key, self._mode, args)
        if out is None:
            out = func(*args, **kwargs)
            self._remembered.note(key, args, out)
        return out


def unknown(number: Tensor) -> bool:
    """Whether a tensor is fake and torch does not know its value."""
    return isinstance(number, FakeTensor) and number.constant is None


@contextmanager
def faking() -> Iterator[FakeTensorMode]:
    """Inside, tensors are fake, modules convert in place and numbers are answered for. The random
    state stays as it was."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with (
        torch.random.fork_rng(devices=[]),
        converting_in_place(),
        uncompiled(),
        mode,
        Answers(mode),
    ):
        yield mode


def uncompiled() -> AbstractContextManager[None]:
    """Leave functions as they are that a library would have torch compile, one parameter after
    another: fake tensors run none of what would be compiled, and each call would cost a guard."""
    return compiling_to(lambda found: found)


def state_only() -> AbstractContextManager[None]:
    """Leave out what a library would have torch compile for each parameter in an optimizer's first
    step, which is there for the state that it makes before."""
    return compiling_to(lambda found: lambda *args, **settings: None)


@contextmanager
def compiling_to(change: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, `change` stands for torch.compile."""
    original = torch.compile

    def compile(model: Any = None, **settings: Any) -> Any:
        return change if model is None else change(model)

    torch.compile = compile
    try:
        yield
    finally:
        torch.compile = original


@contextmanager
def converting_in_place() -> Iterator[None]:
    """Let modules that hold fake tensors change format and device, which torch's own way, swapping
    two tensors, refuses for them."""
    original = nn.Module._apply
    nn.Module._apply = _apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def _apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    for child in module.children() if recurse else ():
        _apply(child, change)
    with torch.no_grad():
        owners: Any = (module._parameters, module._buffers)
        for owner in owners:
            for name, tensor in list(owner.items()):
                if tensor is not None:
                    owner[name] = changed(tensor, change(tensor))
    return module


def changed(tensor: Tensor, new: Tensor) -> Tensor:
    """The tensor with what another holds, the same object where torch can do that: not across
    devices, where a parameter becomes a new one."""
    if new is tensor:
        return tensor
    if not torch._has_compatible_shallow_copy_type(tensor, new):
        same = isinstance(tensor, nn.Parameter)
        return nn.Parameter(new, tensor.requires_grad) if same else new
    tensor.data = new
    return tensor


def fake_micro_batch(micro: MicroBatch, mode: FakeTensorMode) -> MicroBatch:
    """The micro-batch with fake tensors of the same shapes."""

    def fake(held: Any) -> Any:
        if isinstance(held, Documents):
            return Documents(held.lengths, mode.from_tensor(held.bounds))
        return mode.from_tensor(held)

    return micro.moved(fake)
