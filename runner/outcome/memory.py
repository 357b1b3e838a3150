"""What a record says of memory: the account, what was predicted, what the allocator saw, and what
would make it smaller."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

from runner.advice import largest_of, smaller_with
from runner.assemble import lacking
from runner.compiling import OFF
from runner.measure.allocator import allocated, exceeded
from runner.outcome.run import Run
from runner.planning.fitting import Saving, enough, room_of
from runner.planning.prediction import Prediction
from runner.planning.target import target_of


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
