"""Weights that are stored in fewer bits than they are updated in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

COMPENSATION = "compensation"


@contextmanager
def widened(model: nn.Module, masters: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Inside, the model computes in FP32: on `masters` where there are some, else on what its
    stored values are. Afterwards every tensor is the one it was."""
    masters = masters or {}
    stored: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if tensor.is_floating_point():
                    stored.append((tensor, tensor.data))
                    tensor.data = masters[name].detach() if name in masters else tensor.float()
        yield
    finally:
        for tensor, data in stored:
            tensor.data = data


class StoredInBf16(torch.optim.Optimizer):
    """Lets another optimizer compute in FP32, and stores its results in BF16.

    inner: over BF16 parameters; its groups and state are this optimizer's. Each parameter is
    widened on its own, so that no FP32 copy of the model ever exists. stochastic: results are
    rounded at random (see `bf16_at_random`), parameters and state. kahan: what a parameter cannot
    hold stays in its state, as COMPENSATION. `found_inf` reaches the inner optimizer.
    """

    def __init__(self, inner: torch.optim.Optimizer, *, stochastic: bool, kahan: bool) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self._inner = inner
        self._stochastic = stochastic
        self._kahan = kahan

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update; parameters without a gradient stay as they are."""
        if hasattr(self, "found_inf"):
            self._inner.found_inf = self.found_inf  # type: ignore[attr-defined]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    def _step_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        wide = parameter.float()
        if COMPENSATION in state:
            wide += state[COMPENSATION]
        assert parameter.grad is not None
        wide.grad = parameter.grad.float()
        widened = {k: _widened(v, parameter) for k, v in state.items() if k != COMPENSATION}
        inner = self._inner
        inner.state = defaultdict(dict, {wide: widened} if widened else {})
        inner.param_groups = [{**group, "params": [wide]}]
        inner.step()
        for key, value in inner.state[wide].items():
            kept = isinstance(value, Tensor) and value.shape == parameter.shape
            state[key] = self._rounded(value) if kept else value
        parameter.copy_(self._rounded(wide))
        if self._kahan:
            state[COMPENSATION] = (wide - parameter.float()).to(torch.bfloat16)
        inner.state = defaultdict(dict)

    def _rounded(self, wide: Tensor) -> Tensor:
        return bf16_at_random(wide) if self._stochastic else wide.to(torch.bfloat16)


def _widened(value: Any, like: Tensor) -> Any:
    wide = isinstance(value, Tensor) and value.shape == like.shape and value.is_floating_point()
    return value.float() if wide else value


def bf16_at_random(wide: Tensor) -> Tensor:
    """FP32 rounded to one of its two BF16 neighbours, up with the probability that makes the mean
    exact; what BF16 holds stays as it is.

    BF16 is the upper half of FP32's bits: a random lower half is added, and cut off. Draws from
    the device's own random state, which a run saves and untimed updates put back.
    """
    lower = torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32, device=wide.device)
    upper = (wide.view(torch.int32) + lower) & -(1 << 16)
    return torch.where(wide.isfinite(), upper.view(torch.float32), wide).to(torch.bfloat16)


class Masters(nn.Module):
    """FP32 copies of a model's trainable parameters, and the model narrowed to `dtype`.

    by_name: the copies by the parameters' names. A gradient that reaches a parameter is added to
    its copy's gradient in FP32 and taken from the parameter. The model keeps the copies at hand
    as `fp32_masters`, for its evaluation.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.copies = nn.ParameterList(p.detach().float().clone() for p in trainable.values())
        self.by_name: dict[str, Tensor] = dict(zip(trainable, self.copies, strict=True))
        model.to(dtype)
        self._pairs = [(self.by_name[name], p) for name, p in trainable.items()]
        for master, parameter in self._pairs:
            register: Any = parameter.register_post_accumulate_grad_hook
            register(_hand_over(master))
        object.__setattr__(model, "fp32_masters", self.by_name)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Write the masters back after every step, compiled or not."""
        step = optimizer.step

        def stepped() -> None:
            step()
            self.write_back()

        optimizer.step = stepped  # type: ignore[method-assign, assignment]

    @torch.no_grad()
    def write_back(self) -> None:
        """Round every master into the model."""
        targets: list[Tensor] = [parameter for _, parameter in self._pairs]
        torch._foreach_copy_(targets, [master for master, _ in self._pairs])


def _hand_over(master: Tensor) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad += gradient

    return move
