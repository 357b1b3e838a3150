"""Which levers would make the largest live object smaller (specification table 7.2).

Levers are found in the folders of `conf/memory`, and each says itself what it reduces. One that
does not reduce the object, that conflicts with the rest of the job, or that this device cannot do
is never named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from runner.accounting import divisors
from runner.config import build, conf_dir, levers_of
from runner.contracts import Description, Lever, Recipe, UserError

if TYPE_CHECKING:
    import torch

OF_A_MICRO_BATCH = ("saved_activations", "scores", "logits", "temporaries", "inputs")
"""Objects that a smaller micro-batch makes smaller."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a lever as it is typed, with its configuration and the built lever."""

    group: str
    name: str
    node: Mapping[str, Any]
    lever: Lever

    @property
    def words(self) -> str:
        """As typed on the command line."""
        return f"memory/{self.group}={self.name}"

    def within(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The job's config with this option in it."""
        return {**config, "memory": {**config["memory"], self.group: self.node}}


def options() -> Iterator[Option]:
    """Every shipped option of every memory lever."""
    for path in sorted((conf_dir() / "memory").glob("*/*.yaml")):
        node = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(node, dict)
        group, name = path.parent.name, path.stem
        named = {str(key): value for key, value in node.items()}
        lever = build(named, key=f"memory.{group}")
        yield Option(group=group, name=name, node=named, lever=lever)


def possible(option: Option, config: Mapping[str, Any]) -> bool:
    """Whether the job could have the option, as far as configuration tells."""
    changed = option.within(config)
    try:
        levers = [build(n, key=k, allow=config["allow"]) for k, n in levers_of(changed["memory"])]
    except UserError:
        return False
    return not any(lever.conflicts(changed) for lever in levers)


def levers_against(
    kind: str,
    config: Mapping[str, Any],
    *,
    description: Description,
    recipe: Recipe,
    device: torch.device,
) -> list[str]:
    """What to type to make an object of this kind smaller, cheapest in arithmetic first.

    kind: of the largest live object, see `runner.measure.live.LiveObject.kind`.
    """
    found = [
        option.words
        for option in options()
        if kind in option.lever.reduces()
        and option.node != config["memory"].get(option.group)
        and possible(option, config)
        and not option.lever.refusal(description, recipe, device)
    ]
    smaller = [n for n in divisors(config["batch"]) if n > config["accum"]]
    if kind in OF_A_MICRO_BATCH and smaller:
        found.append(f"accum={smaller[0]}")
    return found
