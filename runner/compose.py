"""The command line, composed by Hydra into whole jobs before anything is started or written.

Every job of a sweep is composed and checked here. All faults are reported together in one form,
Hydra's own errors included.
"""

from __future__ import annotations

import argparse
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from runner.checks import NEITHER, check
from runner.config import TARGET, Root, conf_dir, nearest
from runner.contracts import Fault, UserError
from runner.states import WEIGHTS

CONFIG = "config"
QUOTING = "quote it for Hydra and for the shell: 'key=\"value\"'"
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


def start_hydra(args: argparse.Namespace) -> Hydra:
    """Hydra on the shipped YAML, with the user's `--config-dir` before the schema."""
    ConfigStore.instance().store(name="root", node=Root)
    if not OmegaConf.has_resolver("unique"):
        OmegaConf.register_new_resolver("unique", lambda: secrets.token_hex(2), use_cache=True)
    path = create_config_search_path(str(args.config_path or conf_dir()))
    if args.config_dir is not None:
        added = Path(args.config_dir).resolve()
        if not added.is_dir():
            raise UserError(
                Fault(
                    key="--config-dir",
                    given=str(added),
                    allowed="a folder that exists",
                    next_step="correct the path",
                )
            )
        path.prepend(
            provider="command-line", path=f"file://{added}", anchor=SearchPathQuery("schema")
        )
    version.setbase("1.3")
    GlobalHydra.instance().clear()
    return Hydra.create_main_hydra2(task_name="runner", config_search_path=path)


def parser() -> argparse.ArgumentParser:
    """Hydra's own argument parser."""
    return get_args_parser()


def command_of(args: argparse.Namespace, launch: Path) -> Command:
    """Compose and check every job. Raises UserError with the faults of all jobs together."""
    hydra = start_hydra(args)
    name = args.config_name or CONFIG
    overrides = parse(hydra, args.overrides)
    multirun = bool(args.multirun) or hydra_mode(overrides) == "MULTIRUN"
    _refuse_sweep_without_flag(overrides, multirun)
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
    faults = _folder_faults(plans, launch, multirun) + _init_faults(plans, launch)
    for plan in plans:
        faults.extend((plan, fault) for fault in check(plan.config))
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


# --- overrides --------------------------------------------------------------------------------


def parse(hydra: Hydra, texts: Sequence[str]) -> list[Override]:
    """Overrides by Hydra's grammar; each one that it refuses becomes a fault."""
    grammar = OverridesParser.create(config_loader=hydra.config_loader)
    found, faults = [], []
    for text in texts:
        try:
            found.append(grammar.parse_override(text))
        except HydraException as error:
            faults.append(
                Fault(
                    key=text.partition("=")[0],
                    given=text,
                    allowed=f"Hydra's override grammar ({_last_line(error)})",
                    next_step=QUOTING if "=" in text else "write key=value",
                )
            )
    if faults:
        raise UserError(*faults)
    return found


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip() and "See http" not in line]
    return lines[0].strip() if lines else type(error).__name__


NO_PARAMS = "hydra.sweeper.params=null"


def with_params(
    hydra: Hydra, config: DictConfig, typed: Sequence[Override], multirun: bool
) -> list[Override]:
    """The overrides of a named experiment (`hydra.sweeper.params`), then the typed ones, which
    win; Hydra's sweeper is told of none, so that every sweep is expanded in one way."""
    params = OmegaConf.select(config, "hydra.sweeper.params")
    if not params:
        return list(typed)
    if not multirun:
        raise UserError(
            Fault(
                key="experiment",
                given="a sweep",
                allowed="one job, or a sweep with -m",
                next_step="add -m",
            )
        )
    keys = {override.key_or_group for override in typed}
    added = parse(hydra, [f"{key}={value}" for key, value in params.items() if key not in keys])
    return [*added, *typed, *parse(hydra, [NO_PARAMS])]


def hydra_mode(overrides: Sequence[Override]) -> str | None:
    """What `hydra.mode=` says, if it was typed."""
    for override in overrides:
        if override.key_or_group == "hydra.mode":
            return str(override.value()).upper()
    return None


def _refuse_sweep_without_flag(overrides: Sequence[Override], multirun: bool) -> None:
    faults = [
        Fault(
            key=str(override.key_or_group),
            given=str(override.input_line),
            allowed="one value, or several with -m",
            next_step="add -m to sweep, or write a list as key=[a,b]",
        )
        for override in overrides
        if override.is_sweep_override() and not multirun
    ]
    if faults:
        raise UserError(*faults)


