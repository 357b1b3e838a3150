"""What CUDA's caching allocator says of each update's memory, beside the account.

The counters belong to the process and are the host's: they move when work is asked for, not when
the device does it, so they can be read without waiting. (Written from torch's documentation of
`torch.cuda.memory_stats`; unverified on a GPU.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from runner.records import UpdateRecord

EXCESS = 0.03
"""Share of the account by which an update's peak may be over it before that is said."""
OVER = "over_account"
"""Entry of an update's memory: bytes of its peak over the account, where more than EXCESS."""
KNOWN_COPIES = "numerics"
"""Mark of updates before which a look copied the weights: their peak is not the update's own."""
SNAPSHOT = "memory_snapshot.pickle"
SUMMARY = "memory_summary.txt"


class Reading(NamedTuple):
    """The allocator's counters.

    now: bytes of tensors and workspaces now. allocated: most of them since the last `reset`.
    reserved: most bytes held of the device since then. inactive_split: most bytes since then of
    free pieces of segments that are in use elsewhere, which cannot be given back. retries: times
    so far that the device had no more, so that the cache was given back and the request repeated
    (the host waits for the device meanwhile); ooms: times that this did not help either.
    requested: most bytes that were asked for; `allocated` is of the blocks that were given for
    them, which may each be up to 1 MiB larger. None: the allocator in use does not count it.
    """

    now: int
    allocated: int
    reserved: int
    inactive_split: int | None = None
    retries: int | None = None
    ooms: int | None = None
    requested: int | None = None


class Allocator(Protocol):
    """Counters that the whole process shares."""

    def reset(self) -> None:
        """Begin new maxima from what is held now."""

    def read(self) -> Reading:
        """The counters now."""


class CudaAllocator:
    """The caching allocator of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Of cudaMallocAsync torch documents that some counters are always 0.
        self._counts_all = torch.cuda.get_allocator_backend() == "native"

    def reset(self) -> None:
        """See `Allocator`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> Reading:
        """See `Allocator`; one call, since `max_memory_allocated` and its like sort a hundred
        counters each time."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        allocated = stats["allocated_bytes"]["all"]
        reading = Reading(
            now=allocated["current"],
            allocated=allocated["peak"],
            reserved=stats["reserved_bytes"]["all"]["peak"],
        )
        if not self._counts_all:
            return reading
        return reading._replace(
            inactive_split=stats["inactive_split_bytes"]["all"]["peak"],
            retries=stats["num_alloc_retries"],
            ooms=stats["num_ooms"],
            requested=stats["requested_bytes"]["all"]["peak"],
        )


def allocator_of(device: torch.device) -> Allocator | None:
    """The counters of a device; None for a CPU, whose allocator has none."""
    return CudaAllocator(device) if device.type == "cuda" else None


class Peaks:
    """The peaks of one update after another, held against the account.

    account_bytes: peak of the memory account, or None where there is none to hold them against.
    """

    def __init__(self, allocator: Allocator, account_bytes: int | None) -> None:
        self._allocator = allocator
        self._account = account_bytes
        self._before = allocator.read()

    def begin(self) -> None:
        """An update begins: peaks of whatever came before are forgotten."""
        self._allocator.reset()

    def end(self, *, copied: bool = False) -> dict[str, int]:
        """The update's peaks; retries and ooms since the end of the update before. Where weights
        were `copied` for a look, the peak is not held against the account."""
        found = self._allocator.read()
        peaks = {"allocated": found.allocated, "reserved": found.reserved}
        for name in ("inactive_split", "requested"):
            if (most := getattr(found, name)) is not None:
                peaks[name] = most
        for name in ("retries", "ooms"):
            count, before = getattr(found, name), getattr(self._before, name)
            if count is not None and before is not None:
                peaks[name] = count - before
        self._before = found
        if self._account is not None and not copied:
            over = found.allocated - self._account
            if over > EXCESS * self._account:
                peaks[OVER] = over
        return peaks


# --- over a run -------------------------------------------------------------------------------


def own_peaks(records: Sequence[UpdateRecord]) -> list[Mapping[str, int]]:
    """What the allocator said of each update, those with copied weights left out unless there
    are no others."""
    seen = [r for r in records if r.memory is not None]
    own = [r for r in seen if KNOWN_COPIES not in r.marks]
    return [r.memory for r in own or seen if r.memory is not None]


@dataclass(frozen=True, kw_only=True)
class Allocated:
    """The allocator's figures of a run.

    peak_allocated_bytes, peak_reserved_bytes, peak_inactive_split_bytes: most in any update.
    unfilled_bytes: in the update with the highest allocated peak, its reserved less its allocated
    peak, what torch's own out-of-memory message calls reserved but unallocated: fragmentation,
    and besides it whatever the cache kept of other shapes. unfilled_share: of its reserved.
    slack_bytes: in the same update, its allocated peak less its peak of what was asked for: blocks
    are larger than their tensors. retries, ooms: over all updates. None: not counted.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    unfilled_bytes: int
    unfilled_share: float
    peak_inactive_split_bytes: int | None
    slack_bytes: int | None
    retries: int | None
    ooms: int | None


