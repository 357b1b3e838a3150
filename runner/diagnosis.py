"""The step judged stage by stage, in execution order (specification table 7.1 and section 7.3).

Every stage states its figure; a symptom adds the evidence and the next thing to measure or the
lever to try. No symptom, no advice. Pure: figures come in, words go out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

INPUT_SHARE = 0.10
"""Exposed share of the step from which input delays it."""
MEMORY_SHARE = 0.70
"""Share of the device's memory from which the peak is a limit."""
BACKWARD_RATIO = 3.0
"""Backward over forward time; 2 is what the arithmetic asks for."""
OPTIMIZER_SHARE = 0.25
TAIL_SHARE = 0.03
PADDING_SHARE = 0.25
SPREAD = 0.10


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What the stages are judged on; None where unknown.

    shares: exposed share of each phase in the unmarked updates; empty without any.
    host_data_share: host time spent on preparing data over the step, exposed or hidden.
    copy_share: the same of the copies to the device.
    padding: share of slots that hold no token. peak_bytes, device_bytes: peak and capacity.
    largest_category: category with most bytes at the peak. peak_phase: phase of the peak.
    workers: processes that prepare updates ahead.
    accum, skipped, spread: micro-batches, updates not applied, interquartile range over median.
    optimizer_bytes_per_s: bytes the update had to move over the time of its phase.
    bandwidth: peak bytes/s of the device. others: other processes that computed on the device.
    retries: times that the allocator had to give its cache back to the device and ask again.
    """

    shares: Mapping[str, float] = field(default_factory=dict)
    host_data_share: float | None = None
    copy_share: float | None = None
    padding: float | None = None
    peak_bytes: float | None = None
    device_bytes: float | None = None
    largest_category: str | None = None
    peak_phase: str | None = None
    accum: int = 1
    workers: int = 0
    skipped: int = 0
    spread: float | None = None
    optimizer_bytes_per_s: float | None = None
    bandwidth: float | None = None
    others: int = 0
    retries: int = 0

    def share(self, phase: str) -> float:
        """Exposed share of a phase."""
        return self.shares.get(phase, 0.0)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage: its figure in words, and, with a symptom, the evidence and what to do next."""

    stage: str
    figure: str
    symptom: str = ""
    evidence: str = ""
    advice: str = ""


def stages(figures: Figures) -> list[Stage]:
    """The stages of the step in execution order, then what concerns the measurement itself."""
    if not figures.shares:
        return []
    return [
        _batch_preparation(figures),
        _transfer(figures),
        _memory(figures),
        _forward_and_backward(figures),
        _update(figures),
        _tail(figures),
        _accumulation(figures),
        _measurement(figures),
    ]


def symptoms(judged: list[Stage]) -> list[Stage]:
    """The stages that show one."""
    return [stage for stage in judged if stage.symptom]


def _batch_preparation(f: Figures) -> Stage:
    share = f.share("data")
    whole = "" if f.host_data_share is None else f", host work {f.host_data_share:.1%}"
    figure = f"data exposed {share:.1%} of the step{whole}"
    if f.workers:
        figure += f", by {f.workers} processes ahead"
    if share <= INPUT_SHARE:
        return Stage(stage="batch preparation", figure=figure)
    if f.workers:
        advice = (
            f"compare data.workers={2 * f.workers}, as far as there are cores; else look at what "
            "reading and tokenizing cost"
        )
    else:
        advice = "compare data.workers=2, which prepares the next updates meanwhile"
    return Stage(
        stage="batch preparation",
        figure=figure,
        symptom="device idle before forward",
        evidence=f"the step waits {share:.0%} of its time for the next batch",
        advice=advice,
    )


def _transfer(f: Figures) -> Stage:
    share = f.share("transfer")
    figure = f"transfer exposed {share:.1%} of the step"
    if f.copy_share is not None:
        figure += f", copies {f.copy_share:.1%}"
    if share <= INPUT_SHARE:
        return Stage(stage="transfer", figure=figure)
    return Stage(
        stage="transfer",
        figure=figure,
        symptom="device idle before forward",
        evidence=f"the step waits {share:.0%} of its time for copies to the device",
        advice="look at copy events and the first kernel on a timeline (profile=true)",
    )


