"""What operations on fake tensors return, remembered: the blocks of a model repeat themselves.

torch remembers such results too, under keys that cost more than all the rest of a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format)
"""Types of arguments, tensors and lists apart, that decide a result by their value."""

Key = tuple[Any, ...]


class Made(NamedTuple):
    """A new tensor. shape, stride, dtype: of it; device: that it says it is on."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Remembered:
    """Results by operation and arguments, during one trace.

    Only what a whole new tensor or the first argument as it was came out of: views, lists of
    tensors and tensors whose values torch knows are left to torch.
    """

    def __init__(self) -> None:
        self._made: dict[Key, Made | None] = {}

    def result(self, key: Key, mode: FakeTensorMode, args: Sequence[Any]) -> FakeTensor | None:
        """What the operation returns, if it is remembered."""
        if key not in self._made:
            return None
        made = self._made[key]
        if made is None:
            first: FakeTensor = args[0]
            return first
        with in_kernel_invocation_manager(mode):
            empty = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
        return FakeTensor(mode, empty, made.device)

    def note(self, key: Key, args: Sequence[Any], out: Any) -> None:
        """Remember what an operation has returned, if it may be."""
        if type(out) is not FakeTensor or out.constant is not None:
            return
        if args and out is args[0]:
            if key[1] == described(out):
                self._made[key] = None
            return
        storage = out.untyped_storage()
        held = {t.untyped_storage()._cdata for t in args if type(t) is FakeTensor}
        whole = storage.nbytes() == out.numel() * out.element_size()
        if storage._cdata not in held and whole and not out.storage_offset():
            self._made[key] = Made(out.shape, out.stride(), out.dtype, out.fake_device)


def key_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Key | None:
    """Operation and arguments, if they decide what is returned; None for an operation that returns
    a view, a constant's, or one with other arguments."""
    if func.is_view or torch.Tag.inplace_view in func.tags:
        return None
    parts: list[Any] = [func]
    for value in args:
        part = described(value)
        if part is None:
            return None
        parts.append(part)
    for name, value in kwargs.items():
        part = described(value)
        if part is None:
            return None
        parts.append((name, part))
    return tuple(parts)


def described(value: Any) -> Any:
    """An argument as part of a key, or None."""
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.layout is not torch.strided:
            return None
        return value.shape, value.stride(), value.dtype, value.fake_device, value.storage_offset()
    return (kind, value) if kind in PLAIN else None
