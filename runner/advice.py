"""What would make the largest live object smaller (specification table 7.2).

Levers are found in the folders of `conf/memory`, recipes in `conf/precision`. Each lever says
itself what it leaves of an object, a recipe declares its formats. What would not make the object
smaller in this job, conflicts with the rest of it, or cannot be had on this device is never named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from runner.accounting import divisors
from runner.checks import Parts, check
from runner.config import build, conf_dir
from runner.contracts import Description, Lever, Recipe
from runner.largest import Largest
from runner.measure.live import MemoryAccount

if TYPE_CHECKING:
    import torch

OF_A_MICRO_BATCH = ("saved_activations", "scores", "temporaries", "inputs")
"""Kinds of objects that may grow with the micro-batch; logits are the loss lever's."""

ROLES = {"parameters": "storage", "gradients": "storage", "optimizer_state": "state"}
"""Role of the declared format that an object of a kind is stored in."""
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
"""Operations whose results are in the declared format of products."""
HALF = ("bf16", "fp16")


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
        node, group = node_of(path), path.parent.name
        lever = build(node, key=f"memory.{group}")
        yield Option(group=group, name=path.stem, node=node, lever=lever)


def node_of(path: Path) -> dict[str, Any]:
    """The configuration in a file of the shipped YAML."""
    node = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


def largest_of(
    account: MemoryAccount, config: Mapping[str, Any], description: Description
) -> Largest | None:
    """The largest live object of an account, with what levers need to know of its job; None where
    nothing was alive."""
    if not account.largest:
        return None
    item = account.largest[0]
    kept = account.retained
    rows = config["batch"] // config["accum"] if kept is None else kept.rows
    length = config["seq_len"] if kept is None else kept.length
    return Largest(
        kind=item.kind,
        name=item.name,
        where=item.where,
        bytes=item.bytes,
        shape=item.shape,
        dtype=item.dtype,
        phase=account.peak_phase,
        layers=description.layers,
        width=description.width,
        vocab=description.vocab,
        accum=config["accum"],
        rows=rows,
        length=length,
        slots=round(rows * length * account.scaled),
    )


def smaller_with(
    found: Largest,
    config: Mapping[str, Any],
    parts: Parts,
    device: torch.device,
    lacking: Callable[[Recipe], str | None],
) -> list[str]:
    """What to type to make an object smaller: levers, then recipes, then an accumulation.

    lacking: why the device has no native arithmetic for a recipe, or None.
    """
    named = [
        *levers_against(found, config, parts, device),
        *recipes_against(found, config, lacking),
    ]
    accum = config["accum"]
    more = (n for n in divisors(config["batch"]) if n > accum)
    enough = next((n for n in more if shrinks(found, parts, accum / n)), None)
    return named if enough is None else [*named, f"accum={enough}"]


def levers_against(
    found: Largest, config: Mapping[str, Any], parts: Parts, device: torch.device
) -> list[str]:
    """The options that leave less of an object than the lever of their group that is pulled."""
    description = parts.model.describe()
    return [
        option.words
        for option in options()
        if option.lever.leaves(found) < left_by(parts.levers.get(f"memory.{option.group}"), found)
        and not check(option.within(config))
        and not option.lever.refusal(description, parts.precision, device)
    ]


def left_by(lever: Any, found: Largest) -> float:
    """What the lever that is pulled leaves of an object; all where there is none."""
    return 1.0 if lever is None else float(lever.leaves(found))


def recipes_against(
    found: Largest, config: Mapping[str, Any], lacking: Callable[[Recipe], str | None]
) -> list[str]:
    """The recipes that store an FP32 object in 16 bits, by their declared formats."""
    named = []
    for path in sorted((conf_dir() / "precision").glob("*.yaml")):
        node = node_of(path)
        recipe = build(node, key="precision")
        changed = {**config, "precision": node}
        if halves(recipe, found) and not check(changed) and not lacking(recipe):
            named.append(f"precision={path.stem}")
    return named


def halves(recipe: Recipe, found: Largest) -> bool:
    """Whether a recipe stores an object in 16 bits that is in 32 as it is: parameters, gradients
    and optimizer state by their declared format, and what a block keeps of its products, the
    largest of what it keeps, by the format that products have."""
    product = found.kind == "saved_activations" and found.of_a_block and found.name in PRODUCTS
    role = "compute" if product else ROLES.get(found.kind)
    return found.dtype == "float32" and role is not None and recipe.formats[role] in HALF


def shrinks(found: Largest, parts: Parts, share: float) -> bool:
    """Whether an object is smaller in micro-batches that have that share of the examples."""
    if found.kind != "logits":
        return found.kind in OF_A_MICRO_BATCH and found.of_a_micro_batch
    loss = parts.levers.get("memory.loss")

    def positions(slots: int) -> int:
        return round(slots * left_by(loss, replace(found, slots=slots)))

    fewer = max(1, round(found.slots * share))
    return found.of_logits and positions(fewer) < positions(found.slots)
