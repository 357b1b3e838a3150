"""From the logs of two shallow models to the account of a deep one. Pure: no torch.

Blocks repeat, so live bytes at corresponding moments of an update are linear in the number of
blocks. Moments correspond when they lie in the same stretch, belong to the same operation of the
same module, and that module lies in the same block counted from the first or from the last. In
between, from block to block, bytes are linear too, so that the most is at one of the two ends.
The most of a category, a phase or the whole update is the largest over all moments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from runner.largest import BLOCK
from runner.measure.derive import category, live_after
from runner.measure.live import BEFORE, CATEGORIES, Life, LiveObject, Log

LARGEST = 10


class Moment(NamedTuple):
    """Where an update is: number of the stretch; end and distance from it of the block (`first`,
    `last` or empty); the rest of the place; the operation."""

    stretch: int
    end: str
    distance: int
    place: str
    operation: str


@dataclass(kw_only=True)
class Summit:
    """The most live bytes at a moment: in all, after event number `event`, split by category; and
    most of each category alone."""

    total: int = -1
    event: int = -1
    split: tuple[int, ...] = ()
    most: list[int] = field(default_factory=lambda: [0] * len(CATEGORIES))


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """A live object, and how many of its kind and size there are in all blocks together."""

    item: LiveObject
    count: int

    def __str__(self) -> str:
        return str(self.item) + (f", one of {self.count}" if self.count > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """Where the bytes of an update will be; the names are those of `MemoryAccount`."""

    peak_bytes: int
    peak_phase: str
    start_bytes: int
    at_peak: dict[str, int]
    largest_by_category: dict[str, int]
    peak_by_phase: dict[str, int]
    largest: tuple[Repeated, ...]


def depths(layers: int, period: int) -> tuple[int, int] | None:
    """The two numbers of blocks to trace for a model of `layers`; None where all of them are as
    few. Both leave, in steps of `period`, no remainder to the model's own."""
    least = 2 * reach(period) - 1
    low = least + (layers - least) % period
    high = low + period
    return None if layers <= high else (low, high)


def reach(period: int) -> int:
    """Blocks from either end that are looked at: one that is like no other, and a period."""
    return period + 1


def foreseen(low: Log | None, high: Log, *, layers: Sequence[int], period: int = 1) -> Foreseen:
    """The account of a model of `layers[2]` blocks from the logs of `layers[0]` and `layers[1]`
    blocks; of the second as it is where there is no first."""
    few, many, all_of_them = layers
    upper = summits(high, many, reach(period))
    lower = upper if low is None else summits(low, few, reach(period))
    steps = 0.0 if low is None else (all_of_them - many) / (many - few)

    def at(below: float, above: float) -> int:
        return round(above + (above - below) * steps)

    both = [moment for moment in upper if moment in lower]
    peak = max(both, key=lambda moment: at(lower[moment].total, upper[moment].total))
    split = zip(lower[peak].split, upper[peak].split, strict=True)
    phases: dict[str, int] = {}
    for moment in both:
        phase = high.stretches[moment.stretch]
        found = at(lower[moment].total, upper[moment].total)
        phases[phase] = max(found, phases.get(phase, 0))
    start = [sum(event.delta for event in log.before) for log in (low or high, high)]
    at_peak = dict(zip(CATEGORIES, (at(*pair) for pair in split), strict=True))
    return Foreseen(
        peak_bytes=sum(at_peak.values()),
        peak_phase=high.stretches[peak.stretch],
        start_bytes=at(*start),
        at_peak=at_peak,
        largest_by_category={
            name: max(at(lower[moment].most[i], upper[moment].most[i]) for moment in both)
            for i, name in enumerate(CATEGORIES)
        },
        peak_by_phase=phases,
        largest=tuple(
            repeated(
                objects(low or high, (lower if low else upper)[peak].event),
                objects(high, upper[peak].event),
                at,
            )
        ),
    )


def summits(log: Log, layers: int, edge: int) -> dict[Moment, Summit]:
    """The most of every moment of a log. Bytes rise at births only, so those are looked at; the
    start of a stretch is a moment of its own."""
    kinds = {life: CATEGORIES.index(category(life, log)) for life in lives(log)}
    now = [0] * len(CATEGORIES)
    for event in log.before:
        if event.life is not None:
            now[kinds[event.life]] += event.delta
    found: dict[Moment, Summit] = {}
    for number, event in enumerate(log.events):
        if event.life is not None:
            now[kinds[event.life]] += event.delta
        if event.life is not None and event.delta <= 0:
            continue
        total = sum(now)
        for moment in moments(event.life, event.stretch, layers, edge):
            summit = found.setdefault(moment, Summit())
            if total > summit.total:
                summit.total, summit.event, summit.split = total, number, tuple(now)
            summit.most = [max(pair) for pair in zip(summit.most, now, strict=True)]
    return found


def lives(log: Log) -> set[Life]:
    """Every storage of a log."""
    return {event.life for event in log if event.life is not None}


def moments(life: Life | None, stretch: int, layers: int, edge: int) -> Iterator[Moment]:
    """The moments of a birth: by its block's distance from the first and from the last, if the
    block is near; one for what lies in no block."""
    if life is None:
        yield Moment(stretch, "", 0, "", "")
        return
    where = life.where or life.label
    operation = life.label if life.where else ""
    block = BLOCK.search(where)
    if block is None:
        yield Moment(stretch, "", 0, where, operation)
        return
    number = int(block[1])
    place = general(where)
    if number < edge:
        yield Moment(stretch, "first", number, place, operation)
    if layers - 1 - number < edge:
        yield Moment(stretch, "last", layers - 1 - number, place, operation)


def general(path: str) -> str:
    """A module path or parameter name for whichever block."""
    return BLOCK.sub("blocks.*", path)


# --- objects ----------------------------------------------------------------------------------


def objects(log: Log, event: int) -> dict[LiveObject, int]:
    """The live objects after an event, those of all blocks as one, and how many there are."""
    found: Counter[LiveObject] = Counter()
    for life, size in live_after(log, event).items():
        found[
            LiveObject(
                bytes=size,
                shape=life.shape,
                dtype=life.dtype,
                name=general(life.label),
                where=general(life.where),
                category=category(life, log),
                birth=BEFORE if life.birth < 0 else log.stretches[life.birth],
                death=None if life.death is None else log.stretches[life.death],
            )
        ] += 1
    return found


def repeated(
    below: Mapping[LiveObject, int], above: Mapping[LiveObject, int], at: Any
) -> list[Repeated]:
    """The largest objects of the deep model, largest first."""
    ordered = sorted(above, key=lambda item: -item.bytes)[:LARGEST]
    return [
        Repeated(item=replace(item), count=max(1, at(below.get(item, 0), above[item])))
        for item in ordered
    ]
