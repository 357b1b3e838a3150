"""The command line, composed by Hydra into whole jobs before anything is started or written.

Every job of a sweep is composed and checked here. All faults are reported together in one form,
Hydra's own errors included.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from runner.checks import NEITHER, check, not_swept, removed
from runner.config import TARGET, build
from runner.contracts import Fault, UserError
from runner.door import CONFIG, REFUSALS, compose, parse, reason_of, start_hydra
from runner.overrides import (
    hydra_mode,
    refuse_sweep_without_flag,
    seeds_first,
    swept_values,
    with_params,
)
from runner.states import WEIGHTS

INIT = "model.init"
NAME_LIMIT = 255
"""Bytes of one folder name that common file systems allow."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One job, composed and resolved.

    overrides: as given to Hydra for this job. swept: those among them that the sweep varies.
    setup: name of the setup; never empty. folder: where the job will be.
    """

    number: int
    overrides: Sequence[str]
    swept: Mapping[str, str]
    setup: str
    config: Mapping[str, Any]
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Command:
    """A whole command: its jobs, and what Hydra needs to run them.

    axes: swept keys with their values, in the order typed.
    """

    hydra: Hydra
    config_name: str
    overrides: list[str]
    multirun: bool
    jobs: Sequence[Plan]
    folder: Path
    axes: Mapping[str, Sequence[str]] = field(default_factory=dict)


def command_of(args: argparse.Namespace, launch: Path, *, to_run: bool = True) -> Command:
    """Compose and check every job. Raises UserError with the faults of all jobs together.

    to_run: whether it is to be run. A plan needs no weights to start from and no data.
    """
    hydra = start_hydra(args)
    name = args.config_name or CONFIG
    overrides = parse(hydra, args.overrides)
    multirun = bool(args.multirun) or hydra_mode(overrides) == "MULTIRUN"
    refuse_sweep_without_flag(overrides, multirun)
    mode = RunMode.MULTIRUN if multirun else RunMode.RUN
    named = compose(hydra, name, [str(o.input_line) for o in overrides], mode)
    typed = with_params(hydra, named, overrides, multirun)
    overrides = seeds_first(typed)
    texts = [str(override.input_line) for override in overrides]
    master = compose(hydra, name, texts, mode)
    axes = {str(o.key_or_group): swept_values(o) for o in overrides if o.is_sweep_override()}
    if multirun:
        jobs = _sweep_jobs(hydra, name, master, texts, axes)
        folder = Path(str(OmegaConf.select(master, "hydra.sweep.dir")))
    else:
        folder = Path(str(OmegaConf.select(master, "hydra.run.dir")))
        jobs = [_plan(hydra, name, master, 0, texts, {}, folder)]
    plans = [plan for plan in jobs if isinstance(plan, Plan)]
    faults: list[tuple[Plan, Fault]] = []
    if to_run:
        faults += _folder_faults(plans, launch, multirun) + _init_faults(plans, launch)
        faults += _data_faults(plans, launch)
        faults += _tune_faults(plans, axes)
    for plan in plans:
        found = check(plan.config)
        faults.extend((plan, f) for f in found if to_run or f.key != INIT)
    if faults:
        raise UserError(*_merged(faults, len(plans)))
    return Command(
        hydra=hydra,
        config_name=name,
        overrides=texts + _fixed_folder(master, multirun),
        multirun=multirun,
        jobs=plans,
        folder=(launch / folder).resolve(),
        axes={str(o.key_or_group): swept_values(o) for o in typed if o.is_sweep_override()},
    )


def _fixed_folder(master: DictConfig, multirun: bool) -> list[str]:
    """Overrides that make Hydra use the very folder that was checked."""
    key = "hydra.sweep.dir" if multirun else "hydra.run.dir"
    folder = str(OmegaConf.select(master, key)).replace("\\", "\\\\").replace("'", "\\'")
    mode = "MULTIRUN" if multirun else "RUN"
    return [f"{key}='{folder}'", f"hydra.mode={mode}"]


# --- jobs -------------------------------------------------------------------------------------


def _sweep_jobs(
    hydra: Hydra,
    name: str,
    master: DictConfig,
    texts: list[str],
    axes: Mapping[str, Sequence[str]],
) -> list[Plan]:
    """Every job of a sweep, expanded as Hydra's basic sweeper will."""
    _refuse_other_sweepers(master)
    grammar = OverridesParser.create(config_loader=hydra.config_loader)
    task = [t for t in texts if not t.lstrip("+~").startswith("hydra.")]
    split = BasicSweeper.split_arguments(grammar.parse_overrides(task), None)[0]
    plans: list[Plan] = []
    faults: list[Fault] = []
    for number, overrides in enumerate(split):
        folder = Path(str(OmegaConf.select(master, "hydra.sweep.dir")))
        try:
            plans.append(_plan(hydra, name, master, number, list(overrides), axes, folder))
        except UserError as error:
            faults.extend(f for f in error.faults if f not in faults)
    if faults:
        raise UserError(*faults)
    return plans


def _refuse_other_sweepers(master: DictConfig) -> None:
    target = str(OmegaConf.select(master, f"hydra.sweeper.{TARGET}"))
    if not target.endswith("BasicSweeper"):
        raise UserError(
            Fault(
                key="hydra.sweeper",
                given=target,
                allowed="Hydra's basic sweeper, values given as overrides: every job is checked "
                "before the first starts",
                next_step="type the values: key=a,b,c",
            )
        )


