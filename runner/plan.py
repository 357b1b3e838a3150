"""`python -m runner.plan`: what a job would need, before anything runs; no GPU, no weights.

Takes the same command line as `python -m runner`. Exit codes: 0 planned; 2 the command is wrong,
or a part of the job cannot be traced.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.accounting import divisors, model_flops, optimizer_traffic
from runner.advice import Option
from runner.checks import AUTO, build_parts
from runner.compose import command_of
from runner.contracts import Fault, UserError
from runner.door import parser
from runner.terminal import human_bytes, human_seconds, print_faults
from runner.units import bytes_of

LINE = "  {:<12}{}"


def main(argv: Sequence[str] | None = None) -> int:
    """Plan the job, or each job of a sweep, of a command line; returns the exit code."""
    args = parser().parse_intermixed_args(list(sys.argv[1:] if argv is None else argv))
    try:
        with uncollected():
            for job in command_of(args, Path.cwd(), to_run=False).jobs:
                print("\n".join(plan_lines(job.config, job.setup)), flush=True)
    except UserError as error:
        print_faults(sys.stderr, error.faults, "nothing was planned")
        return 2
    return 0


@contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's search for cycles, which would go through all that torch has loaded, again
    and again; here and in processes that are forked inside."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def plan_lines(config: Mapping[str, Any], title: str) -> list[str]:
    """The plan of a job, a line per subject, the table of levers last. Raises UserError."""
    import torch

    from runner.planning.fitting import Plans, begun, smallest_accum
    from runner.planning.target import target_named

    target = target_named(config["plan"]["device"], config["device"])
    parts = build_parts(config)

    def refusal(option: Option) -> str | None:
        # Whether a GPU that is not here would refuse an option cannot be tried.
        if target.cuda:
            return None
        return option.lever.refusal(parts.model.describe(), parts.precision, torch.device("cpu"))

    memory = config["plan"]["memory"]
    whole = bytes_of(memory) if memory is not None else target.memory
    room = None if whole is None else whole - target.context
    plans = Plans(config=config, target=target)

    def fits_best() -> int | None:
        return None if room is None else smallest_accum(plans, room)

    try:
        if config["accum"] == AUTO:
            config = {**config, "accum": resolved(config, room, fits_best())}
        found = plans.at(config["accum"])
        with begun(config, plans, refusal=refusal) as rows:
            fitting = fits_best()
            levers = table(rows(), room)
    except UserError:
        raise
    except Exception as error:
        raise UserError(untraceable(error)) from error
    account = found.account
    unverified = " (unverified on a GPU)" if target.cuda else ""
    lines = [
        f"{title}: planned for {target.name}{unverified}",
        LINE.format("batch", batch_words(config)),
        LINE.format("peak", f"{human_bytes(account.peak_bytes)} in {account.peak_phase}"),
        LINE.format("", categories(account.at_peak)),
        LINE.format("largest", str(account.largest[0])),
        LINE.format("work", work_words(config, found.flops, target)),
    ]
    if whole is not None and room is not None:
        lines += [
            LINE.format("memory", fit_words(account.peak_bytes, whole, room)),
            LINE.format("fits best", fitting_words(config, fitting)),
        ]
    return [*lines, "  levers", *levers]


def resolved(config: Mapping[str, Any], room: int | None, fitting: int | None) -> int:
    """The accumulation that `auto` stands for. Raises UserError where there is none."""
    if room is not None and fitting is not None:
        return fitting
    short = room is not None
    raise UserError(
        Fault(
            key="accum",
            given=f"{AUTO}, but not one example fits" if short else f"{AUTO} for unknown memory",
            allowed="a memory that one example fits in" if short else "a known memory",
            next_step="plan.memory=24GiB, or plan.device=NAME",
        )
    )


def untraceable(error: Exception) -> Fault:
    """A part of the job that fake tensors cannot go through, by its own error."""
    return Fault(
        key="plan",
        given=f"a part that cannot be traced on fake tensors: {type(error).__name__}: {error}",
        allowed="parts whose operations have rules for shapes",
        next_step="run one update: its memory account is measured",
    )


# --- words ------------------------------------------------------------------------------------


def batch_words(config: Mapping[str, Any]) -> str:
    """The shape of an update."""
    rows = config["batch"] // config["accum"]
    return f"{config['batch']} = {config['accum']} x {rows} examples of {config['seq_len']} tokens"


def categories(at_peak: Mapping[str, int]) -> str:
    """The bytes at the peak, largest category first."""
    ordered = sorted(at_peak.items(), key=lambda item: -item[1])
    return " · ".join(f"{n.replace('_', ' ')} {human_bytes(held)}" for n, held in ordered if held)


def work_words(config: Mapping[str, Any], flops: int, target: Any) -> str:
    """FLOPs of the update, and the least time that the target's peak rates leave for it."""
    words = f"{flops / 1e12:,.2f} TFLOP per update with recomputation"
    least = least_seconds(config, target)
    if least is None:
        return f"{words}; no lower bound of its time: the rates of {target.name} are not known"
    return f"{words}; at least {human_seconds(least)} on {target.name} at its peak rates"


