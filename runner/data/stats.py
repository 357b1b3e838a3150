"""Counts over examples, for baselines that a trained model must beat."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from runner.contracts import Example


def target_counts(examples: Iterable[Example]) -> dict[int, int]:
    """How often each token is a target (shift and mask applied), by token id."""
    targets = [example.ids[1:][example.loss[1:]] for example in examples]
    if not targets:
        return {}
    ids, counts = np.unique(np.concatenate(targets), return_counts=True)
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))
