"""Checks of a whole job before anything starts: no torch, no files, no clock.

`check` builds every part (which checks each part's own keys and values), then looks across parts.
Faults are collected, never raised one by one, so that a user sees all of them at once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

from runner.accounting import divisors
from runner.compiling import MODES, OFF
from runner.config import (
    TARGET,
    CheckpointConf,
    CompareConf,
    EvalConf,
    NumericsConf,
    PlanConf,
    QualityConf,
    Root,
    build,
    levers_of,
    part_class,
    unknown_key,
)
from runner.contracts import Fault, OptimizerBuilder, UserError
from runner.records import dumps
from runner.units import ALLOWED, bytes_of

GROUPS = (
    "model",
    "data",
    "batching",
    "objective",
    "precision",
    "optimizer",
    "schedule",
    "tracking",
)
SETUP_KEYS = ("precision", "emulate", "memory", "accum", "batching", "compile", "process")
"""What is varied. `process` is here since an inline job is measured otherwise."""
NEITHER = (
    "seed",
    "tracking",
    "cache",
    "allow",
    "device",
    "warmup",
    "quality",
    "compare",
    "checkpoint",
    "profile",
    "skip_finished",
    "memory_limit",
    "numerics",
    "plan",
)
"""Keys that neither define the work nor the setup: repeats, places, and ways of judging."""
AUTO = "auto"
"""As `accum`: the largest micro-batch that fits."""
MOST = 2**31 - 1
MOST_SEED = 2**63 - 1
"""What torch and a record's readers take as a seed."""
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The built parts of a job, by group; levers by their key under `memory`."""

    model: Any
    data: Any
    batching: Any
    objective: Any
    precision: Any
    optimizer: Any
    schedule: Any
    tracking: Any
    levers: Mapping[str, Any]


def build_parts(config: Mapping[str, Any]) -> Parts:
    """Every part of a job; raises UserError with the faults of all of them together."""
    faults: list[Fault] = []
    built: dict[str, Any] = {}
    nodes = [(group, config[group]) for group in GROUPS] + levers_of(config["memory"])
    for key, node in nodes:
        try:
            built[key] = build(node, key=key, allow=config["allow"])
        except UserError as error:
            faults.extend(error.faults)
    if faults:
        raise UserError(*faults)
    levers = {key: part for key, part in built.items() if key not in GROUPS}
    return Parts(**{group: built[group] for group in GROUPS}, levers=levers)


def check(config: Mapping[str, Any]) -> list[Fault]:
    """All faults of one job's resolved config."""
    faults = [*_unknown_faults(config), *_scalar_faults(config)]
    try:
        parts = build_parts(config)
    except UserError as error:
        return faults + list(error.faults)
    faults.extend(_shape_faults(config, parts))
    faults.extend(_role_faults(parts))
    for part in (parts.data, parts.batching, *parts.levers.values()):
        if hasattr(part, "conflicts"):
            faults.extend(part.conflicts(config))
    return faults


PLACES = {
    "": Root,
    "eval.": EvalConf,
    "quality.": QualityConf,
    "checkpoint.": CheckpointConf,
    "numerics.": NumericsConf,
    "compare.": CompareConf,
    "plan.": PlanConf,
}
"""The schemas of what is no part's own, by the prefix of their keys."""


def removed(config: Mapping[str, Any]) -> Iterable[Fault]:
    """Root keys that were taken out (`~key`): nothing can be checked without them. Below the root
    Hydra itself lets none be taken out of a schema."""
    for entry in fields(Root):
        if entry.name not in config:
            yield Fault(
                key=entry.name,
                given=f"~{entry.name}, which removes it",
                allowed="a value",
                next_step=f"leave out ~{entry.name}",
            )


def _unknown_faults(config: Mapping[str, Any]) -> Iterable[Fault]:
    """Keys that were added (`+key=`) where the schema has none."""
    for prefix, schema in PLACES.items():
        node = config[prefix[:-1]] if prefix else config
        names = [entry.name for entry in fields(schema)]
        yield from (unknown_key(f"{prefix}{key}", names) for key in node if key not in names)


def _at_least(config: Mapping[str, Any], key: str, least: int) -> Iterable[Fault]:
    value: Any = config
    for name in key.split("."):
        value = value[name]
    if isinstance(value, int) and value < least:
        yield Fault(
            key=key,
            given=str(value),
            allowed=f"a whole number from {least} up",
            next_step=f"{key}={least}",
        )


