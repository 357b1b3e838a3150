"""Held-out loss: fp32, token-weighted, in evaluation mode, leaving training as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from runner.compiling import eagerly
from runner.contracts import LossLever, MicroBatch, Recipe
from runner.records import EvaluationRecord
from runner.step import at_places, to_device


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode; each one's own mode is restored, whatever it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """The held-out micro-batches and how their loss is computed."""

    micros: Sequence[MicroBatch]
    loss: LossLever
    recipe: Recipe
    device: torch.device

    @property
    def tokens(self) -> int:
        """Targets that the loss is over."""
        return sum(micro.counts.useful for micro in self.micros)

    def run(self, model: nn.Module, update: int) -> EvaluationRecord:
        """Held-out loss after `update` applied updates: sum of losses over sum of targets.

        No autocast, no dropout, no random draw: the loss is the same for any evaluation batch
        size up to float rounding, and training goes on as if nothing had happened.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        plain = torch.autocast(self.device.type, enabled=False)
        exact = self.recipe.evaluation(model)
        with evaluation_mode(model), torch.no_grad(), plain, eagerly(), exact:
            for micro in self.micros:
                moved = to_device(micro, self.device)
                hidden = model.hidden(  # type: ignore[operator]
                    moved.input_ids, moved.positions, moved.segments
                )
                head: Tensor = model.head_weight  # type: ignore[assignment]
                hidden, targets, _ = at_places(hidden, moved)
                total += self.loss.loss_sum(hidden, head, targets, None)
        return EvaluationRecord(
            update=update, eval_loss=float(total) / self.tokens, eval_tokens=self.tokens
        )
