"""Dynamic loss scaling on the device (specification equation 7.5).

The policy is that of torch's own `GradScaler`, which serves as the oracle in the tests. It is
kept apart here because one non-finite verdict, the gradient norm's, decides for every recipe
whether an update is applied, and because nothing may wait for the device inside an update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner.contracts import ScalePolicy


class LossScaler:
    """A positive scale that follows a policy; all state lives on the device.

    scale: scalar float32, multiplied into every loss of an update; fixed through the update.
    streak: scalar int32, applied updates since the scale last changed.
    """

    def __init__(self, policy: ScalePolicy, device: torch.device) -> None:
        self.policy = policy
        self.scale = torch.tensor(policy.init, dtype=torch.float32, device=device)
        self.streak = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, bad: Tensor) -> None:
        """After an update: back off if it was skipped (`bad` is 1), grow after a long streak."""
        skipped = bad.bool()
        streak = self.streak + 1
        ripe = streak >= self.policy.interval
        grown = self.scale * self.policy.growth
        # As torch's scaler does, a growth that would leave the range is not made.
        kept = torch.where(ripe & torch.isfinite(grown), grown, self.scale)
        self.scale.copy_(torch.where(skipped, self.scale * self.policy.backoff, kept))
        self.streak.copy_(torch.where(skipped | ripe, torch.zeros_like(streak), streak))

    def state_dict(self) -> dict[str, float]:
        """Scale and streak as numbers (waits for the device)."""
        return {"scale": float(self.scale), "streak": int(self.streak)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` gave."""
        self.scale.fill_(state["scale"])
        self.streak.fill_(int(state["streak"]))
