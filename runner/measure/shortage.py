"""When memory does not suffice: how much would have been needed, and for what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from runner.contracts import IGNORE, Counts, MicroBatch
from runner.measure.live import MemoryAccount
from runner.measure.probe import probe
from runner.step import Training

SHARES = (2, 4, 8, 16, 32, 64)
"""Parts into which the rows of a micro-batch are cut until one fits."""
BY_ROWS = ("saved_activations", "inputs", "temporaries")
"""Categories that grow with the rows of a micro-batch."""


class MemoryLimit(MemoryError):
    """The account's peak is over the limit that the job was given."""


def account_of_a_part(
    training: Training, probes: Sequence[Sequence[MicroBatch]]
) -> MemoryAccount | None:
    """The account of micro-batches that were too large, scaled from the largest part that fits.

    Only the rows are fewer, so what grows with them is multiplied by the rows that are missing;
    temporaries of the update itself, which do not, are multiplied too: the peak is an upper bound
    where it lies in `optimizer`. None where not even a row fits.
    """
    for share in SHARES:
        parts = [[cut(micro, share) for micro in micros] for micros in probes]
        if not any(len(m.input_ids) < len(w.input_ids) for m, w in pairs(parts, probes)):
            return None
        try:
            account, _ = probe(training, parts)
        except torch.OutOfMemoryError:
            continue
        rows = max(len(micro.input_ids) for micro, _ in pairs(parts, probes))
        whole = max(len(micro.input_ids) for _, micro in pairs(parts, probes))
        return None if account is None else scaled(account, whole / rows)
    return None


def pairs(
    parts: Sequence[Sequence[MicroBatch]], wholes: Sequence[Sequence[MicroBatch]]
) -> list[tuple[MicroBatch, MicroBatch]]:
    """Each cut micro-batch with the one it was cut from."""
    return [
        pair
        for cuts, micros in zip(parts, wholes, strict=True)
        for pair in zip(cuts, micros, strict=True)
    ]


def cut(micro: MicroBatch, share: int) -> MicroBatch:
    """The first rows of a micro-batch: one in `share` of them, at least one."""
    rows = max(1, len(micro.input_ids) // share)
    names = ("positions", "segments", "weights", "sequence")
    others: dict[str, Any] = {
        name: None if (found := getattr(micro, name)) is None else found[:rows] for name in names
    }
    targets = micro.targets[:rows]
    lengths = micro.lengths[:rows]
    counts = Counts(
        useful=int((targets != IGNORE).sum()), nonpad=sum(lengths), slots=targets.numel()
    )
    return replace(
        micro,
        input_ids=micro.input_ids[:rows],
        targets=targets,
        lengths=lengths,
        counts=counts,
        **others,
    )


def scaled(account: MemoryAccount, factor: float) -> MemoryAccount:
    """The account with everything that grows with the rows multiplied by `factor`."""
    at_peak = {
        name: round(held * factor) if name in BY_ROWS else held
        for name, held in account.at_peak.items()
    }
    largest = [
        replace(item, bytes=round(item.bytes * factor)) if item.category in BY_ROWS else item
        for item in account.largest
    ]
    return replace(
        account,
        peak_bytes=sum(at_peak.values()),
        at_peak=at_peak,
        largest=tuple(sorted(largest, key=lambda item: -item.bytes)),
        scaled=factor,
    )
