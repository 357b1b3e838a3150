"""Saved activations in host memory between their forward and their backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.compiling import OFF
from runner.contracts import Description, Fault, Lever, LiveObjects, Recipe
from runner.memory.nothing import pulled

if TYPE_CHECKING:
    import torch
    from torch import nn

    from runner.largest import Largest

KEY = "memory/offload"


@dataclass(frozen=True, kw_only=True)
class Activations(Lever):
    """Copies what the model's autograd saves to pinned host memory, and back for the backward pass.

    min_bytes: tensors smaller than this stay where they are, as parameters do; so does what the
    loss saves, since its backward pass comes at once. Copies to the host run beside the forward
    pass; copies back are waited for and count as backward time.
    """

    min_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if self.min_bytes < 0:
            raise ValueError(f"min_bytes: given {self.min_bytes}; allowed: 0 or more")

    def reduces(self) -> Sequence[LiveObjects]:
        """They wait in host memory."""
        return ("saved_activations", "scores")

    def leaves(self, found: Largest) -> float:
        """None of what the blocks save for the micro-batch, if it is large enough."""
        saved = found.kind in self.reduces() and found.of_a_block and found.of_a_micro_batch
        return 0.0 if saved and found.bytes >= self.min_bytes else 1.0

    def conflicts(self, job: Mapping[str, Any]) -> Sequence[Fault]:
        """Compiled code and checkpointing keep what they keep by other ways."""
        return tuple(self._faults(job))

    def _faults(self, job: Mapping[str, Any]) -> Iterator[Fault]:
        if job["compile"] != OFF:
            yield Fault(
                key=KEY,
                given=f"activations with compile={job['compile']}",
                allowed="activations in eager mode: a compiled graph decides itself what it saves",
                next_step=f"{KEY}=none, or compile=off",
            )
        if pulled(job, "checkpointing"):
            yield Fault(
                key=KEY,
                given="activations with memory/checkpointing",
                allowed="one of the two: checkpointing holds its blocks' inputs where autograd's "
                "hooks do not see them, so that they would stay on the device",
                next_step=f"{KEY}=none, or memory/checkpointing=none",
            )

    def refusal(self, description: Description, recipe: Recipe, device: torch.device) -> str | None:
        """There must be a device that the host's memory relieves."""
        if device.type == "cuda":
            return None
        return f"{KEY}=activations: on {device.type} activations are in host memory already"

    def in_host_memory(self, category: str, operation: str) -> bool:
        """The copies, which are made as empty tensors."""
        return category == "saved_activations" and operation == "empty"

    def apply(self, model: nn.Module) -> None:
        """Wraps the model's forward in place."""
        from runner.memory.hostcopies import HostCopies

        forward = model.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            kept = {p.untyped_storage()._cdata for p in model.parameters()}
            with HostCopies(kept=kept, min_bytes=self.min_bytes).hooks():
                return forward(*args, **kwargs)

        model.forward = run