def _memory(f: Figures) -> Stage:
    if f.peak_bytes is None:
        return Stage(stage="memory", figure="peak unknown")
    figure = f"peak {f.peak_bytes / 2**30:.3f} GiB"
    if f.largest_category:
        figure += f" in {f.peak_phase}, mostly {f.largest_category.replace('_', ' ')}"
    if f.retries:
        return Stage(
            stage="memory",
            figure=figure,
            symptom="the allocator ran out and began again",
            evidence=f"{f.retries} times it gave its cache back to the device, which waits for all "
            "work on it and is in the step time",
            advice="compare a larger accum or a lever that lowers the peak",
        )
    full = bool(f.device_bytes) and f.peak_bytes > MEMORY_SHARE * (f.device_bytes or 0)
    if not full or f.largest_category != "saved_activations":
        return Stage(stage="memory", figure=figure)
    return Stage(
        stage="memory",
        figure=figure,
        symptom="peak memory rises through forward",
        evidence=f"the peak fills {f.peak_bytes / (f.device_bytes or 1):.0%} of the device, "
        "saved activations most of it",
        advice="compare a larger accum, which leaves fewer activations alive",
    )


def _forward_and_backward(f: Figures) -> Stage:
    forward, backward = f.share("forward"), f.share("backward")
    figure = f"forward {forward:.1%}, backward {backward:.1%} of the step"
    if f.padding is not None:
        figure += f", padding {f.padding:.0%} of the slots"
    if forward and backward / forward > BACKWARD_RATIO:
        return Stage(
            stage="forward and backward",
            figure=figure,
            symptom="backward dominates step time",
            evidence=f"backward takes {backward / forward:.1f} times as long as forward; twice is "
            "what its arithmetic asks for",
            advice="look at the kernels of backward on a timeline (profile=true)",
        )
    if f.padding is not None and f.padding > PADDING_SHARE:
        return Stage(
            stage="forward and backward",
            figure=figure,
            symptom="work on padding",
            evidence=f"{f.padding:.0%} of the processed slots hold no token",
            advice="compare batching that pads less, or a larger accum: fewer examples share a pad",
        )
    return Stage(stage="forward and backward", figure=figure)


def _update(f: Figures) -> Stage:
    share = f.share("optimizer")
    figure = f"optimizer {share:.1%} of the step"
    if f.optimizer_bytes_per_s is not None:
        figure += f", {f.optimizer_bytes_per_s / 1e9:.2f} GB/s"
        if f.bandwidth:
            figure += f" ({f.optimizer_bytes_per_s / f.bandwidth:.0%} of the device's bandwidth)"
    if share <= OPTIMIZER_SHARE:
        return Stage(stage="update", figure=figure)
    return Stage(
        stage="update",
        figure=figure,
        symptom="update is unexpectedly expensive",
        evidence=f"the optimizer takes {share:.0%} of the step",
        advice="check optimizer.implementation=fused; a larger batch shares one update among more",
    )


def _tail(f: Figures) -> Stage:
    share = f.share("other")
    figure = f"other {share:.1%} of the step"
    if share <= TAIL_SHARE:
        return Stage(stage="tail", figure=figure)
    return Stage(
        stage="tail",
        figure=figure,
        symptom="step ends with a long wait",
        evidence=f"{share:.1%} of the step is no work of the update",
        advice="find what the host waits for between updates on a timeline (profile=true)",
    )


def _accumulation(f: Figures) -> Stage:
    figure = f"{f.accum} micro-batches for one update"
    if not f.skipped:
        return Stage(stage="accumulation", figure=figure)
    return Stage(
        stage="accumulation",
        figure=figure,
        symptom="updates skipped",
        evidence=f"{f.skipped} updates were not applied",
        advice="look at optim/loss_scale and at the gradient norm before each skip",
    )


def _measurement(f: Figures) -> Stage:
    if f.spread is None:
        return Stage(stage="measurement", figure="spread unknown")
    figure = f"step times spread by {f.spread:.0%} (interquartile range over median)"
    if f.others:
        return Stage(
            stage="measurement",
            figure=figure,
            symptom="the device was shared",
            evidence=f"{f.others} other processes computed on it",
            advice="repeat it on a device of its own; these times are not the job's alone",
        )
    if f.spread <= SPREAD:
        return Stage(stage="measurement", figure=figure)
    return Stage(
        stage="measurement",
        figure=figure,
        symptom="step time is unstable",
        evidence=figure,
        advice="quiet the machine, or repeat with more seeds before comparing",
    )
