"""The summed loss from the final hidden states; the logits are often the largest object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.compiling import OFF
from runner.contracts import IGNORE, Description, Fault, Lever, LiveObjects, Recipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from runner.largest import Largest

KEY = "memory/loss"


@dataclass(frozen=True, kw_only=True)
class Full(Lever):
    """All logits at once: (rows, length, vocab), cross-entropy in FP32."""

    def loss_sum(
        self, hidden: Tensor, head_weight: Tensor, targets: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Scalar float32 (float64 for float64 models), see LossLever."""
        from torch.nn.functional import cross_entropy, linear

        logits = linear(hidden, head_weight).flatten(0, 1)
        if logits.element_size() < 4:
            logits = logits.float()
        flat = targets.flatten()
        if weights is None:
            return cross_entropy(logits, flat, ignore_index=IGNORE, reduction="sum")
        losses = cross_entropy(logits, flat, ignore_index=IGNORE, reduction="none")
        return (losses * weights.flatten()).sum()


@dataclass(frozen=True, kw_only=True)
class Chunked(Lever):
    """The full loss of a few tokens at a time; no more logits than theirs are ever live.

    tokens: slots of a chunk. The backward pass computes each chunk's logits again: one more
    product with the head, and nothing kept but the hidden states. It forms the gradients there,
    and not in the forward pass, so that the loss scale of an FP16 recipe is in them from the start.
    """

    tokens: int = 1024

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens: given {self.tokens}; allowed: a whole number from 1 up")

    def reduces(self) -> Sequence[LiveObjects]:
        """Logits of a chunk are live, not of all tokens."""
        return ("logits",)

    def leaves(self, found: Largest) -> float:
        """A chunk's, of all positions that the head is applied at."""
        if found.kind not in self.reduces() or not found.of_logits:
            return 1.0
        return min(self.tokens, found.slots) / found.slots

    def conflicts(self, job: Mapping[str, Any]) -> Sequence[Fault]:
        """The number of chunks follows the micro-batch: each would be a graph of its own."""
        return eager_only("chunked", job)

    def loss_sum(
        self, hidden: Tensor, head_weight: Tensor, targets: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Scalar float32 (float64 for float64 models), see LossLever."""
        from runner.memory.chunks import chunked_sum

        loss: Tensor = chunked_sum(
            Full().loss_sum, self.tokens, hidden, head_weight, targets, weights
        )
        return loss


@dataclass(frozen=True, kw_only=True)
class Fused(Lever):
    """torch's `linear_cross_entropy`, which takes the head product and the loss in one operation.

    Its form that computes the gradients in the backward pass is used: it takes a weight for each
    target and has the loss scale in its gradients. Under BF16 autocast it rounds each target's
    loss to BF16 before they are summed, so that the logged training loss carries an error of
    about 1e-4; gradients and the held-out loss, which is computed in FP32, do not.
    """

    def reduces(self) -> Sequence[LiveObjects]:
        """Logits of a part of the tokens are live at a time."""
        return ("logits",)

    def leaves(self, found: Largest) -> float:
        """A chunk's. torch makes chunks whose logits have as many elements as all hidden states,
        rounded up to a power of two tokens (on CUDA half of that)."""
        if found.kind not in self.reduces() or not found.of_logits:
            return 1.0
        even = -(-found.slots // -(-found.vocab // found.width))
        return min(1 << (even - 1).bit_length(), found.slots) / found.slots

    def conflicts(self, job: Mapping[str, Any]) -> Sequence[Fault]:
        """torch runs it eagerly inside compiled code."""
        return eager_only("fused", job)

    def refusal(self, description: Description, recipe: Recipe, device: torch.device) -> str | None:
        """This torch must have it."""
        import torch

        if hasattr(torch.nn, "LinearCrossEntropyOptions"):
            return None
        return f"{KEY}=fused: torch {torch.__version__} has no linear_cross_entropy in chunks"

    def loss_sum(
        self, hidden: Tensor, head_weight: Tensor, targets: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Scalar float32 (float64 for float64 models), see LossLever."""
        import torch
        from torch.nn.functional import linear_cross_entropy

        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):
            # The operation is unknown to autocast, which would leave it in FP32.
            dtype = torch.get_autocast_dtype(kind)
            hidden, head_weight = hidden.to(dtype), head_weight.to(dtype)
        losses = linear_cross_entropy(
            hidden.flatten(0, 1),
            head_weight,
            targets.flatten(),
            ignore_index=IGNORE,
            reduction="none",
            # `balanced` adds up the head's gradient in FP32 whatever the input's format is
            options=torch.nn.LinearCrossEntropyOptions(acc_policy="balanced"),
        )
        if losses.element_size() < 4:
            losses = losses.float()
        return losses.sum() if weights is None else (losses * weights.flatten()).sum()


def eager_only(option: str, job: Mapping[str, Any]) -> Sequence[Fault]:
    """A fault when the job compiles its loss."""
    if job["compile"] == OFF:
        return ()
    fault = Fault(
        key=KEY,
        given=f"{option} with compile={job['compile']}",
        allowed=f"{option} in eager mode: a compiled loss would not be this one",
        next_step=f"{KEY}=full, or compile=off",
    )
    return (fault,)
