"""The record of a run, from whatever is known of it when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from runner import accounting, checks
from runner.advice import largest_of, smaller_with
from runner.assemble import Job, compiles, lacking
from runner.compiling import OFF, Compilations
from runner.contracts import Counts, MicroBatch
from runner.data.stats import target_counts
from runner.diagnosis import Figures, stages
from runner.environment import device_bytes, environment
from runner.forwarding.runs import is_timed
from runner.loop import Loop
from runner.measure.account import MemoryAccount
from runner.measure.allocator import allocated, exceeded
from runner.measure.clock import mark_cost, marks_per_update
from runner.measure.gradients import GradientProbe
from runner.measure.peaks import peak_bytes_per_s, peak_flops_per_s
from runner.measure.probe import Trained
from runner.measure.storages import plain_tensors
from runner.numerics import summed_up
from runner.planning.fitting import Saving, enough, room_of
from runner.planning.prediction import Prediction, predict
from runner.planning.target import target_of
from runner.precision.conversion import conversion_of, converted_flops
from runner.records import RunRecord, UpdateRecord, dumps, finite, nonfinite, write_atomically
from runner.states import STATE, place_of
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


def record_of(run: Run, status: str, message: str) -> RunRecord:
    """The record of a run, from whatever is known of it."""
    summary, dropped = finite_only(summary_of(run))
    return RunRecord(
        status=status,
        message="; ".join([message, *shortage_of(run)]) if status == "oom" else message,
        command=run.ticket["command"],
        workload_id=run.workload_id,
        setup_id=checks.setup_id(run.config),
        config=run.config,
        summary=summary,
        environment=_environment(run),
        sizes=sizes_of(run),
        memory=memory_of(run),
        evidence=evidence_of(run),
        numerics=numerics_found(run, dropped),
        evaluation=evaluation_of(run),
        diagnosis=diagnosis_of(run),
        job=place_of(run.ticket),
    )


def memory_of(run: Run) -> dict[str, Any]:
    """The memory account, what was predicted of it, what would make its largest live object
    smaller, and on CUDA what allocator and device say beside it."""
    found = beside_account(run)
    if isinstance(run.prediction, str):
        found["not_predicted"] = run.prediction
    elif run.prediction is not None:
        found["predicted"] = run.prediction.to_json()
        error = prediction_error(run, run.prediction)
        if error is not None:
            found["prediction_error"] = error
    if run.account is None:
        if run.job is not None and run.config["compile"] != OFF:
            found["not_accounted"] = NOT_ACCOUNTED
        return found
    return found | run.account.to_json() | {"smaller_with": advice_of(run)}


NOT_ACCOUNTED = "compiled code has no memory account: watching its operations would run it eagerly"


def beside_account(run: Run) -> dict[str, Any]:
    """What the allocator counted, how its peaks stand against the account, and what the device
    says is in use; empty on a CPU."""
    records = [] if run.loop is None else run.loop.records
    found: dict[str, Any] = {"device": run.in_use} if run.in_use else {}
    counted = allocated(records)
    if counted is not None:
        found["allocator"] = asdict(counted)
    against = None if run.account is None else exceeded(records, run.account.peak_bytes)
    if against is not None:
        found["account_exceeded"] = asdict(against)
    return found


def prediction_error(run: Run, prediction: Prediction) -> float | None:
    """The predicted peak over the measured one, less 1: on CUDA the allocator's maximum over all
    updates, else the account's; None where nothing was measured."""
    if run.device is not None and run.device.type == "cuda" and run.loop is not None:
        measured = memory_figures(run).get("peak_allocated_bytes")
    else:
        whole = run.account is not None and run.account.scaled == 1
        measured = run.account.peak_bytes if run.account is not None and whole else None
    return prediction.peak_bytes / measured - 1 if measured else None


def advice_of(run: Run) -> list[str]:
    """What makes the largest live object smaller, as it is typed."""
    job, account = run.job, run.account
    if job is None or account is None:
        return []
    found = largest_of(account, run.config, job.parts.model.describe())
    if found is None:
        return []
    lacks = partial(lacking, device=job.device)
    return smaller_with(found, run.config, job.parts, job.device, lacks)


def shortage_of(run: Run) -> list[str]:
    """What an update would have needed, in words, where that is known."""
    account = run.account
    if account is None:
        return []
    how = "" if account.scaled == 1 else f" (scaled by {account.scaled:g} from the part that fits)"
    words = [
        f"an update needs {account.peak_bytes / 2**20:,.1f} MiB in {account.peak_phase}{how}",
        f"largest live object: {account.largest_live_object}",
    ]
    try:
        fitting = [f"{row.words} (work x {row.work:.2f})" for row in enough_for(run)]
    except Exception as error:
        fitting = []
        words.append(f"what would fit could not be predicted: {type(error).__name__}: {error}")
    if fitting:
        return [*words, f"predicted to fit with {', '.join(fitting)}"]
    levers = advice_of(run)
    return [*words, f"smaller with {', '.join(levers)}"] if levers else words


