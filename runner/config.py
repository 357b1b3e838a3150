"""From configuration to objects: the typed root, and `build`, the only place that does it.

A part is a frozen dataclass named by a node's `_target_`; its fields are the node's keys. Types
are checked by OmegaConf on the part's own annotations, so that `block=abc` for an `int` is
refused by name before anything runs. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.contracts import Fault, UserError

TARGET = "_target_"
OWN_PACKAGES = ("runner", "models")


@dataclass
class EvalConf:
    """Held-out evaluation. `every`: applied updates between two evaluations, None for only
    before the first and after the last. `examples`: at most so many held-out examples."""

    every: int | None = None
    examples: int = 512


@dataclass
class CheckpointConf:
    """What is kept of the weights. `final`: whether the last ones are written to the folder."""

    final: bool = True


@dataclass
class NumericsConf:
    """What a recipe does to the numbers. `probe`: output and gradients against FP32, before the
    first update. `every`: applied updates between looks at what rounding does, None for never."""

    probe: bool = True
    every: int | None = None


@dataclass
class QualityConf:
    """The quality check: `margin` in nats, `confidence` of the t bound, `min_effect` of a win."""

    margin: float = 0.01
    confidence: float = 0.95
    min_effect: float = 0.01


@dataclass
class CompareConf:
    """How a sweep is compared. `tune`: swept keys of which each setup gets its best value."""

    tune: list[str] = field(default_factory=list)


@dataclass
class PlanConf:
    """What `python -m runner.plan` plans for. `device`: auto, cpu, cuda or a GPU by name; `memory`:
    of the device, a size such as 24GiB, None for what the named device has. `predict`: whether a
    run carries its own prediction beside what was measured."""

    device: str = "auto"
    memory: str | None = None
    predict: bool = True


@dataclass
class Root:
    """The typed root of a job's configuration. Groups are open here and typed by their part."""

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    batching: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    tracking: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    batch: int = 16
    accum: Any = 1
    updates: int | None = 80
    epochs: int | None = None
    warmup: int = 5
    seed: int = 0
    seq_len: int = 128
    device: str = "auto"
    emulate: bool = False
    compile: str = "off"
    profile: bool = False
    skip_finished: bool = False
    process: str = "fresh"
    cache: str = "~/.cache/fullstep"
    clip: float | None = 1.0
    memory_limit: str | None = None
    allow: list[str] = field(default_factory=list)
    eval: EvalConf = field(default_factory=EvalConf)
    compare: CompareConf = field(default_factory=CompareConf)
    quality: QualityConf = field(default_factory=QualityConf)
    numerics: NumericsConf = field(default_factory=NumericsConf)
    checkpoint: CheckpointConf = field(default_factory=CheckpointConf)
    plan: PlanConf = field(default_factory=PlanConf)


SHORT_LIST = 20
"""As many allowed words are all named; of more, only the close ones."""


def nearest(word: str, words: Iterable[str]) -> str:
    """The known words for a message, the closest to `word` first where there is a close one."""
    known = sorted(words)
    close = difflib.get_close_matches(word, known, n=3)
    if len(known) > SHORT_LIST:
        listed = " or ".join(close) if close else "none that is close"
        return f"{listed} ({len(known)} in all; python -m runner --cfg job lists them)"
    if close:
        return f"{close[0]} (nearest), of {', '.join(known)}"
    return ", ".join(known)


def part_class(target: str, *, key: str, allow: Sequence[str] = ()) -> type[Any]:
    """The class that `_target_` names.

    Raises UserError when it lies outside `runner.`, `models.` and the packages in `allow`, does
    not exist, or is not a dataclass.
    """
    packages = (*OWN_PACKAGES, *allow)
    module_name, _, name = target.rpartition(".")
    if target.split(".")[0] not in packages or not module_name:
        raise UserError(
            Fault(
                key=f"{key}.{TARGET}",
                given=target,
                allowed=f"a class in {', '.join(f'{p}.' for p in packages)}",
                next_step="name your package in the config: allow=[my_package]",
            )
        )
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise UserError(
            Fault(
                key=f"{key}.{TARGET}",
                given=target,
                allowed="the dotted name of a dataclass that can be imported",
                next_step=f"check the name ({error})",
            )
        ) from error
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise UserError(
            Fault(
                key=f"{key}.{TARGET}",
                given=target,
                allowed="a dataclass",
                next_step="make the part a frozen dataclass whose fields are its settings",
            )
        )
    return found


