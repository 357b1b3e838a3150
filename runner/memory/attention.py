"""Which attention kernel runs (specification table 7.3, attention backend policy)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.contracts import Description, Lever, LiveObjects, Recipe, Seen

if TYPE_CHECKING:
    import torch

    from runner.largest import Largest

BACKENDS = {
    "math": "MATH",
    "efficient": "EFFICIENT_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
AUTO = "auto"
TRIAL_LENGTH = 64


@dataclass(frozen=True, kw_only=True)
class Attention(Lever):
    """One of torch's kernels for scaled dot-product attention.

    backend: `auto` leaves the choice to torch; `math` keeps the square of scores, `flash`,
    `efficient` and `cudnn` do not. A kernel that would not run for this model, format and device
    is refused, never replaced.
    """

    backend: str = AUTO

    def __post_init__(self) -> None:
        if self.backend not in (AUTO, *BACKENDS):
            allowed = ", ".join((AUTO, *BACKENDS))
            raise ValueError(f"backend: given {self.backend}; allowed: {allowed}")

    def reduces(self) -> Sequence[LiveObjects]:
        """Only the kernel of separate products keeps scores; `auto` may take it."""
        return () if self.backend in (AUTO, "math") else ("scores",)

    def leaves(self, found: Largest) -> float:
        """None of the scores; a mask of the same shape stays."""
        return 0.0 if found.kind in self.reduces() and found.dtype != "bool" else 1.0

    def forward(self) -> AbstractContextManager[Any] | None:
        """Only the chosen kernel may run inside."""
        if self.backend == AUTO:
            return None
        from torch.nn.attention import SDPBackend, sdpa_kernel

        context: AbstractContextManager[Any] = sdpa_kernel(
            getattr(SDPBackend, BACKENDS[self.backend])
        )
        return context

    def backward(self) -> AbstractContextManager[Any] | None:
        """The same: what is computed again in a backward pass must be what the forward pass was."""
        return self.forward()

    def refusal(self, description: Description, recipe: Recipe, device: torch.device) -> str | None:
        """Tries the kernel forward and backward, in the recipe's format, on a small tensor."""
        chosen = self.forward()
        if chosen is None:
            return None
        try:
            with chosen, recipe.compute(device):
                seen = attend_once(description, device)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            return f"memory/attention={self.backend}: {reason}"
        return self.contradiction(seen)

    def contradiction(self, seen: Seen) -> str | None:
        """Every attention operator that ran must be of the chosen kind."""
        wrong = [name for name in seen.attention_operators if self.backend not in name]
        if self.backend == AUTO or not wrong:
            return None
        return f"memory/attention={self.backend}: the attention that ran is {', '.join(wrong)}"


def attend_once(description: Description, device: torch.device) -> Seen:
    """Attention of one model layer, forward and backward; what was dispatched.

    The product before it makes queries in the format that the surrounding recipe computes in.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from runner.measure.evidence import Watch

    width = description.head_width
    x = torch.ones(1, description.heads, TRIAL_LENGTH, width, device=device, requires_grad=True)
    square = torch.eye(width, device=device)
    with Watch() as watch:
        q = x @ square
        scaled_dot_product_attention(q, q, q, is_causal=True).float().sum().backward()  # type: ignore[no-untyped-call]
    seen: Seen = watch.result()
    return seen