def enough_for(run: Run) -> list[Saving]:
    """Single changes with which the job is predicted to fit, least work first."""
    job = run.job
    if job is None or not isinstance(run.prediction, Prediction):
        return []
    parts = job.parts
    return enough(
        run.config,
        target_of(job.device),
        room_of(run.config["memory_limit"], job.device),
        lambda option: option.lever.refusal(parts.model.describe(), parts.precision, job.device),
    )


def numerics_found(run: Run, dropped: Mapping[str, str]) -> dict[str, Any]:
    """What the formats did to the numbers; what of the summary was not finite."""
    found: dict[str, Any] = {"nonfinite_summary": dropped} if dropped else {}
    if run.gradients is not None:
        found["gradient_probe"] = run.gradients.to_json()
    if run.loop is not None and run.loop.looked:
        found["looks"] = summed_up(run.loop.looked)
    return found


def finite_only(figures: Mapping[str, float]) -> tuple[dict[str, float], dict[str, str]]:
    """Figures that JSON can hold, and the markers of the others."""
    markers = {name: mark for name, value in figures.items() if (mark := nonfinite(value))}
    return {name: v for name, v in figures.items() if name not in markers}, markers


def _environment(run: Run) -> dict[str, Any]:
    if run.device is None:
        return {}
    found = environment(run.device, Path(run.ticket["launch"]))
    found["device"]["other_processes"] = sorted(run.others)
    found |= {"process": run.config["process"], "emulated": run.emulated is not None}
    return found if run.emulated else {**found, "timings": run.timings}


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


