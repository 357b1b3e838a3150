"""The memory account: what was live when, derived from a log of births and deaths.

Pure: no torch here. The log is kept by `runner.measure.account`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

CURVE_POINTS = 400
"""Most points of the curve of live bytes that a record carries."""

LARGEST = 10
"""How many live objects at the peak a record names."""


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


def account_of(log: Log) -> MemoryAccount:
    """Derive every figure of the account from the log."""
    totals = running_totals(log)
    peak = max(range(len(totals)), key=totals.__getitem__, default=-1)
    start = sum(event.delta for event in log.before)
    phases = [log.stretches[event.stretch] for event in log.events]
    live = live_after(log, peak)
    at_peak = dict.fromkeys(CATEGORIES, 0)
    for life, size in live.items():
        at_peak[category(life, log)] += size
    return MemoryAccount(
        peak_bytes=totals[peak] if totals else start,
        peak_phase=phases[peak] if totals else "other",
        start_bytes=start,
        at_peak=at_peak,
        largest_by_category=category_maxima(log),
        peak_by_phase=phase_maxima(totals, phases),
        largest=largest_objects(live, log),
        curve=thinned(totals, phases),
    )


def category(life: Life, log: Log) -> str:
    """What a storage was for, judged by its whole life."""
    if life.role is not None:
        return life.role
    kept = life.packed or (life.recomputed and life.outlived) or spans_backward(life, log)
    return "saved_activations" if kept else "temporaries"


def spans_backward(life: Life, log: Log) -> bool:
    """Whether it was made in a forward pass and died in the backward pass that followed.

    That is what is kept for backward, also where a lever's own hooks keep it (offloading keeps
    copies). What outlives that backward pass is held by something else.
    """
    if life.death is None or log.stretches[life.birth] != "forward":
        return False
    between = log.stretches[life.birth + 1 : life.death + 1]
    return between.count("backward") == 1 and between[-1] == "backward"


def running_totals(log: Log) -> list[int]:
    """Live bytes after each event."""
    total = sum(event.delta for event in log.before)
    totals = []
    for event in log.events:
        total += event.delta
        totals.append(total)
    return totals


def live_after(log: Log, place: int) -> dict[Life, int]:
    """Bytes of each storage live after event number `place`; -1 for the start."""
    live: dict[Life, int] = {}
    for event in (*log.before, *log.events[: place + 1]):
        if event.life is not None:
            live[event.life] = live.get(event.life, 0) + event.delta
    return {life: size for life, size in live.items() if size}


def category_maxima(log: Log) -> dict[str, int]:
    """Most bytes of each category that were live at once."""
    now = dict.fromkeys(CATEGORIES, 0)
    for event in log.before:
        if event.life is not None:
            now[category(event.life, log)] += event.delta
    most = dict(now)
    for event in log.events:
        if event.life is not None:
            name = category(event.life, log)
            now[name] += event.delta
            most[name] = max(most[name], now[name])
    return most


def phase_maxima(totals: Sequence[int], phases: Sequence[str]) -> dict[str, int]:
    """Most live bytes within each phase."""
    most: dict[str, int] = {}
    for total, phase in zip(totals, phases, strict=True):
        most[phase] = max(most.get(phase, 0), total)
    return most


def largest_objects(live: dict[Life, int], log: Log) -> tuple[LiveObject, ...]:
    """The largest of the live storages, largest first, ties in order of birth."""
    ordered = sorted(live.items(), key=lambda item: -item[1])[:LARGEST]
    return tuple(
        LiveObject(
            bytes=size,
            shape=life.shape,
            dtype=life.dtype,
            name=life.label,
            where=life.where,
            category=category(life, log),
            birth=BEFORE if life.birth < 0 else log.stretches[life.birth],
            death=None if life.death is None else log.stretches[life.death],
        )
        for life, size in ordered
    )


def thinned(totals: Sequence[int], phases: Sequence[str]) -> tuple[tuple[int, int, str], ...]:
    """At most CURVE_POINTS points, each the maximum of its bucket, so that the peak stays."""
    size = -(-len(totals) // CURVE_POINTS) or 1
    starts = range(0, len(totals), size)
    tops = [max(range(i, min(i + size, len(totals))), key=totals.__getitem__) for i in starts]
    return tuple((top, totals[top], phases[top]) for top in tops)