def seeds_first(overrides: Sequence[Override]) -> list[Override]:
    """The same overrides with a swept `seed` in front, so that repeats of setups interleave:
    the first swept key is the outer loop of a sweep."""
    swept = [o for o in overrides if o.is_sweep_override() and o.key_or_group == "seed"]
    return swept + [o for o in overrides if not any(o is s for s in swept)]


def swept_values(override: Override) -> list[str]:
    """The values of a discrete sweep as Hydra writes them."""
    if not override.is_discrete_sweep():
        raise UserError(
            Fault(
                key=str(override.key_or_group),
                given=str(override.input_line),
                allowed="a discrete sweep: a,b,c or choice(...) or range(...)",
                next_step="list the values",
            )
        )
    return [str(value) for value in override.sweep_string_iterator()]


# --- composition ------------------------------------------------------------------------------


def compose(hydra: Hydra, name: str, overrides: list[str], mode: RunMode) -> DictConfig:
    """The config of these overrides; raises UserError naming each override that is wrong."""
    try:
        return _composed(hydra, name, overrides, mode)
    except (HydraException, OmegaConfBaseException) as error:
        faults = []
        try:
            _composed(hydra, name, [], RunMode.RUN)
        except (HydraException, OmegaConfBaseException):
            overrides = []  # the files themselves do not compose
        for override in overrides:
            try:
                _composed(hydra, name, [override], mode)
            except (HydraException, OmegaConfBaseException) as single:
                faults.append(_fault_of(hydra, name, override, single))
        raise UserError(*(faults or [_joint_fault(overrides, error)])) from error


def _composed(hydra: Hydra, name: str, overrides: list[str], mode: RunMode) -> DictConfig:
    return hydra.compose_config(
        config_name=name,
        overrides=overrides,
        run_mode=mode,
        with_log_configuration=False,
        validate_sweep_overrides=False,
    )


def _joint_fault(overrides: Sequence[str], error: BaseException) -> Fault:
    return Fault(
        key=" ".join(overrides) or CONFIG,
        given="these overrides together",
        allowed=f"a configuration that composes ({_last_line(error)})",
        next_step="remove them one by one",
    )


def _fault_of(hydra: Hydra, name: str, override: str, error: BaseException) -> Fault:
    key, _, given = override.lstrip("+~").partition("=")
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return Fault(
            key=key,
            given=given or override,
            allowed=nearest(given, error.options or []),
            next_step=f"choose one: {key}=NAME",
        )
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and "could not be converted" in str(cause):
        wanted = re.search(r"converted to (\w+)", str(cause))
        word = wanted.group(1) if wanted else "another type"
        return Fault(
            key=key, given=given, allowed=word.lower(), next_step=f"give {key} as {word.lower()}"
        )
    return Fault(
        key=key,
        given=override,
        allowed=nearest(key, _known_keys(hydra, name)),
        next_step="correct the key or remove it",
    )


def _known_keys(hydra: Hydra, name: str) -> list[str]:
    """Every key that can be overridden: the default config's, flattened, groups included."""
    config = _composed(hydra, name, [], RunMode.RUN)
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    keys: list[str] = []

    def walk(node: Mapping[Any, Any], prefix: str) -> None:
        for name, value in node.items():
            if name in ("hydra", TARGET):
                continue
            keys.append(f"{prefix}{name}")
            if isinstance(value, Mapping):
                walk(value, f"{prefix}{name}.")

    walk(plain, "")
    return keys


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
        except (HydraException, OmegaConfBaseException):
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
                allowed=f"one that resolves ({_last_line(error)})",
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
        named.setdefault(key, value)
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
    return faults


def _init_faults(plans: Sequence[Plan], launch: Path) -> list[tuple[Plan, Fault]]:
    """Runs to start from that have no final weights."""
    return [
        (
            plan,
            Fault(
                key="model.init",
                given=str(launch / init),
                allowed=f"a run folder with {WEIGHTS} in it",
                next_step="name the folder of a run that ended ok",
            ),
        )
        for plan in plans
        if isinstance(init := plan.config["model"].get("init"), str)
        and not (launch / init / WEIGHTS).is_file()
    ]


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
