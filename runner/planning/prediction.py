"""What an update of a job would need, from at most two micro-batches and two shallow models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import lcm
from typing import Any

from runner.checks import Parts
from runner.contracts import MicroBatch
from runner.planning.extrapolated import Foreseen, depths, foreseen
from runner.planning.target import Target
from runner.planning.traced import Trace, trace

WORKSPACE = "temporaries"
"""Category that the workspace of the target's libraries is counted in."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The memory account of an update before it ran, and its work.

    account: see `MemoryAccount`. target: name of the device. flops: hardware FLOPs of the update
    (`runner.measure.flops.CONVENTION`), what ran again in them. layers: numbers of blocks of the
    models that were traced. workspace: bytes of libraries among the temporaries.
    """

    account: Foreseen
    target: str
    flops: int
    layers: tuple[int, ...]
    workspace: int = 0

    @property
    def peak_bytes(self) -> int:
        """Most bytes live at once."""
        return self.account.peak_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        account = {
            entry.name: getattr(self.account, entry.name)
            for entry in fields(self.account)
            if entry.name != "largest"
        }
        largest = [
            asdict(found.item) | {"count": found.count, "text": str(found)}
            for found in self.account.largest
        ]
        return account | {
            "largest": largest,
            "largest_live_object": largest[0]["text"] if largest else "nothing",
            "target": self.target,
            "flops": self.flops,
            "traced_layers": list(self.layers),
            "workspace_bytes": self.workspace,
        }


def predict(
    config: Mapping[str, Any],
    parts: Parts,
    micros: Sequence[MicroBatch],
    *,
    target: Target,
    held: bool = False,
    times: int | None = None,
    whole: bool = False,
) -> Prediction:
    """The account of an update over `micros`, at most two of which are traced: the second finds
    gradients there already, and further ones find what it found.

    held: whether gradients are there from the start, as a micro-batch before leaves them. times:
    micro-batches of the update, whose work is counted; None for as many as there are in `micros`.
    `whole` traces the model as it is, however deep. Raises what a part raises that cannot be
    traced on fake tensors.
    """
    traced = micros[:2]
    own = parts.model.describe().layers
    period = lcm(1, *(lever.period() for lever in parts.levers.values()))
    chosen = None if whole or not hasattr(parts.model, "layers") else depths(own, period)

    def run(layers: int | None) -> Trace:
        return trace(config, parts, traced, target=target, layers=layers, held=held)

    if chosen is None:
        one = run(None)
        account = foreseen(None, one.log, layers=(own, own, own), period=own)
        flops = float(one.flops)
    else:
        low, high = (run(layers) for layers in chosen)
        account = foreseen(low.log, high.log, layers=(*chosen, own), period=period)
        steps = (own - high.layers) / (high.layers - low.layers)
        flops = high.flops + (high.flops - low.flops) * steps
    return Prediction(
        account=with_workspace(account, target.workspace),
        target=target.name,
        flops=round(flops * (times or len(micros)) / len(traced)),
        layers=chosen or (own,),
        workspace=target.workspace,
    )


def with_workspace(account: Foreseen, workspace: int) -> Foreseen:
    """The account with a workspace that is there from the first matrix product on."""
    if not workspace:
        return account

    def added(by_name: Mapping[str, int]) -> dict[str, int]:
        return {**by_name, WORKSPACE: by_name[WORKSPACE] + workspace}

    return Foreseen(
        peak_bytes=account.peak_bytes + workspace,
        peak_phase=account.peak_phase,
        start_bytes=account.start_bytes + workspace,
        at_peak=added(account.at_peak),
        largest_by_category=added(account.largest_by_category),
        peak_by_phase={phase: held + workspace for phase, held in account.peak_by_phase.items()},
        largest=account.largest,
    )