def _scalar_faults(config: Mapping[str, Any]) -> Iterable[Fault]:
    lowest = {"batch": 1, "accum": 1, "updates": 1, "epochs": 1, "warmup": 0, "seed": 0}
    lowest |= {"seq_len": 2, "eval.every": 1, "numerics.every": 1, "eval.examples": 1}
    for key, least in lowest.items():
        yield from _at_least(config, key, least)
    for key, most in (("batch", MOST), ("accum", MOST), ("seed", MOST_SEED)):
        if isinstance(config[key], int) and config[key] > most:
            yield Fault(
                key=key, given=str(config[key]), allowed=f"up to {most}", next_step=f"{key}=16"
            )
    if not config["cache"].strip():
        yield Fault(key="cache", given="''", allowed="a folder", next_step="leave out cache=")
    yield from _accum_fault(config)
    yield from _length_fault(config)
    if not DEVICE.fullmatch(config["device"]):
        yield Fault(
            key="device",
            given=config["device"],
            allowed="auto, cpu, cuda, cuda:N",
            next_step="device=auto",
        )
    for key, options in (("process", ("fresh", "inline")), ("compile", (OFF, *MODES))):
        if config[key] not in options:
            yield Fault(
                key=key,
                given=config[key],
                allowed=", ".join(options),
                next_step=f"{key}={options[0]}",
            )
    clip = config["clip"]
    if clip is not None and not 0 < clip < float("inf"):
        yield Fault(
            key="clip", given=str(clip), allowed="a positive number or null", next_step="clip=1.0"
        )
    yield from _limit_fault(config)
    if config["emulate"] and config["profile"]:
        yield Fault(
            key="profile",
            given="true together with emulate=true",
            allowed="one of the two: a timeline of an emulation says nothing of what it stands for",
            next_step="profile=false",
        )
    yield from _quality_faults(config["quality"])


def _quality_faults(quality: Mapping[str, float]) -> Iterable[Fault]:
    ranges = {"margin": (0, float("inf")), "confidence": (0.5, 1), "min_effect": (0, 1)}
    for name, (low, high) in ranges.items():
        if not low < quality[name] < high:
            yield Fault(
                key=f"quality.{name}",
                given=str(quality[name]),
                allowed=f"above {low} and below {high}",
                next_step=f"remove it, or give an allowed quality.{name}",
            )


def _limit_fault(config: Mapping[str, Any]) -> Iterable[Fault]:
    sizes = {"memory_limit": config["memory_limit"], "plan.memory": config["plan"]["memory"]}
    for key, size in sizes.items():
        try:
            good = size is None or bytes_of(size) > 0
        except ValueError:
            good = False
        if not good:
            yield Fault(key=key, given=str(size), allowed=ALLOWED, next_step=f"{key}=8GiB")


def _accum_fault(config: Mapping[str, Any]) -> Iterable[Fault]:
    batch, accum = config["batch"], config["accum"]
    if not isinstance(accum, int) or isinstance(accum, bool):
        if accum != AUTO:
            yield Fault(
                key="accum",
                given=str(accum),
                allowed=f"an integer that divides batch={batch}, or {AUTO}",
                next_step=f"accum={AUTO}",
            )
        elif config["compile"] != OFF:
            yield Fault(
                key="accum",
                given=f"{AUTO} with compile={config['compile']}",
                allowed=f"{AUTO} in eager mode: what compiled code needs cannot be predicted",
                next_step="a number, or compile=off",
            )
        return
    if batch >= 1 and accum >= 1 and batch % accum:
        allowed = divisors(batch)
        closest = min(allowed, key=lambda d: abs(d - accum))
        yield Fault(
            key="accum",
            given=str(accum),
            allowed=f"a divisor of batch={batch} ({', '.join(map(str, allowed))})",
            next_step=f"accum={closest}",
        )


def _length_fault(config: Mapping[str, Any]) -> Iterable[Fault]:
    if (config["updates"] is None) == (config["epochs"] is None):
        yield Fault(
            key="updates, epochs",
            given=f"updates={config['updates']} epochs={config['epochs']}",
            allowed="exactly one of the two",
            next_step="updates=null epochs=1, or updates=80 epochs=null",
        )


def _shape_faults(config: Mapping[str, Any], parts: Parts) -> Iterable[Fault]:
    shapes = parts.model.describe()
    if config["seq_len"] > shapes.positions:
        yield Fault(
            key="seq_len",
            given=str(config["seq_len"]),
            allowed=f"up to the model's positions, {shapes.positions}",
            next_step=f"seq_len={shapes.positions}",
        )
    needed = getattr(parts.data, "vocab", None)
    if needed is not None and needed > shapes.vocab:
        yield vocab_fault(needed, shapes.vocab)