def build(node: Mapping[str, Any], *, key: str, allow: Sequence[str] = ()) -> Any:
    """The part that a config node describes. `key` is the node's place, for messages. A field
    whose node has a `_target_` of its own is a part within the part.

    Raises UserError naming the full key for an unknown field, a wrong type, a missing value or a
    value that the part itself refuses.
    """
    if not isinstance(node, Mapping) or TARGET not in node:
        raise UserError(
            Fault(
                key=key,
                given=str(node),
                allowed=f"an option of the group, or a node with {TARGET}",
                next_step=f"choose one: {key.replace('.', '/')}=NAME",
            )
        )
    cls = part_class(node[TARGET], key=key, allow=allow)
    return _filled(cls, {k: v for k, v in node.items() if k != TARGET}, key=key, allow=allow)


def _filled(cls: type[Any], values: Mapping[str, Any], *, key: str, allow: Sequence[str]) -> Any:
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls) if f.init]
    faults = [unknown_key(f"{key}.{name}", names) for name in values if name not in names]
    nested = {n: _inner(hints[n]) for n in names}
    schema = OmegaConf.structured(cls)
    OmegaConf.set_readonly(schema, False)
    arguments: dict[str, Any] = {}
    for name in names:
        if name not in values:
            continue
        try:
            inner = nested[name]
            if isinstance(values[name], Mapping) and TARGET in values[name]:
                arguments[name] = build(values[name], key=f"{key}.{name}", allow=allow)
            elif inner is not None and isinstance(values[name], Mapping):
                arguments[name] = _filled(inner, values[name], key=f"{key}.{name}", allow=allow)
            else:
                arguments[name] = _typed(schema, hints[name], name, values[name], key=key)
        except UserError as error:
            faults.extend(error.faults)
    faults.extend(
        _missing(f"{key}.{f.name}")
        for f in dataclasses.fields(cls)
        if f.init and _required(f) and f.name not in values
    )
    if faults:
        raise UserError(*faults)
    try:
        return cls(**arguments)
    except ValueError as error:
        raise UserError(_refused(key, str(error))) from error


def _inner(hint: Any) -> type[Any] | None:
    """The dataclass that a field holds, seen through `X | None`."""
    options = [a for a in typing.get_args(hint) if a is not NoneType] or [hint]
    for option in options:
        if isinstance(option, type) and dataclasses.is_dataclass(option):
            return option
    return None


def _typed(schema: DictConfig, hint: Any, name: str, value: Any, *, key: str) -> Any:
    """One field's value, checked and converted by OmegaConf on the annotation in the schema."""
    fault = Fault(
        key=f"{key}.{name}",
        given=repr(value),
        allowed=readable(hint),
        next_step=f"give {key}.{name}={readable(hint)}",
    )
    options = typing.get_args(hint) or (hint,)
    if isinstance(value, bool) and bool not in options and Any not in options:
        raise UserError(fault)
    try:
        schema[name] = value
        found: Any = schema[name]
        if OmegaConf.is_config(found):
            found = OmegaConf.to_container(found, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(fault) from error
    if typing.get_origin(hint) is not tuple:
        return found
    if len(found) != len(options) and Ellipsis not in options:
        raise UserError(fault)
    return tuple(found)


def readable(hint: Any) -> str:
    """A type annotation as a user would write it."""
    if typing.get_origin(hint) is None and isinstance(hint, type):
        return hint.__name__
    return str(hint).replace("typing.", "").replace("NoneType", "null").replace("None", "null")


def _required(entry: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return entry.default is missing and entry.default_factory is missing


def unknown_key(key: str, names: Sequence[str]) -> Fault:
    """The fault of a key that its place does not have."""
    return Fault(
        key=key,
        given="an unknown key",
        allowed=nearest(key.rpartition(".")[2], names),
        next_step="correct or remove it",
    )


def _missing(key: str) -> Fault:
    return Fault(key=key, given="nothing", allowed="a value", next_step=f"give {key}=VALUE")


def _refused(key: str, message: str) -> Fault:
    """The fault of a part that refused a value with `field: given ...; allowed: ...`."""
    field_name, separator, rest = message.partition(": ")
    given, _, allowed = rest.partition("; allowed: ")
    if not separator or not allowed:
        return Fault(key=key, given="these values", allowed=message, next_step="correct them")
    return Fault(
        key=f"{key}.{field_name}",
        given=given.removeprefix("given "),
        allowed=allowed,
        next_step=f"give an allowed {key}.{field_name}",
    )


def levers_of(memory: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The lever nodes of a config with their keys, in the listing's order."""
    return [(f"memory.{name}", node) for name, node in sorted(memory.items())]


def conf_dir() -> Path:
    """The folder of the shipped YAML, beside the packages."""
    return Path(__file__).resolve().parent.parent / "conf"
