"""Where the head is applied: at every position, or only where something is predicted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from runner.contracts import IGNORE, MicroBatch

HEADS = ("all", "targets")


@dataclass(frozen=True, kw_only=True)
class HeadChoice:
    """What every shipped batching lets choose.

    head: `all` computes logits for every position, padding and prompts included; `targets` only
    where the next token is predicted. The loss is the same sum over the same targets.
    """

    head: str = "all"

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise ValueError(f"head: given {self.head}; allowed: {', '.join(HEADS)}")

    @property
    def head_on_targets(self) -> bool:
        """Whether the head is applied at targets only."""
        return self.head == "targets"

    def choose(self, micro: MicroBatch) -> MicroBatch:
        """The micro-batch with the places of its targets, where the head is for them only."""
        if not self.head_on_targets:
            return micro
        places = (micro.targets.flatten() != IGNORE).nonzero()[:, 0]
        return replace(micro, places=places)
