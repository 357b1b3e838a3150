"""The figures of a run, by their names in MLflow without `summary/`."""

from __future__ import annotations

from collections.abc import Mapping

from runner import accounting
from runner.forwarding.runs import is_timed
from runner.measure.peaks import peak_flops_per_s
from runner.outcome.memory import memory_figures
from runner.outcome.run import Run
from runner.outcome.work import device_name, timed_work
from runner.planning.prediction import Prediction
from runner.records import nonfinite


def finite_only(figures: Mapping[str, float]) -> tuple[dict[str, float], dict[str, str]]:
    """Figures that JSON can hold, and the markers of the others."""
    markers = {name: mark for name, value in figures.items() if (mark := nonfinite(value))}
    return {name: v for name, v in figures.items() if name not in markers}, markers


def summary_of(run: Run) -> dict[str, float]:
    """The run's figures by MLflow name without `summary/`."""
    loop, job = run.loop, run.job
    if loop is None or job is None or run.device is None:
        return {}
    figures = accounting.summary(loop.records)
    figures |= memory_figures(run)
    figures |= probe_figures(run)
    if isinstance(run.prediction, Prediction):
        figures["predicted_peak_bytes"] = run.prediction.peak_bytes
    if loop.evaluations and loop.evaluations[-1].update == loop.applied:
        figures["eval_loss"] = loop.evaluations[-1].eval_loss
    if run.emulated:
        return {name: value for name, value in figures.items() if not is_timed(name)}
    flops, seconds = timed_work(loop, job)
    used = accounting.mfu(
        flops=flops,
        seconds=seconds,
        peak_flops_per_s=peak_flops_per_s(
            device_name(run.device), job.parts.precision.formats["compute"]
        ),
    )
    if used is not None:
        figures["mfu"] = used
    return figures


def probe_figures(run: Run) -> dict[str, float]:
    """The gradient probe's figures of the whole model."""
    if run.gradients is None:
        return {}
    whole, output = run.gradients.gradient, run.gradients.output
    figures = {
        "gradient_error": whole.relative_error,
        "gradient_cosine": whole.cosine,
        "gradient_norm_ratio": whole.norm_ratio,
        "output_error": output.relative_error,
    }
    return {name: value for name, value in figures.items() if value is not None}
