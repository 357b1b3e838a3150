"""Hydra at the door: its argument parser, its composition, its errors as plain faults.

Hydra's own classes are used below its decorator, since a sweep must be composed whole before it
runs; hydra-core is therefore held at 1.3 in pyproject.toml.
"""

from __future__ import annotations

import argparse
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import version
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
from omegaconf.errors import OmegaConfBaseException

from runner.config import TARGET, Root, conf_dir, nearest
from runner.contracts import Fault, UserError

CONFIG = "config"
REFUSALS = (HydraException, OmegaConfBaseException, ValueError)
"""What composing raises for an override that is wrong; ValueError: `precision=null`, say."""
QUOTING = "quote it for Hydra and for the shell: 'key=\"value\"'"


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


def parse(hydra: Hydra, texts: Sequence[str]) -> list[Override]:
    """Overrides by Hydra's grammar; each one that it refuses becomes a fault."""
    grammar = OverridesParser.create(config_loader=hydra.config_loader)
    found, faults = [], []
    for text in texts:
        try:
            found.append(grammar.parse_override(text))
            if not text.lstrip("+~").partition("=")[0].strip():
                raise HydraException("there is no key")
        except HydraException as error:
            faults.append(
                Fault(
                    key=text.partition("=")[0],
                    given=text,
                    allowed=f"Hydra's override grammar ({reason_of(error)})",
                    next_step=QUOTING if "=" in text else "write key=value",
                )
            )
    if faults:
        raise UserError(*faults)
    return found


def reason_of(error: BaseException) -> str:
    """The first line of an error that says something."""
    lines = [line for line in str(error).splitlines() if line.strip() and "See http" not in line]
    return lines[0].strip() if lines else type(error).__name__


def compose(hydra: Hydra, name: str, overrides: list[str], mode: RunMode) -> DictConfig:
    """The config of these overrides; raises UserError naming each override that is wrong."""
    try:
        return _composed(hydra, name, overrides, mode)
    except REFUSALS as error:
        try:
            _composed(hydra, name, [], RunMode.RUN)
        except REFUSALS:
            overrides = []  # the files themselves do not compose
        good, bad = _told_apart(hydra, name, overrides, mode)
        faults = [
            _fault_of(hydra, name, good, override, single) for override, single in bad.items()
        ]
        raise UserError(*(faults or [_joint_fault(overrides, error)])) from error


def _told_apart(
    hydra: Hydra, name: str, overrides: Sequence[str], mode: RunMode
) -> tuple[list[str], dict[str, BaseException]]:
    """The overrides that compose, and those that do not even beside them, with their errors: a
    key such as `data.files` is there only with the option that has it."""
    good: list[str] = []
    while True:
        before = len(good)
        bad: dict[str, BaseException] = {}
        for override in overrides:
            if override in good:
                continue
            try:
                _composed(hydra, name, [*good, override], mode)
                good.append(override)
            except REFUSALS as error:
                bad[override] = error
        if len(good) == before or not bad:
            return good, bad


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
        allowed=f"a configuration that composes ({reason_of(error)})",
        next_step="remove them one by one",
    )


def _fault_of(
    hydra: Hydra, name: str, good: list[str], override: str, error: BaseException
) -> Fault:
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
    known = _known_keys(hydra, name, good)
    if key in known:  # it is there, and does not take this value: null, say
        return Fault(
            key=key,
            given=given or override,
            allowed=f"another value ({reason_of(cause or error)})",
            next_step=f"leave out ~{key}" if override[:1] == "~" else f"correct the value of {key}",
        )
    return Fault(
        key=key,
        given=override,
        allowed=nearest(key, known),
        next_step="correct the key or remove it",
    )


def _known_keys(hydra: Hydra, name: str, good: list[str]) -> list[str]:
    """Every key that can be overridden beside these: the config's, flattened, groups included."""
    config = _composed(hydra, name, good, RunMode.MULTIRUN)
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


# --- help -------------------------------------------------------------------------------------

USAGE = """python -m runner [-m] [group=option ...] [key=value ...]

One job, or with -m and several values (precision=fp32,bf16 seed=0,1,2) a sweep of jobs.
--cfg job prints the configuration without running it; --config-dir DIR adds options of your own;
--hydra-help tells what else Hydra takes."""


def help_text(hydra: Hydra, args: argparse.Namespace) -> str:
    """What --help prints: usage, the options of every group, the configuration with its defaults.

    The groups are read from the folders; Hydra's own listing of them takes longer than everything
    else that happens here.
    """
    added = [Path(args.config_dir)] if args.config_dir else []
    roots = [Path(args.config_path or conf_dir()), *added]
    options: dict[str, set[str]] = {}
    for root in roots:
        for path in root.rglob("*.yaml"):
            if path.parent != root:
                options.setdefault(str(path.parent.relative_to(root)), set()).add(path.stem)
    groups = "\n".join(
        f"{name}: {', '.join(sorted(found))}" for name, found in sorted(options.items())
    )
    config = compose(hydra, args.config_name or CONFIG, args.overrides, RunMode.RUN)
    task = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    return "\n".join(
        [USAGE, "", "== Groups ==", groups, "", "== Configuration ==", OmegaConf.to_yaml(task)]
    )
