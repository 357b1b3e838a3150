"""Which formats and operators really did the arithmetic of an update, seen at dispatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from runner.measure.flops import more_formulas, takes_over
from runner.precision.conversion import operands_key
from runner.precision.labels import format_of

OPERANDS = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Operand dtype that a declared compute format stands for, where torch has one."""
LEAST_SHARE = 0.95
"""Share of the FLOPs of matrix products that must be in the declared format."""
MATH = "math"
"""Attention that was dispatched as separate products and a softmax."""


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """What one update dispatched.

    flops: hardware FLOPs of matrix products and attention by operand formats, for example
    `bfloat16 x bfloat16`; an emulated operand counts as the format that it is rounded to.
    attention: calls of fused attention kernels by operator name.
    recomputed: FLOPs among them that a backward pass spent on computing a forward pass again.
    """

    flops: Mapping[str, int]
    attention: Mapping[str, int]
    recomputed: int = 0

    @property
    def total(self) -> int:
        """Hardware FLOPs of the update, see `runner.measure.flops.CONVENTION`."""
        return sum(self.flops.values())

    @property
    def attention_operators(self) -> tuple[str, ...]:
        """Names of the forward kernels; MATH where no fused kernel ran."""
        return tuple(sorted(n for n in self.attention if "backward" not in n)) or (MATH,)

    def share(self, dtype: str) -> float:
        """Share of the FLOPs whose operands are all of `dtype`."""
        wanted = {key for key in self.flops if set(key.split(" x ")) == {dtype}}
        return sum(self.flops[key] for key in wanted) / self.total if self.total else 0.0

    def contradiction(self, compute: str) -> str | None:
        """Why this does not show the declared compute format, or None.

        Formats that torch has no operand dtype for are proved elsewhere.
        """
        dtype = OPERANDS.get(compute)
        if dtype is None or self.share(dtype) >= LEAST_SHARE:
            return None
        seen = ", ".join(f"{key} {n / self.total:.0%}" for key, n in sorted(self.flops.items()))
        return f"compute is declared {compute}, but the matrix products ran as {seen or 'nothing'}"

    def shares_of(self, expected: Mapping[str, int]) -> dict[str, float]:
        """By operand formats, the FLOPs that ran over those that the converted layers' shapes
        call for. Above 1 where other layers multiply in the same formats, or some ran again."""
        return {key: self.flops.get(key, 0) / flops for key, flops in expected.items()}

    def conversion_contradiction(self, expected: Mapping[str, int]) -> str | None:
        """Why this does not show the products of the converted layers, or None."""
        shares = self.shares_of(expected)
        missing = [f"{key} {share:.0%}" for key, share in shares.items() if share < LEAST_SHARE]
        if not missing:
            return None
        seen = ", ".join(f"{key} {n / self.total:.0%}" for key, n in sorted(self.flops.items()))
        return (
            f"of the products that the recipe's layers declare ran only {', '.join(missing)}; "
            f"all that ran: {seen or 'nothing'}"
        )


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs by operand dtypes, and attention kernels, of what runs inside.

    Told of the phases, it also counts what is computed again: in a backward pass, only
    recomputation runs with gradients on.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        counter = FlopCounterMode(display=False, custom_mapping=more_formulas())
        self._formulas = counter.flop_registry
        self._flops: Counter[str] = Counter()
        self._attention: Counter[str] = Counter()
        self._recomputed = 0
        self._backward = False

    def enter(self, phase: str) -> None:
        """From now on the update is in `phase`."""
        self._backward = phase == "backward"

    def result(self) -> Dispatched:
        """What was seen so far."""
        return Dispatched(
            flops=dict(self._flops),
            attention=dict(self._attention),
            recomputed=self._recomputed,
        )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and note it.

        An operation on a library's own kind of tensor is left to that library, whose operations on
        plain tensors come here in turn: a FP8 product says of itself that it is one of BF16.
        """
        if any(takes_over(kind) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        formula = self._formulas.get(packet)
        if formula is not None:
            fused = "attention" in packet.__name__
            operands = list(operand_dtypes(args, 3 if fused else None))
            flops = formula(*args, **(kwargs or {}), out_val=out)
            self._flops[operands_key(*operands)] += flops
            if self._backward and torch.is_grad_enabled():
                self._recomputed += flops
            if fused:
                self._attention[packet.__name__] += 1
        return out


def operand_dtypes(args: Sequence[Any], first: int | None) -> Iterator[str]:
    """Formats of the operands that are multiplied, tensors of two or more dimensions: what they
    are rounded to where they say so, else their dtype.

    A bias is added, not multiplied; of a fused kernel only the `first` arguments are operands.
    """
    for value in args[:first]:
        numbers = isinstance(value, Tensor) and value.ndim >= 2
        if numbers and (value.is_floating_point() or value.dtype == torch.int8):
            yield format_of(value)
