"""torch.compile of model and loss: in place, dynamic in its shapes, its time kept apart.

Ragged micro-batches differ in rows and length, so everything is compiled with dynamic shapes from
the start: one graph serves every shape but those with a dimension of 1, which torch specialises.
The held-out loss is always computed eagerly, so that it is the same arithmetic in every setup.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

from runner.contracts import LossLever

if TYPE_CHECKING:
    from torch import Tensor, nn

OFF = "off"
MODES = {"default": "default", "max-autotune": "max-autotune-no-cudagraphs"}
"""torch's modes by ours. CUDA graphs are left out: they record one graph per shape and reuse
their outputs' memory, which accumulation over ragged micro-batches cannot bear."""
LAZY_TRIGGERS = ("DYNAMO", "LAZY_BACKWARD")


@dataclass(frozen=True, kw_only=True)
class CompiledLoss:
    """A loss lever whose summed loss is compiled."""

    function: Callable[..., Tensor]

    def loss_sum(
        self, hidden: Tensor, head_weight: Tensor, targets: Tensor, weights: Tensor | None
    ) -> Tensor:
        """As the lever it was made from."""
        return self.function(hidden, head_weight, targets, weights)


def compiled(model: nn.Module, loss: LossLever, mode: str) -> LossLever:
    """Compile `model` in place (its parameters keep their names) and return the loss compiled."""
    import torch

    attention: Any = getattr(model, "attention", None)
    if hasattr(attention, "within"):
        # One call for each document: compiled, every combination of lengths were its own graph.
        attention.within = torch.compiler.disable(attention.within)  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {"mode": MODES[mode], "dynamic": True}
    model.compile(**options)
    return CompiledLoss(function=torch.compile(loss.loss_sum, **options))


def eagerly() -> AbstractContextManager[Any]:
    """Context in which compiled code runs eagerly.

    Where torch's compiler was never loaded nothing is compiled, and loading it to say so would
    cost more than a second.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    import torch

    context: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return context


@dataclass(kw_only=True, eq=False)
class Compilations:
    """Counts what torch compiles while it is entered.

    graphs: compilations so far; again: those of code that was compiled before, for other shapes
    or modes (recompilations); seconds: time spent compiling.
    """

    graphs: int = 0
    again: int = 0
    seconds: float = 0.0
    _begin: float = field(default=0.0, repr=False)

    def __enter__(self) -> Compilations:
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        from torch._dynamo.callback import callback_handler

        callback_handler.remove_start_callback(self._start)
        callback_handler.remove_end_callback(self._end)

    def _start(self, args: Any) -> None:
        self._begin = perf_counter()

    def _end(self, args: Any) -> None:
        self.seconds += perf_counter() - self._begin
        if args.callback_trigger.name not in LAZY_TRIGGERS:
            return
        self.graphs += 1
        # A compile id is FRAME/ATTEMPT: attempt 0 is the first compilation of that code.
        number = str(args.compile_id).rpartition("/")[2]
        self.again += number.isdigit() and int(number) > 0
