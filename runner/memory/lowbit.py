"""torchao's AdamW with moments of few bits. Imported only when such an optimizer is built."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from runner.memory.installed import loading_torchao
from runner.optimizer import AdamW, parameter_groups

with loading_torchao():
    from torchao.optim import AdamW4bit, AdamW8bit, subclass_4bit, subclass_8bit
    from torchao.optim.adam import _AdamBase


class AdamWBf16(_AdamBase):  # type: ignore[misc]
    """torchao's AdamW with plain BF16 moments."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(
            params,
            amsgrad=False,
            block_size=1,
            bf16_stochastic_round=False,
            is_adamw=True,
            **settings,
        )

    @staticmethod
    def _subclass_zeros(p: Tensor, signed: bool, block_size: int) -> Tensor:
        return torch.zeros_like(p, dtype=torch.bfloat16)


CLASSES: dict[int, Callable[..., torch.optim.Optimizer]] = {
    16: AdamWBf16,
    8: AdamW8bit,
    4: AdamW4bit,
}


def low_bit_adamw(part: AdamW, model: nn.Module, bits: int) -> torch.optim.Optimizer:
    """AdamW over `model`'s trainable parameters, its moments in `bits` bits.

    torchao compiles the update of each tensor; unless the part asks for that it runs eagerly,
    which needs no C++ compiler.
    """
    make_tables()
    optimizer = CLASSES[bits](
        parameter_groups(model, part.weight_decay),
        lr=part.lr,
        betas=part.betas,
        eps=part.eps,
        weight_decay=part.weight_decay,
    )
    if part.implementation != "compiled":
        optimizer.step = eager(optimizer.step)  # type: ignore[assignment]
    return optimizer


def make_tables() -> None:
    """Have torchao make the values that its codes stand for, which it keeps for good, of real
    numbers: made while a job is predicted on fake tensors they would be wrong for the job itself.
    """
    with unset_fake_temporarily():
        for library in (subclass_4bit, subclass_8bit):
            library.get_qmap_signed()
            library.get_qmap_unsigned()


def eager(step: Callable[[], Any]) -> Callable[[], Any]:
    """`step` with everything that it compiles run eagerly."""

    @wraps(step)
    def run() -> Any:
        with torch.compiler.set_stance("force_eager"):
            return step()

    return run
