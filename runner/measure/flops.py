"""The two figures of work: model FLOPs from shapes, hardware FLOPs from what ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from runner.accounting import model_flops
from runner.contracts import Description

CONVENTION = (
    "2 FLOPs per multiply-add of matrix products and attention, nothing else; what ran, padding "
    "and recomputation included; fused attention counts the whole square of positions, masked or "
    "not, and 5 products in its backward pass (it computes the scores again)"
)
"""What `CountedFlops.total` counts. The square is an upper bound: kernels skip much of the masked
half, which the counter cannot see."""

PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "matmul", "mv", "addmv", "dot"}
    | {"linear", "attention", "convolution"}
)
"""Words in the names of operations that multiply matrices."""


@dataclass(frozen=True, kw_only=True)
class CountedFlops:
    """Hardware FLOPs of something that ran, by CONVENTION.

    by_operation: by the name of the operation; sums to `total`. uncounted: operations that
    multiply matrices and have no formula; while there are any, `total` is too low.
    """

    total: int
    by_operation: Mapping[str, int]
    uncounted: tuple[str, ...]


def update_flops(description: Description, lengths: Sequence[int]) -> int:
    """Model FLOPs of one update over documents of the given real lengths, see
    `runner.accounting.model_flops`."""
    return model_flops(
        matmul_params=description.matmul_params,
        layers=description.layers,
        heads=description.heads,
        head_width=description.head_width,
        lengths=lengths,
        frozen_params=description.frozen_matmul_params,
    )


def counted_flops(run: Callable[[], Any]) -> CountedFlops:
    """Run `run` and count the FLOPs of what it really did, on real or on fake tensors."""
    counter = FlopCounterMode(display=False, custom_mapping=more_formulas())
    unknown = Uncounted(counter.flop_registry)
    with unknown, counter:
        run()
    counts = counter.get_flop_counts().get("Global", {})
    by_operation = {str(operation): count for operation, count in counts.items()}
    return CountedFlops(
        total=sum(by_operation.values()),
        by_operation=by_operation,
        uncounted=tuple(sorted(unknown.names)),
    )


def more_formulas() -> dict[Any, Callable[..., int]]:
    """Formulas for what torch's own table leaves out: attention on a CPU, and products of narrow
    operands as torch and torchao dispatch them."""
    found = cpu_attention_formulas()
    for library, name in (("aten", "_int_mm"), ("aten", "_scaled_mm_v2"), ("torchao", NARROW)):
        packet = getattr(getattr(torch.ops, library), name, None)
        if packet is not None:
            found[packet] = product_flops
    return found


NARROW = "scaled_int8_mm"
"""torchao's product of INT8 operands; there once its module was imported."""


def product_flops(left: Any, right: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    """2 FLOPs a multiply-add of (m, k) times (k, n); k of packed 4-bit operands counts twice."""
    rows, inner = left.shape if hasattr(left, "shape") else left
    columns = (right.shape if hasattr(right, "shape") else right)[1]
    packed = getattr(left, "dtype", None) is torch.float4_e2m1fn_x2
    return int(2 * rows * inner * columns * (2 if packed else 1))


def cpu_attention_formulas() -> dict[Any, Callable[..., int]]:
    """Formulas for the CPU's flash attention, which torch's own table leaves out; the same as
    it has for the other fused kernels."""

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]

    def backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        flops = sdpa_backward_flop_count(grad, query, key, value)  # type: ignore[no-untyped-call]
        return int(flops)

    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }


def takes_over(kind: type) -> bool:
    """Whether a kind of tensor does its operations itself, by operations on others."""
    own: Any = getattr(kind, "__torch_dispatch__", None)
    return own not in (None, torch._C._disabled_torch_dispatch_impl) and kind is not FakeTensor


class Uncounted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations that multiply matrices and are not in a table of formulas."""

    def __init__(self, known: Mapping[Any, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self._known = known

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note the operation and run it; see `takes_over`."""
        if any(takes_over(kind) for kind in types):
            return NotImplemented
        packet = func.overloadpacket
        if packet not in self._known and PRODUCTS & set(packet.__name__.split("_")):
            self.names.add(str(packet))
        return func(*args, **(kwargs or {}))
