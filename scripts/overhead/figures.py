"""Turns to ratios, and ratios to a table. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from runner.accounting import percentile

BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"
BARE, CONTROL, RUNNER = "bare", "again", "runner"
LABELS = {
    BARE: "bare loop",
    CONTROL: "bare loop again (control)",
    RUNNER: "this runner, everything on",
    "trainer": "Hugging Face Trainer",
    "lightning": "Lightning",
}
TOLERANCE = 1e-5
"""Largest difference of a loss from the bare loop's, in nats."""
LAG = 2
"""Losses of its last updates that a framework which reads ahead may not have reported yet."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a contestant did when it was its turn.

    wall, cpu: seconds of each update, by the clock and of the process (all its threads).
    losses: of every update so far, the first turn's included.
    """

    wall: Sequence[float]
    cpu: Sequence[float]
    losses: Sequence[float]


Block = Mapping[str, Turn]
"""A turn of every contestant."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contestant's figures.

    wall: seconds of every counted update. ratios: of each round, the median of its blocks' ratios
    of median updates to the bare loop's. The processes of a round have a memory layout, and with
    it a speed, of their own: rounds are independent of each other, the blocks of one are not.
    cpu_ratio: processor time over the bare loop's, total over total.
    """

    name: str
    wall: Sequence[float]
    ratios: Sequence[float]
    cpu_ratio: float


def rows_of(rounds: Sequence[Sequence[Block]]) -> list[Row]:
    """A row per contestant, from the blocks of each round."""
    names = list(rounds[0][0])
    turns = {name: [block[name] for blocks in rounds for block in blocks] for name in names}
    cpu = {name: sum(sum(counted(turn.cpu)) for turn in turns[name]) for name in names}
    return [
        Row(
            name=name,
            wall=[seconds for turn in turns[name] for seconds in counted(turn.wall)],
            ratios=[median(ratio(block, name) for block in blocks) for blocks in rounds],
            cpu_ratio=cpu[name] / cpu[BARE],
        )
        for name in names
    ]


def ratio(block: Block, name: str) -> float:
    """A contestant's median update of a block over the bare loop's."""
    return median(counted(block[name].wall)) / median(counted(block[BARE].wall))


def counted(updates: Sequence[float]) -> Sequence[float]:
    """Those of a turn that count: the first follows a change of process and is left out, unless
    turns are of one update, long enough for that not to matter, and alike for everybody."""
    return updates[1:] or updates


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Order statistics that enclose the median of the population with at least 95 % confidence,
    whatever its distribution (sign test). Below 6 values they are the extremes, which enclose
    it with less."""
    ordered = sorted(values)
    count, cut = len(ordered), 0
    tail = 0.5**count + math.comb(count, 1) * 0.5**count
    while tail <= 0.025:
        cut += 1
        tail += math.comb(count, cut + 1) * 0.5**count
    return ordered[cut], ordered[count - 1 - cut]


def difference(losses: Mapping[str, Sequence[float]], updates: int) -> float:
    """Largest difference of any loss from the bare loop's of the same update, in nats.

    Raises ValueError when it is over TOLERANCE, or a contestant reported too few.
    """
    worst = 0.0
    for name, own in losses.items():
        if len(own) < updates - LAG:
            raise ValueError(f"{name} reported {len(own)} losses of {updates} updates")
        for mine, bare in zip(own, losses[BARE], strict=False):
            apart = abs(mine - bare)
            if not apart <= TOLERANCE:  # nor when it is not a number
                raise ValueError(f"{name} differs from the bare loop by {apart:.3g} nats")
            worst = max(worst, apart)
    return worst


def table(name: str, rows: Sequence[Row]) -> str:
    """A Markdown table of one workload."""
    lines = [
        f"| {name} | update, median | p90 | over the bare loop | rounds | processor time |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    return "\n".join([*lines, *map(line, rows)])


def line(row: Row) -> str:
    """One row in Markdown."""
    cells = [
        LABELS[row.name],
        f"{median(row.wall) * 1e3:.2f} ms",
        f"{percentile(row.wall, 90) * 1e3:.2f} ms",
    ]
    if row.name == BARE:
        cells += ["1", "", "1"]
    else:
        low, high = interval(row.ratios)
        cells += [
            f"{median(row.ratios):.3f} ({low:.3f} to {high:.3f})",
            f"{min(row.ratios):.3f} to {max(row.ratios):.3f}",
            f"{row.cpu_ratio:.3f}",
        ]
    return f"| {' | '.join(cells)} |"


def write_between(path: Path, text: str) -> None:
    """Replace what stands between the markers. Raises ValueError where they are not, once each
    and in order; nothing is written then."""
    old = path.read_text(encoding="utf-8")
    if old.count(BEGIN) != 1 or old.count(END) != 1 or old.index(BEGIN) > old.index(END):
        raise ValueError(f"{path} does not hold {BEGIN} and {END} once each, in this order")
    before, _, rest = old.partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
