"""What is known of a run while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from runner.assemble import Job
from runner.compiling import Compilations
from runner.contracts import MicroBatch
from runner.loop import Loop
from runner.measure.account import MemoryAccount
from runner.measure.gradients import GradientProbe
from runner.measure.probe import Trained
from runner.planning.prediction import Prediction, predict
from runner.planning.target import target_of
from runner.records import dumps, write_atomically
from runner.states import STATE
from runner.timeline import Timeline


@dataclass(kw_only=True, eq=False)
class Run:
    """What is known of a run while it runs; becomes its record however it ends.

    in_use: memory of the CUDA device before the job and after its last update, see
    `runner.environment.memory_in_use`. emulated: why the recipe is emulated; None where it is
    native, or not known yet.
    """

    folder: Path
    ticket: Mapping[str, Any]
    workload_id: str | None = None
    device: torch.device | None = None
    controls: Mapping[str, str | bool] = field(default_factory=dict)
    job: Job | None = None
    account: MemoryAccount | None = None
    trained: Trained | None = None
    gradients: GradientProbe | None = None
    prediction: Prediction | str | None = None
    loop: Loop | None = None
    timeline: Timeline | None = None
    others: set[int] = field(default_factory=set)
    in_use: dict[str, Any] = field(default_factory=dict)
    emulated: str | None = None
    compilations: Compilations = field(default_factory=Compilations)
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved config."""
        config: Mapping[str, Any] = self.ticket["config"]
        return config

    def settle(self, accum: int) -> None:
        """Put a number where the config left the accumulation open."""
        self.ticket = {**self.ticket, "config": {**self.config, "accum": accum}}

    def foretell(self, probes: Sequence[Sequence[MicroBatch]]) -> None:
        """Predict the account of the probes' updates, or note why that could not be done."""
        assert self.job is not None and self.device is not None
        parts = self.job.parts
        target = target_of(self.device)
        try:
            self.prediction = max(
                (predict(self.config, parts, micros, target=target) for micros in probes),
                key=lambda found: found.peak_bytes,
            )
        except Exception as error:
            self.prediction = f"{type(error).__name__}: {error}"

    def say(self, state: str, **more: Any) -> None:
        """Publish `state.json` for the launching process."""
        write_atomically(self.folder / STATE, dumps({"state": state, **more}))