def _plan(
    hydra: Hydra,
    name: str,
    master: DictConfig,
    number: int,
    overrides: list[str],
    axes: Mapping[str, Sequence[str]],
    folder: Path,
) -> Plan:
    config = master
    if axes or OmegaConf.select(master, "hydra.mode") == RunMode.MULTIRUN:
        try:
            config = hydra.config_loader.load_sweep_config(master, overrides)
        except REFUSALS:
            compose(hydra, name, overrides, RunMode.RUN)  # names each wrong override
            raise
        OmegaConf.update(config, "hydra.job.num", number, force_add=True)
        folder = folder / str(OmegaConf.select(config, "hydra.sweep.subdir"))
    swept = {}
    for override in overrides:
        key, _, value = override.partition("=")
        if key in axes:
            swept[key] = value
    resolved = resolve(config)
    gone = list(removed(resolved))
    if gone:
        raise UserError(*gone)
    return Plan(
        number=number,
        overrides=overrides,
        swept=swept,
        setup=setup_name(overrides, swept, resolved),
        config=resolved,
        folder=folder,
    )


def resolve(config: DictConfig) -> dict[str, Any]:
    """The job's config without Hydra's node, every interpolation resolved.

    Raises UserError for a value that is still missing (`???`).
    """
    task = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    try:
        plain = OmegaConf.to_container(task, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise UserError(
            Fault(
                key=str(error.full_key),
                given="???",
                allowed="a value",
                next_step=f"give {error.full_key}=VALUE",
            )
        ) from error
    except OmegaConfBaseException as error:
        raise UserError(
            Fault(
                key=str(error.full_key or CONFIG),
                given="an interpolation",
                allowed=f"one that resolves ({reason_of(error)})",
                next_step="correct it",
            )
        ) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


QUIET = ("hydra", "process", "experiment", *NEITHER)
"""Keys that say where and how often, not what: no part of a setup's name."""


def setup_name(
    overrides: Sequence[str], swept: Mapping[str, str], config: Mapping[str, Any]
) -> str:
    """Swept keys with their values, then the other overrides; the recipe if there is none."""
    named = dict(swept)
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        named[key] = value  # of a key typed twice, the last counts
    words = [f"{k}={v}" for k, v in named.items() if re.split(r"[./]", k)[0] not in QUIET]
    if words:
        return " ".join(words)
    recipe = config["precision"]
    return f"precision={recipe.get('dtype', str(recipe[TARGET]).rpartition('.')[2].lower())}"


# --- folders and reports ----------------------------------------------------------------------


def _folder_faults(plans: Sequence[Plan], launch: Path, multirun: bool) -> list[tuple[Plan, Fault]]:
    key = "hydra.sweep.subdir" if multirun else "hydra.run.dir"
    faults: list[tuple[Plan, Fault]] = []
    seen: set[Path] = set()
    for plan in plans:
        folder = (launch / plan.folder).resolve()
        too_long = [part for part in folder.parts if len(part.encode()) > NAME_LIMIT]
        given, allowed = str(folder), ""
        if too_long:
            allowed = f"folder names of up to {NAME_LIMIT} bytes"
        elif folder in seen:
            allowed = "another folder for each job"
        elif (folder / "job.yaml").exists():
            allowed = "a folder that holds no run yet"
        seen.add(folder)
        if allowed:
            fault = Fault(
                key=key, given=given, allowed=allowed, next_step=f"leave {key} to its default"
            )
            faults.append((plan, fault))
        elif not os.access(parent := _made(folder), os.W_OK | os.X_OK):
            where = "hydra.sweep.dir" if multirun else "hydra.run.dir"
            fault = Fault(
                key=where,
                given=f"{parent}, which cannot be written",
                allowed="a place where run folders can be made",
                next_step=f"start in a folder of your own, or {where}=FOLDER",
            )
            faults.append((plan, fault))
    return faults


def _made(folder: Path) -> Path:
    """What is there of a folder: itself, or what it would be made in."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _init_faults(plans: Sequence[Plan], launch: Path) -> list[tuple[Plan, Fault]]:
    """Runs to start from that have no final weights."""
    return [
        (
            plan,
            Fault(
                key="model.init",
                given=str(launch / str(init)),
                allowed=f"a run folder with {WEIGHTS} in it",
                next_step="name the folder of a run that ended ok",
            ),
        )
        for plan in plans
        if (init := plan.config["model"].get("init")) is not None
        and not (launch / str(init) / WEIGHTS).is_file()
    ]


def _tune_faults(
    plans: Sequence[Plan], axes: Mapping[str, Sequence[str]]
) -> list[tuple[Plan, Fault]]:
    """Tuned keys without a grid."""
    return [
        (plan, not_swept(missing, axes))
        for plan in plans
        if (missing := [key for key in plan.config["compare"]["tune"] if key not in axes])
    ]


def _data_faults(plans: Sequence[Plan], launch: Path) -> list[tuple[Plan, Fault]]:
    """Files of data parts that are not there; `check` reports what cannot be built."""
    found: list[tuple[Plan, Fault]] = []
    for plan in plans:
        with suppress(UserError):
            data = build(plan.config["data"], key="data", allow=plan.config["allow"])
            if hasattr(data, "faults"):
                found += [(plan, fault) for fault in data.faults(launch)]
    return found


def _merged(faults: Sequence[tuple[Plan, Fault]], jobs: int) -> list[Fault]:
    """Equal faults of several jobs as one, saying of how many."""
    found: dict[Fault, list[Plan]] = {}
    for plan, fault in faults:
        found.setdefault(fault, []).append(plan)
    if jobs == 1:
        return list(found)
    return [
        Fault(
            key=fault.key,
            given=f"{fault.given} (in {len(plans)} of {jobs} jobs)",
            allowed=fault.allowed,
            next_step=fault.next_step,
        )
        for fault, plans in found.items()
    ]