def allocated(records: Sequence[UpdateRecord]) -> Allocated | None:
    """The figures of a run's updates; None where no allocator was read."""
    seen = own_peaks(records)
    if not seen:
        return None
    every = [r.memory for r in records if r.memory is not None]
    top = max(seen, key=lambda peaks: peaks["allocated"])
    unfilled = top["reserved"] - top["allocated"]
    return Allocated(
        peak_allocated_bytes=top["allocated"],
        peak_reserved_bytes=max(peaks["reserved"] for peaks in seen),
        unfilled_bytes=unfilled,
        unfilled_share=unfilled / top["reserved"] if top["reserved"] else 0.0,
        peak_inactive_split_bytes=_over(max, seen, "inactive_split"),
        slack_bytes=top["allocated"] - top["requested"] if "requested" in top else None,
        retries=_over(sum, every, "retries"),
        ooms=_over(sum, every, "ooms"),
    )


def _over(join: Any, seen: Sequence[Mapping[str, int]], name: str) -> int | None:
    known = [peaks[name] for peaks in seen if name in peaks]
    return int(join(known)) if known else None


@dataclass(frozen=True, kw_only=True)
class Exceeded:
    """How the updates' peaks stand against the account.

    updates: how many were over it by more than `allowed`, `of` how many that were held against
    it. largest_bytes, largest_share: the largest excess, and over the account; None without one.
    explained: False where every one was over it, so that the account does not explain the peak.
    """

    updates: int
    of: int
    largest_bytes: int | None
    largest_share: float | None
    explained: bool
    allowed: float = EXCESS


def exceeded(records: Sequence[UpdateRecord], account_bytes: int) -> Exceeded | None:
    """The updates against the account's peak; None where none could be held against it."""
    held = [r for r in records if r.memory is not None and KNOWN_COPIES not in r.marks]
    if not held:
        return None
    over = [r.memory[OVER] for r in held if r.memory is not None and OVER in r.memory]
    return Exceeded(
        updates=len(over),
        of=len(held),
        largest_bytes=max(over, default=None),
        largest_share=max(over) / account_bytes if over else None,
        explained=len(over) < len(held),
    )


# --- when memory ran out ----------------------------------------------------------------------


def keep_snapshot(device: torch.device, folder: Path) -> None:
    """Keep what the allocator held when memory ran out, once: its blocks for
    pytorch.org/memory_viz, and its counters as text. Nothing on a CPU."""
    if device.type != "cuda" or (folder / SNAPSHOT).exists():
        return
    folder.mkdir(exist_ok=True)
    (folder / SUMMARY).write_text(torch.cuda.memory_summary(device), encoding="utf-8")
    torch.cuda.memory._dump_snapshot(str(folder / SNAPSHOT))  # type: ignore[no-untyped-call]
