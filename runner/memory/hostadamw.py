"""AdamW over host copies of the parameters; the device holds neither moments nor masters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class HostAdamW(torch.optim.Optimizer):
    """Copies gradients to the host, steps there in FP32, copies the new parameters back.

    It takes the gradients in `step`, that is after unscaling and clipping: an optimizer that
    takes them as they arrive in the backward pass would step on unclipped ones. The host copies
    are made at the first step after `state` was empty.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **settings: Any) -> None:
        super().__init__(groups, settings)
        self._inner: torch.optim.AdamW | None = None
        self._hosts: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        if self._inner is None or not self.state:
            self._inner = self._start()
        for own, there in zip(self.param_groups, self._inner.param_groups, strict=True):
            there["lr"] = float(own["lr"])
        for parameter, host in self._hosts.items():
            gradient = parameter.grad
            if gradient is None:
                host.grad = None
                continue
            if host.grad is None:
                host.grad = pinned_like(parameter)
            host.grad.copy_(gradient, non_blocking=True)
        self._wait()
        self._inner.step()
        for parameter, host in self._hosts.items():
            parameter.copy_(host, non_blocking=True)
            self.state[parameter] = self._inner.state[host]
        # No waiting for these copies: the next step writes the host copies only after its own
        # gradients arrived, which the same stream copies after them.

    def _start(self) -> torch.optim.AdamW:
        """Host copies of the parameters as they are now, and AdamW over them."""
        groups = []
        self._hosts = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                host = self._hosts[parameter] = pinned_like(parameter)
                host.copy_(parameter, non_blocking=True)
            hosts = [self._hosts[parameter] for parameter in group["params"]]
            groups.append({**group, "params": hosts})
        self._wait()
        return torch.optim.AdamW(groups, fused=True)

    def _wait(self) -> None:
        if any(parameter.is_cuda for parameter in self._hosts):
            torch.cuda.current_stream().synchronize()


def pinned_like(tensor: Tensor) -> Tensor:
    """An FP32 tensor of the same shape in host memory, pinned where the tensor is on CUDA."""
    return torch.empty(tensor.shape, dtype=torch.float32, pin_memory=tensor.is_cuda)