def least_seconds(config: Mapping[str, Any], target: Any) -> float | None:
    """A lower bound of an update's time: its model FLOPs at the peak rate, and then reading and
    writing parameters and moments once at the peak bandwidth. None where a rate is not known.

    Beside adapters, matrices get no gradient; what the adapters themselves need is left out.
    """
    parts = build_parts(config)
    shapes = parts.model.describe()
    rate: float | None = target.flops_per_s(parts.precision.formats["compute"])
    bandwidth: float | None = target.bytes_per_s()
    if rate is None or bandwidth is None:
        return None
    freezes = any(getattr(lever, "freezes", False) for lever in parts.levers.values())
    frozen = shapes.matmul_params if freezes else shapes.frozen_matmul_params
    flops = model_flops(
        matmul_params=shapes.matmul_params,
        layers=shapes.layers,
        heads=shapes.heads,
        head_width=shapes.head_width,
        lengths=[config["seq_len"]] * config["batch"],
        frozen_params=frozen,
    )
    trained = 0 if freezes else shapes.params - frozen
    least = 2 * trained  # two bytes a weight, the least that any recipe keeps; no moments
    moved = optimizer_traffic(parameters=least, gradients=least, moments=0)
    return flops / rate + moved / bandwidth


def fit_words(peak: int, whole: int, room: int) -> str:
    """Whether it fits, and by how much."""
    word = "fits" if peak <= room else "does not fit"
    beside = f", of which {human_bytes(whole - room)} for CUDA itself" if whole > room else ""
    return f"{word}: {human_bytes(peak)} of {human_bytes(whole)}{beside}"


def fitting_words(config: Mapping[str, Any], fitting: int | None) -> str:
    """The largest micro-batch that fits."""
    if fitting is None:
        return "not even a micro-batch of one example"
    rows = config["batch"] // fitting
    return f"largest micro-batch {rows} of {divisors(config['batch'])}: accum={fitting}"


def table(rows: Sequence[Any], room: int | None) -> list[str]:
    """The levers by what each would save."""
    width = max((len(row.words) for row in rows), default=0)
    lines = []
    for row in rows:
        if row.peak is None:
            lines.append(f"    {row.words:<{width}}  {row.reason}")
            continue
        saved = f"{'saves' if row.saved >= 0 else 'costs'} {human_bytes(abs(row.saved))}"
        fits = "" if room is None else "  fits" if row.peak <= room else "  does not fit"
        lines.append(
            f"    {row.words:<{width}}  {saved:<18} peak {human_bytes(row.peak):<10} "
            f"work x {row.work:.2f}{fits}"
        )
    return lines


if __name__ == "__main__":
    code = main()
    gc.freeze()  # the exit would search all that torch has loaded for cycles, for a second or so
    sys.exit(code)