def device_name(device: torch.device) -> str:
    """The name that the table of peaks knows a device by."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def timed_work(loop: Loop, job: Job) -> tuple[float, float]:
    """Model FLOPs and seconds over the updates without a mark."""
    flops, seconds = 0.0, 0.0
    for record, lengths in zip(loop.records, loop.lengths, strict=True):
        if not record.marks:
            flops += flops_of(job, lengths, record.tokens)
            seconds += record.total
    return flops, seconds


def flops_of(job: Job, lengths: Any, tokens: Counts) -> int:
    """Model FLOPs of an update over documents of these lengths; where the head is applied at
    targets only, the other real tokens have none."""
    shapes = job.description
    targets_only = getattr(job.parts.batching, "head_on_targets", False)
    return accounting.model_flops(
        matmul_params=shapes.matmul_params,
        layers=shapes.layers,
        heads=shapes.heads,
        head_width=shapes.head_width,
        lengths=lengths,
        head_params=shapes.vocab * shapes.width,
        headless=tokens.nonpad - tokens.useful if targets_only else 0,
        frozen_params=shapes.frozen_matmul_params,
    )


def memory_figures(run: Run) -> dict[str, float]:
    """Peak bytes and what goes with them: over all updates on CUDA, from the account on a CPU."""
    assert run.loop is not None and run.device is not None
    if run.device.type != "cuda":
        return {"peak_allocated_bytes": run.account.peak_bytes} if run.account else {}
    counted = allocated(run.loop.records)
    if counted is None:
        return {}
    figures: dict[str, float | None] = {
        "peak_allocated_bytes": counted.peak_allocated_bytes,
        "peak_reserved_bytes": counted.peak_reserved_bytes,
        "unfilled_bytes": counted.unfilled_bytes,
        "peak_inactive_split_bytes": counted.peak_inactive_split_bytes,
        "allocator_retries": counted.retries,
    }
    against = None if run.account is None else exceeded(run.loop.records, run.account.peak_bytes)
    if against is not None:
        figures["account_exceeded_updates"] = against.updates
    return {name: value for name, value in figures.items() if value is not None}


def sizes_of(run: Run) -> dict[str, Any]:
    """Counts of examples, tokens, parameters and micro-batches."""
    job, loop = run.job, run.loop
    if job is None:
        return {}
    shapes = job.description
    sizes: dict[str, Any] = {
        "global_batch": run.config["batch"],
        "micro_batch": job.feed.micro,
        "updates_planned": job.updates,
        "examples_train": None if job.corpus.stream else len(job.corpus.train),
        "examples_eval": len(job.corpus.eval),
        "examples_truncated": (job.corpus.stream or job.corpus).truncated,
        "examples_dropped": dict(job.corpus.dropped),
        "params": shapes.params,
        "params_trainable": sum(p.numel() for p in job.training.parameters),
        "params_by_decay": {
            str(group["weight_decay"]): sum(p.numel() for p in group["params"])
            for group in job.training.optimizer.param_groups
        },
    }
    if loop is not None and loop.records:
        sizes |= _work_sizes(job, loop)
        if run.emulated:
            sizes = {name: value for name, value in sizes.items() if name not in CLOCK_SIZES}
    return sizes


CLOCK_SIZES = ("step_s", "phase_shares", "marked", "model_flops_per_s")
"""Sizes that a clock gave; an emulated run has none."""


def _work_sizes(job: Job, loop: Loop) -> dict[str, Any]:
    total: Counts = accounting.total_counts(loop.records)
    counted = accounting.timed(loop.records)
    flops, seconds = timed_work(loop, job)
    return {
        "tokens": {"useful": total.useful, "nonpad": total.nonpad, "slots": total.slots},
        "padding_share": accounting.padding_share(total),
        "updates_timed": len(counted),
        "step_s": accounting.statistics([u.total for u in counted]),
        "phase_shares": accounting.phase_shares(counted),
        "marked": accounting.marked(loop.records),
        "model_flops_per_s": accounting.rate(flops, seconds),
        "optimizer_bytes_per_update": optimizer_bytes(job),
    }


def evidence_of(run: Run) -> dict[str, Any]:
    """What shows that the run did what its config says, each item with how it is known."""
    job, loop = run.job, run.loop
    found: dict[str, Any] = {}

    def note(name: str, value: Any, how: str) -> None:
        found[name] = {"value": value, "how": how}

    note("controls", dict(run.controls), "read_back")
    if run.config["emulate"] and run.device is not None:
        words = f"ignored: {run.device} does this recipe's arithmetic itself; times are its own"
        note("emulation", run.emulated or words, "observed")
    if job is None:
        return found
    precision = job.parts.precision
    note("formats", dict(precision.formats), "declared")
    note("numerics", numerics_of(job), "declared")
    conversion = conversion_of(job.training.model)
    if conversion is not None:
        seen_how = "observed" if conversion.visible else "declared"
        note("converted_layers", conversion.to_json(), seen_how)
    note("accumulation", precision.formats["accumulate"], _accumulation_known(run))
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in job.training.parameters})
    note("parameter_dtypes", dtypes, "observed")
    note("frozen", frozen_of(job.training.model), "observed")
    group = job.training.optimizer.param_groups[0]
    note("optimizer_fused", bool(group.get("fused")), "read_back")
    reads_flag = job.device.type == "cuda" and not job.training.skips_on_device
    waits = ["one flag after the last backward pass"] if reads_flag else []
    note("host_waits_per_update", waits, "declared")
    if run.timeline is not None:
        note("timeline", asdict(run.timeline), "observed")
    if compiles(run.config):
        counted = run.compilations
        counts: dict[str, float] = {"graphs": counted.graphs, "recompilations": counted.again}
        if not run.emulated:
            counts["seconds"] = counted.seconds
        note("compilations", counts, "observed")
    note("corpus_fingerprint", job.corpus.fingerprint, "observed")
    if job.initial_weights:
        note("initial_weights", job.initial_weights, "observed")
    if run.trained is not None:
        note("tensors_trainable", run.trained.parameters, "observed")
        note("tensors_without_gradient", list(run.trained.no_gradient), "observed")
        note("tensors_unchanged", list(run.trained.unchanged), "observed")
        if run.trained.lost_share is not None:
            note("updates_lost_share", run.trained.lost_share, "observed")
        seen = run.trained.dispatched
        note("product_flops_by_operands", dict(seen.flops), "observed")
        if run.trained.kernels:
            note("kernels", dict(run.trained.kernels), "observed")
        note("attention_operators", list(seen.attention_operators), "observed")
        expected = converted_flops(job.training.model, run.trained.tokens.slots)
        if expected:
            note("converted_product_shares", seen.shares_of(expected), "observed")
        model = flops_of(job, run.trained.lengths, run.trained.tokens)
        work = {"model": model, "hardware": seen.total}
        note("update_flops", {**work, "recomputed": seen.recomputed}, "observed")
    if loop is not None and loop.records:
        steps = sum(record.total for record in loop.records)
        if not run.emulated:
            note("loop_wall_s", loop.wall_s, "observed")
            note("sum_of_steps_s", steps, "observed")
            note("marks_per_update", marks_per_update(run.config["accum"]), "declared")
            note("mark_s", mark_cost(job.device), "observed")
        scales = [r.loss_scale for r in loop.records if r.loss_scale is not None]
        if scales:
            note("loss_scale", scale_history(loop.records), "observed")
    return found


def frozen_of(model: torch.nn.Module) -> dict[str, Any]:
    """Bytes of the tensors that are not trained, by format; buffers of quantized layers too."""
    bytes_by_dtype: dict[str, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.requires_grad:
            name = str(tensor.dtype).removeprefix("torch.")
            bytes_by_dtype[name] = bytes_by_dtype.get(name, 0) + tensor.nbytes
    return {"bytes_by_dtype": bytes_by_dtype}


def scale_history(records: Sequence[UpdateRecord]) -> dict[str, Any]:
    """First and last loss scale, and every change as (attempt from which it holds, scale)."""
    known = [(r.attempt, r.loss_scale) for r in records if r.loss_scale is not None]
    changes = [new for old, new in pairwise(known) if old[1] != new[1]]
    return {"first": known[0][1], "last": known[-1][1], "changes": changes}


def _accumulation_known(run: Run) -> str:
    """How the format of sums is known: an emulation adds in FP32 itself; of a GPU's kernels the
    switches for reduced sums are read back."""
    if run.emulated:
        return "observed"
    on_gpu = run.device is not None and run.device.type == "cuda"
    switches = any("reduced_precision_reduction" in name for name in run.controls)
    return "read_back" if on_gpu and switches else "declared"


def numerics_of(job: Job) -> dict[str, str]:
    """What each part that varies declares to do to the loss curve, levers by their key."""
    parts = {"precision": job.parts.precision, "batching": job.parts.batching}
    return {key: part.numerics for key, part in {**parts, **job.parts.levers}.items()}


def evaluation_of(run: Run) -> dict[str, Any]:
    """Held-out losses, and the entropy that a model without context could reach."""
    job, loop = run.job, run.loop
    if job is None or loop is None or not loop.evaluations:
        return {}
    count = min(run.config["eval"]["examples"], len(job.corpus.eval))
    targets = target_counts([job.corpus.eval[i] for i in range(count)])
    first, last = loop.evaluations[0], loop.evaluations[-1]
    return {
        "before": finite(first.eval_loss),
        "last": finite(last.eval_loss),
        "last_nonfinite": nonfinite(last.eval_loss),
        "last_update": last.update,
        "perplexity": math.exp(last.eval_loss) if last.eval_loss < 50 else None,
        "tokens": last.eval_tokens,
        "unigram_entropy": accounting.unigram_entropy(targets),
        "format": "fp32",
    }


def diagnosis_of(run: Run) -> list[dict[str, str]]:
    """Every stage of the step with its figure, in execution order, symptoms with advice."""
    if run.loop is None or run.job is None or run.device is None or run.emulated:
        return []
    return [asdict(stage) for stage in stages(figures_of(run, run.job, run.loop))]


def figures_of(run: Run, job: Job, loop: Loop) -> Figures:
    """What the diagnosis is about."""
    counted = accounting.timed(loop.records)
    steps = accounting.statistics([u.total for u in counted])
    total = sum(u.total for u in counted)
    at_peak = run.account.at_peak if run.account else {}
    seconds = accounting.phase_totals(counted)["optimizer"]
    moved = accounting.rate(optimizer_bytes(job) * len(counted), seconds)
    assert run.device is not None
    return Figures(
        shares=accounting.phase_shares(counted),
        host_data_share=sum(u.host["data"] for u in counted) / total if total else None,
        copy_share=sum(u.host["transfer"] for u in counted) / total if total else None,
        padding=accounting.padding_share(accounting.total_counts(loop.records)),
        peak_bytes=memory_figures(run).get("peak_allocated_bytes"),
        device_bytes=device_bytes(run.device),
        largest_category=max(at_peak, key=lambda name: at_peak[name]) if at_peak else None,
        peak_phase=run.account.peak_phase if run.account else None,
        accum=run.config["accum"],
        workers=job.feed.workers,
        skipped=sum(not u.applied for u in loop.records),
        spread=steps["spread"] if steps else None,
        optimizer_bytes_per_s=moved,
        bandwidth=peak_bytes_per_s(device_name(run.device)),
        others=len(run.others),
        retries=int(memory_figures(run).get("allocator_retries", 0)),
    )


def ridge_of(run: Run) -> float | None:
    """Peak FLOP/s over peak bytes/s of the device in the recipe's format, or None."""
    assert run.job is not None and run.device is not None
    name = device_name(run.device)
    flops = peak_flops_per_s(name, run.job.parts.precision.formats["compute"])
    moved = peak_bytes_per_s(name)
    return flops / moved if flops and moved else None


def optimizer_bytes(job: Job) -> int:
    """Bytes that one parameter update must move, see `accounting.optimizer_traffic`."""
    state = job.training.optimizer.state
    return accounting.optimizer_traffic(
        parameters=sum(p.nbytes for p in job.training.parameters),
        gradients=sum(p.nbytes for p in job.training.parameters),
        moments=sum(
            sum(plain.nbytes for plain in plain_tensors(value))
            for parameter in job.training.parameters
            for value in state.get(parameter, {}).values()
            if isinstance(value, torch.Tensor) and value.numel() == parameter.numel() > 1
        ),
    )
