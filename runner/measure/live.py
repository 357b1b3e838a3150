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

HEAD = "head"
"""Where the forward pass is when it has left the model: head and loss."""

ACTIVATIONS = ("saved_activations", "temporaries")

CUDA_BLOCK = 512
"""CUDA's caching allocator hands out multiples of so many bytes (`kMinBlockSize`)."""

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

    @property
    def kind(self) -> str:
        """Which of OBJECTS it is: what a lever must reduce to make it smaller."""
        if self.where == HEAD and self.category in ACTIVATIONS and len(self.shape) > 1:
            return "logits"
        square = len(self.shape) > 2 and self.shape[-1] == self.shape[-2]
        by_head = len(self.shape) == 4 or self.name in ("bmm", "baddbmm")
        if square and by_head and self.category in ACTIVATIONS:
            return "scores"
        return self.category

    def __str__(self) -> str:
        place = f" in {self.where}" if self.where else ""
        return f"{self.category}: {self.name} {self.shape} {self.dtype}{place}"


@dataclass(frozen=True, kw_only=True)
class Retained:
    """What the layers keep between the forward and the backward pass of one micro-batch.

    layers, rows, length, width, heads: L, B, T, d and H of specification equation 7.2.
    n_hidden, n_score: elements kept by a layer over B T d, those of (T, T) tensors over B H T^2:
    means over the layers, as the model ran. bytes: kept by all layers for their tokens.
    other_bytes: kept beside that and no larger for more tokens, such as copies of the weights in
    the format of a product. estimate: bytes by equation 7.3 with these counts and
    `element_bytes` (b) for every element; where it differs from `bytes`, not every element has
    that size.
    """

    layers: int
    rows: int
    length: int
    width: int
    heads: int
    n_hidden: float
    n_score: float
    bytes: int
    other_bytes: int
    element_bytes: int
    estimate: float


@dataclass(frozen=True, kw_only=True)
class MemoryAccount:
    """Where the bytes of one whole update were.

    All figures are bytes of storages, each counted once; on CUDA in the allocator's multiples, and
    what it held besides when the update began is unattributed.
    peak_bytes: most that were live at once, what existed before included; peak_phase: when.
    start_bytes: live before the update. at_peak: by category, sums to `peak_bytes`.
    largest_by_category: each category's own maximum, whenever that was.
    peak_by_phase: most bytes live within each phase that occurred.
    largest: the largest live objects at the peak. curve: live bytes over the events of the
    update, as (event, bytes, phase), thinned to each bucket's maximum; by_category: the same
    points split by category, which sum to the curve's. at_boundaries: the phases of the update in
    order, each with the bytes of every category when it ended.
    retained: what one layer keeps for its backward pass, or None where that cannot be told.
    scaled: 1, or the factor by which peak, `at_peak` and `largest` were multiplied because the
    update itself did not fit.
    """

    peak_bytes: int
    peak_phase: str
    start_bytes: int
    at_peak: dict[str, int]
    largest_by_category: dict[str, int]
    peak_by_phase: dict[str, int]
    largest: tuple[LiveObject, ...]
    curve: tuple[tuple[int, int, str], ...]
    by_category: dict[str, tuple[int, ...]]
    at_boundaries: tuple[tuple[str, dict[str, int]], ...] = ()
    retained: Retained | None = None
    scaled: float = 1.0

    @property
    def largest_live_object(self) -> str:
        """The largest live object at the peak, readable."""
        return str(self.largest[0]) if self.largest else "nothing"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {
            "largest": [asdict(item) | {"text": str(item)} for item in self.largest],
            "largest_live_object": self.largest_live_object,
            "largest_kind": self.largest[0].kind if self.largest else None,
            "curve": [list(point) for point in self.curve],
            "by_category": {name: list(points) for name, points in self.by_category.items()},
            "at_boundaries": [[phase, held] for phase, held in self.at_boundaries],
        }
