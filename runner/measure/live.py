"""The log of births and deaths of storages, and the memory account that is derived from it.

Data only, no torch. `runner.measure.storages` writes the log, `runner.measure.derive` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "saved_activations",
    "inputs",
    "temporaries",
    "unattributed",
)
"""What live bytes are for. `parameters` includes buffers; `unattributed` existed before the
update and belongs to nothing that the account was told of."""

BEFORE = "before"
"""Birth phase of what existed before the update."""


@dataclass(kw_only=True, eq=False)
class Life:
    """One storage, from birth to death; written by the tracker while it watches.

    label: what made it, or a parameter's name. where: module path, or empty.
    role: a category that the tracker knows from identity, or None.
    packed: kept by autograd for the backward pass. recomputed: made in a backward pass with
    gradients on, that is by recomputation; outlived: and still there when that was over.
    birth, death: numbers of the stretches (see `Log`) it was born and died in; death None if it
    survived the update; birth is -1 for what existed before it.
    """

    shape: tuple[int, ...]
    dtype: str
    label: str
    where: str
    birth: int
    role: str | None = None
    packed: bool = False
    recomputed: bool = False
    outlived: bool = True
    death: int | None = None


class Event(NamedTuple):
    """The live bytes of one storage changed by `delta` in stretch number `stretch`; a `life` of
    None marks the start of a stretch."""

    life: Life | None
    delta: int
    stretch: int


@dataclass(kw_only=True, eq=False)
class Log:
    """What happened during one update.

    stretches: phase of each stretch between two phase boundaries, in order; number 0 is before
    the first boundary. before: storages that existed before the update, with their bytes.
    events: in the order they happened.
    """

    stretches: list[str]
    before: list[Event]
    events: list[Event]

    def __iter__(self) -> Iterator[Event]:
        yield from self.before
        yield from self.events


@dataclass(frozen=True, kw_only=True)
class LiveObject:
    """A storage that was live at the peak.

    bytes: then. shape, dtype: of the tensor that it was made for. name: the operation that made
    it, or a parameter's name. where: module path it was made in, `head` behind the model, or
    empty. birth, death: phases; birth is `before` for what existed before the update, death None
    for what survived it.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    name: str
    where: str
    category: str
    birth: str
    death: str | None

    def __str__(self) -> str:
        place = f" in {self.where}" if self.where else ""
        return f"{self.category}: {self.name} {self.shape} {self.dtype}{place}"


@dataclass(frozen=True, kw_only=True)
class MemoryAccount:
    """Where the bytes of one whole update were.

    All figures are bytes of storages, each counted once, without the allocator's rounding.
    peak_bytes: most that were live at once, what existed before included; peak_phase: when.
    start_bytes: live before the update. at_peak: by category, sums to `peak_bytes`.
    largest_by_category: each category's own maximum, whenever that was.
    peak_by_phase: most bytes live within each phase that occurred.
    largest: the largest live objects at the peak. curve: live bytes over the events of the
    update, as (event, bytes, phase), thinned to each bucket's maximum.
    """

    peak_bytes: int
    peak_phase: str
    start_bytes: int
    at_peak: dict[str, int]
    largest_by_category: dict[str, int]
    peak_by_phase: dict[str, int]
    largest: tuple[LiveObject, ...]
    curve: tuple[tuple[int, int, str], ...]

    @property
    def largest_live_object(self) -> str:
        """The largest live object at the peak, readable."""
        return str(self.largest[0]) if self.largest else "nothing"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {
            "largest": [asdict(item) | {"text": str(item)} for item in self.largest],
            "largest_live_object": self.largest_live_object,
            "curve": [list(point) for point in self.curve],
        }
