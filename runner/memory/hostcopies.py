"""Copies of saved tensors in host memory, made and fetched by autograd's hooks."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(kw_only=True, eq=False)
class HostCopy:
    """One saved tensor in host memory.

    device: where it came from and goes back to. made: the end of its copy there, None on a CPU.
    storage: keeps the source's identity from being used again while this copy is looked up by it.
    fetched: the tensor as it was last fetched, while that one lives.
    """

    host: Tensor
    device: torch.device
    made: torch.cuda.Event | None
    storage: StorageWeakRef
    fetched: weakref.ref[Tensor] | None = None


class HostCopies:
    """The saved tensors of one forward pass that wait in host memory.

    kept: storages that stay on the device, by `_cdata`; min_bytes: smaller tensors stay too. What
    several operations save, unchanged, is copied once. On CUDA the copies are made on a stream of
    their own, from pinned memory back on the stream that needs them (unverified on a GPU).
    """

    def __init__(self, *, kept: Set[int], min_bytes: int) -> None:
        self._kept = kept
        self._min_bytes = min_bytes
        self._copies: weakref.WeakValueDictionary[Hashable, HostCopy] = (
            weakref.WeakValueDictionary()
        )
        self._side: torch.cuda.Stream | None = None

    def hooks(self) -> saved_tensors_hooks:
        """The context in which what autograd saves is copied."""
        return saved_tensors_hooks(self._pack, fetch)

    def _pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        wrapped = is_traceable_wrapper_subclass(tensor)
        if wrapped or tensor.nbytes < self._min_bytes or storage._cdata in self._kept:
            return tensor
        place = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
        key = (*place, tensor.dtype, tensor._version)
        found = self._copies.get(key)
        if found is None:
            found = self._copies[key] = self._copied(tensor)
        return found

    def _copied(self, tensor: Tensor) -> HostCopy:
        """Start copying a tensor to the host."""
        cuda = tensor.device.type == "cuda"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=cuda)
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        if not cuda:
            host.copy_(tensor)
            return HostCopy(host=host, device=tensor.device, made=None, storage=storage)
        self._side = side = self._side or torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(side):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(side)
        made = side.record_event()
        return HostCopy(host=host, device=tensor.device, made=made, storage=storage)


def fetch(saved: Tensor | HostCopy) -> Tensor:
    """The saved tensor, back on its device."""
    if isinstance(saved, Tensor):
        return saved
    there = saved.fetched() if saved.fetched is not None else None
    if there is not None:
        return there
    if saved.made is not None:
        torch.cuda.current_stream(saved.device).wait_event(saved.made)
    back = saved.host.to(saved.device, non_blocking=True, copy=True)
    saved.fetched = weakref.ref(back)
    return back
