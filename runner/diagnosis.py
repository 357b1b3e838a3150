"""Where to look next, from figures alone (specification table 7.1). Pure: no torch, no files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

INPUT_SHARE = 0.10
OPTIMIZER_SHARE = 0.25
OTHER_SHARE = 0.03
PADDING_SHARE = 0.25
SPREAD = 0.10


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One symptom: the stage it belongs to, its figure in words, and the next thing to do."""

    stage: str
    evidence: str
    advice: str


def findings(
    *, shares: Mapping[str, float], padding: float | None, skipped: int, spread: float | None
) -> list[Finding]:
    """The symptoms that the figures show, in execution order; none where there is none.

    shares: exposed share of each phase in the unmarked updates. padding: share of slots that
    hold no token. skipped: updates not applied. spread: interquartile range of step time over
    its median.
    """
    found: list[Finding] = []

    def note(present: bool, stage: str, evidence: str, advice: str) -> None:
        if present:
            found.append(Finding(stage=stage, evidence=evidence, advice=advice))

    data, transfer = shares.get("data", 0.0), shares.get("transfer", 0.0)
    note(
        data > INPUT_SHARE,
        "batch preparation",
        f"data is {data:.0%} of the step",
        "profile the data path: reading, tokenizing, collating",
    )
    note(
        transfer > INPUT_SHARE,
        "transfer",
        f"transfer is {transfer:.0%} of the step",
        "look at copy events and pinned memory on a timeline",
    )
    note(
        padding is not None and padding > PADDING_SHARE,
        "forward and backward",
        f"{padding or 0:.0%} of the slots are padding",
        "compare useful with slot tokens/s; try a smaller micro-batch (accum) or lengths sorted",
    )
    optimizer = shares.get("optimizer", 0.0)
    note(
        optimizer > OPTIMIZER_SHARE,
        "update",
        f"optimizer is {optimizer:.0%} of the step",
        "check optimizer.implementation=fused, or a larger batch per update",
    )
    other = shares.get("other", 0.0)
    note(
        other > OTHER_SHARE,
        "update",
        f"other is {other:.1%} of the step",
        "find what runs between updates on a profile",
    )
    note(skipped > 0, "update", f"{skipped} updates skipped", "look at optim/loss_scale")
    note(
        spread is not None and spread > SPREAD,
        "measurement",
        f"step times spread by {spread or 0:.0%} (interquartile range over median)",
        "quiet the machine, or repeat before comparing",
    )
    return found
