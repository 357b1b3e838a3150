"""From the log of births and deaths to every figure of the account. Pure: no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from runner.accounting import activation_bytes
from runner.measure.live import (
    BEFORE,
    CATEGORIES,
    Life,
    LiveObject,
    Log,
    MemoryAccount,
    Retained,
)

CURVE_POINTS = 400
"""Most points of the curve of live bytes that a record carries."""

LARGEST = 10
"""How many live objects at the peak a record names."""


def account_of(log: Log, shapes: LayerShapes | None = None) -> MemoryAccount:
    """Derive every figure of the account from the log; what a layer keeps needs the shapes."""
    totals = running_totals(log)
    peak = max(range(len(totals)), key=totals.__getitem__, default=-1)
    start = sum(event.delta for event in log.before)
    phases = [log.stretches[event.stretch] for event in log.events]
    tops = thinned(totals)
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
        curve=tuple((top, totals[top], phases[top]) for top in tops),
        by_category=split(log, tops),
        at_boundaries=boundaries(log),
        retained=None if shapes is None else retained(log, shapes),
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


def thinned(totals: Sequence[int]) -> list[int]:
    """At most CURVE_POINTS events, each with the maximum of its bucket, so that the peak stays."""
    size = -(-len(totals) // CURVE_POINTS) or 1
    starts = range(0, len(totals), size)
    return [max(range(i, min(i + size, len(totals))), key=totals.__getitem__) for i in starts]


def split(log: Log, places: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Live bytes of each category after the events at `places`, which ascend."""
    now = dict.fromkeys(CATEGORIES, 0)
    for event in log.before:
        if event.life is not None:
            now[category(event.life, log)] += event.delta
    wanted = set(places)
    points: list[tuple[int, ...]] = []
    for number, event in enumerate(log.events):
        if event.life is not None:
            now[category(event.life, log)] += event.delta
        if number in wanted:
            points.append(tuple(now.values()))
    columns = zip(*points, strict=True) if points else ((),) * len(CATEGORIES)
    return dict(zip(CATEGORIES, columns, strict=True))


def boundaries(log: Log) -> tuple[tuple[str, dict[str, int]], ...]:
    """Each stretch's phase and the live bytes of each category at its end; what was before the
    first boundary is no stretch of the update."""
    now = dict.fromkeys(CATEGORIES, 0)
    ends: list[tuple[str, dict[str, int]]] = []
    for event in log:
        if event.life is None:
            ends.append((log.stretches[event.stretch - 1], dict(now)))
        else:
            now[category(event.life, log)] += event.delta
    return (*ends[1:], (log.stretches[-1], now))


# --- what a layer keeps (specification equation 7.2) ------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LayerShapes:
    """layers, width, heads of the model; grids: (rows, length) of each micro-batch in order;
    path: where layer i lives, up to its number."""

    layers: int
    width: int
    heads: int
    grids: Sequence[tuple[int, int]]
    path: str = "blocks."


def retained(log: Log, shapes: LayerShapes) -> Retained | None:
    """What the layers keep at the end of the forward pass that keeps most."""
    kept: dict[int, dict[Life, int]] = {}
    live: dict[Life, int] = {}
    for event in log.events:
        if event.life is not None:
            live[event.life] = live.get(event.life, 0) + event.delta
        elif log.stretches[event.stretch - 1] == "forward":
            kept[event.stretch - 1] = {
                life: size
                for life, size in live.items()
                if size
                and life.birth == event.stretch - 1
                and life.where.startswith(shapes.path)
                and category(life, log) == "saved_activations"
            }
    if not kept or len(kept) != len(shapes.grids):
        return None
    order = sorted(kept)
    most = max(order, key=lambda stretch: sum(kept[stretch].values()))
    rows, length = shapes.grids[order.index(most)]
    return _retained(kept[most], shapes, rows, length)


def _retained(live: Mapping[Life, int], shapes: LayerShapes, rows: int, length: int) -> Retained:
    tokens = {life: held for life, held in live.items() if of_tokens(life.shape, rows, length)}
    elements = {"hidden": 0, "score": 0}
    sizes: Counter[int] = Counter()
    for life, held in tokens.items():
        square = life.shape[-2:] == (length, length)
        by_head = prod(life.shape[:-2]) == rows * shapes.heads
        elements["score" if square and by_head else "hidden"] += prod(life.shape)
        sizes[held // prod(life.shape)] += held
    hidden, score = rows * length * shapes.width, rows * shapes.heads * length**2
    n_hidden = elements["hidden"] / (shapes.layers * hidden)
    n_score = elements["score"] / (shapes.layers * score)
    usual = max(sizes, key=lambda size: sizes[size], default=0)
    return Retained(
        layers=shapes.layers,
        rows=rows,
        length=length,
        width=shapes.width,
        heads=shapes.heads,
        n_hidden=n_hidden,
        n_score=n_score,
        bytes=sum(tokens.values()),
        other_bytes=sum(live.values()) - sum(tokens.values()),
        element_bytes=usual,
        estimate=activation_bytes(
            element_bytes=usual,
            layers=shapes.layers,
            n_hidden=n_hidden,
            n_score=n_score,
            rows=rows,
            length=length,
            width=shapes.width,
            heads=shapes.heads,
        ),
    )


def of_tokens(shape: Sequence[int], rows: int, length: int) -> bool:
    """Whether a tensor has something for every slot of the micro-batch."""
    return rows * length in shape or (rows in shape and length in shape)
