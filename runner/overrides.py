"""The typed overrides: named experiments added, repeats put first, sweeps made explicit."""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.hydra import Hydra
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from runner.contracts import Fault, UserError
from runner.door import parse

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


def refuse_sweep_without_flag(overrides: Sequence[Override], multirun: bool) -> None:
    """Raise UserError for several values of a key in a command that is no sweep."""
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