def _role_faults(parts: Parts) -> Iterable[Fault]:
    """Roles that exactly one lever must play."""
    levers = parts.levers.values()
    roles = {
        "memory/loss": sum(hasattr(lever, "loss_sum") for lever in levers),
        "memory/gradients": sum(lever.clear_gradients() is not None for lever in levers),
    }
    for key, count in roles.items():
        if count != 1:
            yield Fault(
                key=key,
                given=f"{count} parts that do this",
                allowed="exactly one",
                next_step=f"choose one option: {key}=NAME",
            )
    builders = optimizer_builders(parts)
    if len(builders) > 1:
        yield optimizer_fault(list(builders))


def optimizer_builders(parts: Parts) -> dict[str, OptimizerBuilder]:
    """What builds the optimizer in place of its own part, by the key of who does it."""
    deciders = {"precision": parts.precision, **parts.levers}
    found = {key: part.optimizer() for key, part in deciders.items()}
    return {key: build for key, build in found.items() if build is not None}


def optimizer_fault(keys: Sequence[str]) -> Fault:
    """Several parts that would each build the optimizer."""
    return Fault(
        key=", ".join(keys),
        given=f"{len(keys)} parts that each build the optimizer in their own way",
        allowed="one at most",
        next_step=f"choose another option of {' or of '.join(keys)}",
    )


def not_swept(missing: Sequence[str], swept: Iterable[str]) -> Fault:
    """A tuned key without a grid."""
    known = sorted({*swept} - {"seed"})
    return Fault(
        key="compare.tune",
        given=", ".join(missing),
        allowed=f"swept keys ({', '.join(known) or 'none'})",
        next_step=f"sweep it: {missing[0]}=VALUE,VALUE",
    )


def vocab_fault(needed: int, rows: int) -> Fault:
    """Token ids beyond the model's embedding."""
    return Fault(
        key="model.vocab",
        given=f"{rows} rows for token ids up to {needed - 1}",
        allowed=f"{needed} or more",
        next_step=f"model.vocab={-(-needed // 16) * 16}, or the tokenizer that the model came with",
    )


# --- identity ---------------------------------------------------------------------------------


def _digest(value: Any) -> str:
    return hashlib.sha256(dumps(value).encode()).hexdigest()[:12]


def _split_part(node: Mapping[str, Any], allow: Any, key: str) -> tuple[Any, Any]:
    """A part's settings as (workload, setup); places of files are neither."""
    part = part_class(node[TARGET], key=key, allow=allow)
    varied: frozenset[str] = getattr(part, "setup_keys", frozenset())
    places: frozenset[str] = getattr(part, "place_keys", frozenset())
    workload = {k: v for k, v in node.items() if k not in varied | places}
    return workload, {k: v for k, v in node.items() if k in varied}


def workload_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a comparison holds fixed, the corpus digest apart."""
    skipped = (*SETUP_KEYS, *NEITHER)
    fixed = {key: value for key, value in config.items() if key not in skipped}
    for group in GROUPS:
        if group in fixed:
            fixed[group] = _split_part(config[group], config["allow"], group)[0]
    work = _batching_work(config)
    return {**fixed, "batching": work} if work else fixed


def _batching_work(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the batching that decide which examples an update has."""
    node = config.get("batching") or {}
    if TARGET not in node:
        return {}
    cls = part_class(node[TARGET], key="batching", allow=config["allow"])
    named: frozenset[str] = getattr(cls, "workload_keys", frozenset())
    return {key: node[key] for key in sorted(named) if key in node}


def setup_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a comparison varies."""
    varied = {key: config[key] for key in SETUP_KEYS}
    for group in GROUPS:
        if group not in (*SETUP_KEYS, *NEITHER):
            chosen = _split_part(config[group], config["allow"], group)[1]
            if chosen:
                varied[group] = chosen
    return varied


def workload_id(config: Mapping[str, Any], corpus_fingerprint: str) -> str:
    """Digest of everything that two comparable runs share: 12 hex digits."""
    return _digest({"config": workload_of(config), "corpus": corpus_fingerprint})


def job_id(config: Mapping[str, Any], launch: Path) -> str:
    """Digest of everything that makes two jobs the same job, seed, program and Python included.

    The corpus is named by its part and options here, since it is not read yet: another Python has
    another standard library, and is another job. Files of the user's are named by their stamp.
    """
    work: dict[str, Any] = {
        "workload": workload_of(config),
        "setup": setup_of(config),
        "seed": config["seed"],
    }
    data = build(config["data"], key="data", allow=config["allow"])
    if hasattr(data, "stamp"):
        with suppress(UserError):  # files that are gone: the job itself will say so
            work["files"] = data.stamp(launch)
    return _digest({**work, "fullstep": version("fullstep"), "python": python_version()})


def setup_id(config: Mapping[str, Any]) -> str:
    """Digest of everything that a setup is: 12 hex digits; seeds are repeats of one setup."""
    return _digest(setup_of(config))
