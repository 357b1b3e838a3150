"""Activation checkpointing: saves fewer activations, computes them again in the backward pass
(specification table 7.2).

Regions are whole blocks, through torch's non-reentrant `checkpoint`: it takes a frozen input, puts
back the random state, so that dropout masks are drawn again as they were, and the autocast state
of the forward pass. Nothing is recomputed where no gradient is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from runner.compiling import OFF
from runner.contracts import Fault, Lever, LiveObjects, Seen

if TYPE_CHECKING:
    from torch import nn

    from runner.largest import Largest

KEY = "memory/checkpointing"

SAVED = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"),
    "attention": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_flash_attention_forward",
        "_efficient_attention_forward",
        "_cudnn_attention_forward",
    ),
}
"""torch's operators by the words that a configuration names them with. `math` attention is two
matrix products and a softmax: with `matmul` its scores are kept."""


@dataclass(frozen=True, kw_only=True)
class Blocks(Lever):
    """Recomputes whole blocks: of each only its input is kept.

    every: 1 recomputes each block, 2 every second one, and so on, the first of them first. One
    block's activations are live at a time while it is recomputed.
    """

    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every: given {self.every}; allowed: a whole number from 1 up")

    def reduces(self) -> Sequence[LiveObjects]:
        """What the recomputed blocks would have kept."""
        return ("saved_activations", "scores")

    def leaves(self, found: Largest) -> float:
        """Of what the parts of a block make, the blocks that keep it, and one more where the last
        is recomputed: its backward pass is the first, when all the others are there. What a
        block makes itself may be the next one's input, which is kept."""
        if found.kind not in self.reduces() or not found.of_a_block or found.ends_a_block:
            return 1.0
        recomputed = -(-found.layers // self.every)
        last = (found.layers - 1) % self.every == 0
        return (found.layers - recomputed + last) / found.layers

    def period(self) -> int:
        """One block in `every` is recomputed."""
        return self.every

    def apply(self, model: nn.Module) -> None:
        """Wraps the chosen blocks' forward in place; names and parameters stay."""
        for block in list(model.blocks)[:: self.every]:  # type: ignore[arg-type]
            recompute(block)

    def contradiction(self, seen: Seen) -> str | None:
        """Something must have been computed again."""
        return nothing_recomputed(seen)


@dataclass(frozen=True, kw_only=True)
class Selective(Lever):
    """Recomputes everything in every block but the outputs of chosen operators.

    save: what is kept, of `matmul` (outputs of matrix products) and `attention` (outputs of fused
    attention kernels). What lies between them, normalisations and activation functions above
    all, is cheap to compute and large to keep.
    """

    save: tuple[str, ...] = ("matmul", "attention")

    def __post_init__(self) -> None:
        if not self.save or not set(self.save) <= set(SAVED):
            raise ValueError(f"save: given {list(self.save)}; allowed: some of {', '.join(SAVED)}")

    def reduces(self) -> Sequence[LiveObjects]:
        """What lies between the operators whose outputs are kept."""
        return ("saved_activations",)

    def leaves(self, found: Largest) -> float:
        """One block's, of what the parts of all blocks make with other operators."""
        kept = {name.strip("_") for word in self.save for name in SAVED[word]}
        inside = found.of_a_block and not found.ends_a_block
        if found.kind not in self.reduces() or not inside or found.name in kept:
            return 1.0
        return 1 / found.layers

    def conflicts(self, job: Mapping[str, Any]) -> Sequence[Fault]:
        """Compiled code consists of other operators than the ones named here."""
        if job["compile"] == OFF:
            return ()
        fault = Fault(
            key=KEY,
            given=f"selective with compile={job['compile']}",
            allowed="selective in eager mode: compiled code fuses the operators it would choose",
            next_step=f"{KEY}=budget, by which the compiler chooses, or compile=off",
        )
        return (fault,)

    def apply(self, model: nn.Module) -> None:
        """Wraps every block's forward in place."""
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        operators = kept_operators(self.save)
        for block in model.blocks:  # type: ignore[union-attr]
            recompute(block, context_fn=partial(create_selective_checkpoint_contexts, operators))


@dataclass(frozen=True, kw_only=True)
class Budget(Lever):
    """Lets the compiler recompute until a share of the activations is left.

    share: of the memory that a compiled model would keep for its backward pass, from 0 (recompute
    the most) to 1 (as without this lever). The compiler weighs bytes against time.
    """

    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share: given {self.share}; allowed: a number from 0 to 1")

    def reduces(self) -> Sequence[LiveObjects]:
        """What the compiler finds cheap to compute again."""
        return ("saved_activations", "scores")

    def leaves(self, found: Largest) -> float:
        """The share that the compiler is told."""
        return self.share if found.kind in self.reduces() else 1.0

    def conflicts(self, job: Mapping[str, Any]) -> Sequence[Fault]:
        """Only the compiler has a budget."""
        if job["compile"] != OFF:
            return ()
        fault = Fault(
            key=KEY,
            given="budget with compile=off",
            allowed="budget with compile on: it is a budget of the compiler's partitioner",
            next_step=f"compile=default, or {KEY}=selective",
        )
        return (fault,)

    def forward(self) -> AbstractContextManager[Any]:
        """Holds while torch compiles, which it does on the way through a forward pass."""
        from torch._functorch import config

        context: AbstractContextManager[Any] = config.patch(activation_memory_budget=self.share)
        return context


def recompute(block: nn.Module, **settings: Any) -> None:
    """Make `block` keep only its inputs for the backward pass, and what the context functions
    among torch's `settings` of a checkpoint save."""
    from torch import is_grad_enabled
    from torch.utils.checkpoint import checkpoint

    forward = block.forward
    again = partial(checkpoint, forward, use_reentrant=False, **settings)

    def run(*args: Any, **kwargs: Any) -> Any:
        return (again if is_grad_enabled() else forward)(*args, **kwargs)

    block.forward = run


def kept_operators(words: Sequence[str]) -> list[Any]:
    """torch's operators for the words, as far as this torch has them."""
    import torch

    names = [name for word in words for name in SAVED[word]]
    aten = torch.ops.aten
    return [getattr(aten, name).default for name in names if hasattr(aten, name)]


def nothing_recomputed(seen: Seen) -> str | None:
    """Why an update that was to recompute products did not, or None."""
    if seen.recomputed:
        return None
    return f"{KEY}: the update computed no matrix product again"
