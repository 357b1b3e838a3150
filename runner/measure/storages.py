"""Follows storages through one update: what is born, what changes size, what dies.

The same code follows real and fake tensors: a fake tensor's storage has the size that the real
one would have, and its own identity.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from runner.measure.live import Event, Life, Log

DEVICE = torch.ops.prim.device.default
PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)

Describe = Callable[[Tensor, str], tuple[str, str]]
"""Label and module path of a tensor that the named operation has just made."""


class Storages:
    """The log of one update, and the storages that are live now.

    rounding: sizes are counted in whole multiples of so many bytes.
    """

    def __init__(self, device: torch.device, rounding: int = 1) -> None:
        self.log = Log(stretches=["other"], before=[], events=[])
        self._device = device
        self._rounding = rounding
        self._live: dict[int, tuple[weakref.ref[Any], Life, int]] = {}
        self._beside: Life | None = None
        self._beside_bytes = 0

    def enter(self, phase: str) -> None:
        """Begin a stretch of `phase`."""
        self.log.stretches.append(phase)
        self.log.events.append(Event(None, 0, self.now))

    @property
    def now(self) -> int:
        """Number of the present stretch."""
        return len(self.log.stretches) - 1

    @property
    def phase(self) -> str:
        """Phase of the present stretch."""
        return self.log.stretches[-1]

    def find(self, tensor: Tensor) -> Life | None:
        """The life of a tensor's storage, if it is followed."""
        entry = self._live.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[1]

    def existing(self, tensor: Tensor, role: str, label: str) -> None:
        """Take in a storage that existed before the update; its first role stays."""
        for plain in plain_tensors(tensor):
            if self._follows(plain) and self.find(plain) is None:
                life = self._life(plain, label, "", birth=-1)
                life.role = role
                self._begin(plain, life, self.log.before)

    def beside(self, held: int, label: str) -> None:
        """Take in what an allocator holds in all, `held` bytes, beyond the storages that were
        taken in: it is there through the whole update and belongs to nothing."""
        rest = held - sum(event.delta for event in self.log.before)
        if rest <= 0:
            return
        self._beside_bytes = rest
        self._beside = Life(
            shape=(rest,), dtype="uint8", label=label, where="", birth=-1, role="unattributed"
        )
        self.log.before.append(Event(self._beside, rest, -1))

    def born(self, tensor: Tensor, operation: str, describe: Describe) -> None:
        """Take in what an operation returned: a new storage, a view, or one that was resized."""
        if not self._follows(tensor):
            return
        life = self.find(tensor)
        if life is not None:
            self.resized(tensor.untyped_storage())
            return
        label, where = describe(tensor, operation)
        life = self._life(tensor, label, where, birth=self.now)
        life.recomputed = self.phase == "backward" and torch.is_grad_enabled()
        life.role = "inputs" if self.phase in ("data", "transfer") else None
        self._begin(tensor, life, self.log.events)

    def met(self, tensor: Tensor) -> None:
        """Take in what an operation was given and nothing before it returned: data that came
        from outside torch, or else something that existed before the update."""
        if self._follows(tensor) and self.find(tensor) is None:
            arriving = self.phase in ("data", "transfer")
            life = self._life(tensor, "unknown", "", birth=self.now if arriving else -1)
            life.role = "inputs" if arriving else "unattributed"
            self._begin(tensor, life, self.log.events if arriving else self.log.before)
            if not arriving:
                self._no_longer_beside(tensor)

    def _no_longer_beside(self, tensor: Tensor) -> None:
        """A storage that existed has shown up: it was among what belonged to nothing."""
        known = min(self._bytes(tensor.untyped_storage()), self._beside_bytes)
        if known:
            self._beside_bytes -= known
            self.log.before.append(Event(self._beside, -known, -1))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Log a change in the size of a followed storage."""
        entry = self._live.get(storage._cdata)
        if entry is None:
            return
        ref, life, size = entry
        new = self._bytes(storage)
        if new != size:
            self.log.events.append(Event(life, new - size, self.now))
            self._live[storage._cdata] = (ref, life, new)

    def forget(self) -> None:
        """Stop following; the log stays."""
        self._live.clear()

    def _follows(self, tensor: Tensor) -> bool:
        return tensor.layout == torch.strided and device_of(tensor) == self._device

    def _bytes(self, storage: torch.UntypedStorage) -> int:
        """What an allocator that hands out multiples of `rounding` gives for a storage."""
        return -(-storage.nbytes() // self._rounding) * self._rounding

    def _life(self, tensor: Tensor, label: str, where: str, birth: int) -> Life:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Life(shape=tuple(tensor.shape), dtype=dtype, label=label, where=where, birth=birth)

    def _begin(self, tensor: Tensor, life: Life, events: list[Event]) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, self._bytes(storage)
        self._live[key] = (weakref.ref(storage, lambda ref: self._died(key, ref)), life, size)
        events.append(Event(life, size, life.birth))

    def _died(self, key: int, ref: weakref.ref[Any]) -> None:
        entry = self._live.get(key)
        if entry is None or entry[0] is not ref:
            return
        _, life, size = self._live.pop(key)
        life.death = self.now
        life.outlived = not (self.phase == "backward" and torch.is_grad_enabled())
        self.log.events.append(Event(life, -size, self.now))


class Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows every operation's inputs and outputs to `Storages`."""

    def __init__(self, storages: Storages, describe: Describe) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = storages
        self._describe = describe

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation; a tensor subclass first takes itself apart into plain tensors."""
        if func is DEVICE:
            return device_of(args[0])
        if any(kind not in PLAIN and overrides(kind) for kind in types):
            return NotImplemented
        given = kwargs or {}
        for tensor in tensors_in((args, *given.values())):
            self._storages.met(tensor)
        out = func(*args, **given)
        operation = func._schema.name.partition("::")[2].strip("_")
        for tensor in tensors_in(out):
            for plain in plain_tensors(tensor):
                self._storages.born(plain, operation, self._describe)
        return out


def device_of(tensor: Tensor) -> torch.device:
    """A tensor's device. A fake one is asked for it directly: it would have to be dispatched, some
    times for each operation."""
    if type(tensor) is FakeTensor and not tensor.fake_mode.in_kernel_invocation:
        return tensor.fake_device
    return tensor.device


def overrides(kind: type) -> bool:
    """Whether a tensor class runs its own operations."""
    own = getattr(kind, "__torch_dispatch__", None)
    return own is not None and own is not torch._C._disabled_torch_dispatch_impl


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold a tensor's data: itself, or the inner ones of a wrapper."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names: Iterable[str] = tensor.__tensor_flatten__()[0]
    for name in names:
        yield from plain_tensors(getattr(tensor, name))


@contextmanager
def resizes_seen(storages: Storages) -> Iterator[None]:
    """Also see `UntypedStorage.resize_`, which is no operation and passes no dispatch."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        out = original(storage, size)
        storages.resized(storage)
        return out

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
