"""Pure formulas: counts in, figures out. No torch, no clocks, no files.

Every rate is total over total. A figure that cannot be known is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, stdev

from runner.contracts import Counts
from runner.records import PHASES, UpdateRecord

KINDS = ("useful", "nonpad", "slots")
TRAIN_LOSS_WINDOW = 20
"""Applied updates over which `summary/train_loss` is taken, at the end of a run."""


def rate(amount: float, seconds: float) -> float | None:
    """`amount` per second (specification equation 7.4), or None for no time at all."""
    return amount / seconds if seconds > 0 else None


def total_counts(updates: Iterable[UpdateRecord]) -> Counts:
    """Token counts over several updates."""
    return sum((u.tokens for u in updates), Counts())


def window_loss(updates: Iterable[UpdateRecord]) -> float | None:
    """Loss over several updates: sum of summed losses over sum of useful tokens, in nats.

    Updates with no useful token weigh nothing. A non-finite loss makes the window non-finite:
    nothing is filtered. None for a window without useful tokens.
    """
    counted = [u for u in updates if u.tokens.useful and u.loss is not None]
    tokens = sum(u.tokens.useful for u in counted)
    if not tokens:
        return None
    return sum(u.loss * u.tokens.useful for u in counted if u.loss is not None) / tokens


def timed(updates: Iterable[UpdateRecord]) -> list[UpdateRecord]:
    """The updates that step-time statistics are about: those without a mark whose time is known
    (an emulated run's journal tells none)."""
    return [u for u in updates if not u.marks and math.isfinite(u.total)]


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), linear between order statistics."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def statistics(values: Sequence[float]) -> dict[str, float] | None:
    """count, median, mean, p95, spread (interquartile range over median); None when empty."""
    if not values:
        return None
    middle = median(values)
    spread = (percentile(values, 75) - percentile(values, 25)) / middle if middle else 0.0
    return {
        "count": float(len(values)),
        "median": middle,
        "mean": fmean(values),
        "p95": percentile(values, 95),
        "stdev": stdev(values) if len(values) > 1 else 0.0,
        "spread": spread,
    }


def phase_totals(updates: Sequence[UpdateRecord]) -> dict[str, float]:
    """Exposed seconds by phase, summed over the given updates."""
    return {phase: sum(u.time[phase] for u in updates) for phase in PHASES}


def phase_shares(updates: Sequence[UpdateRecord]) -> dict[str, float]:
    """Share of each phase in the total of the given updates; empty without updates."""
    total = sum(u.total for u in updates)
    return {phase: t / total for phase, t in phase_totals(updates).items()} if total else {}


def marked(updates: Iterable[UpdateRecord]) -> dict[str, dict[str, float]]:
    """Count and seconds of the updates left out of statistics, by mark."""
    found: dict[str, dict[str, float]] = {}
    for update in updates:
        for mark in update.marks:
            entry = found.setdefault(mark, {"count": 0, "seconds": 0.0})
            entry["count"] += 1
            entry["seconds"] += update.total
    return found


def padding_share(counts: Counts) -> float | None:
    """Share of the processed slots that hold no real token."""
    return 1 - counts.nonpad / counts.slots if counts.slots else None


def summary(updates: Sequence[UpdateRecord]) -> dict[str, float]:
    """The figures of a run by their MLflow name without `summary/`; absent when unknown.

    Step time and rates are over the updates without a mark; when there are none (a run no
    longer than its warm-up) they are absent.
    """
    figures: dict[str, float] = {
        "updates_attempted": len(updates),
        "updates_applied": sum(u.applied for u in updates),
        "updates_skipped": sum(not u.applied for u in updates),
    }
    applied = [u for u in updates if u.applied]
    loss = window_loss(applied[-TRAIN_LOSS_WINDOW:])
    if loss is not None:
        figures["train_loss"] = loss
    counted = timed(updates)
    steps = statistics([u.total for u in counted])
    if steps is None:
        return figures
    figures["step_s_median"] = steps["median"]
    figures["step_s_p95"] = steps["p95"]
    figures |= rates(counted)
    return figures


def rates(updates: Sequence[UpdateRecord]) -> dict[str, float]:
    """The three token rates over the given updates, on one clock."""
    seconds = sum(u.total for u in updates)
    counts = total_counts(updates)
    found = {f"{kind}_tokens_per_s": rate(getattr(counts, kind), seconds) for kind in KINDS}
    return {name: value for name, value in found.items() if value is not None}


# --- accumulation -----------------------------------------------------------------------------


def micro_sizes(examples: int, size: int) -> list[int]:
    """How many examples each micro-batch of an update holds; the last may be shorter."""
    full, rest = divmod(examples, size)
    return [size] * full + ([rest] if rest else [])


def divisors(number: int) -> list[int]:
    """All positive divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def unigram_entropy(counts: Mapping[int, int]) -> float:
    """Entropy in nats of the empirical distribution of target tokens: the loss of the best
    predictor that looks at no context."""
    total = sum(counts.values())
    return sum(n / total * math.log(total / n) for n in counts.values() if n)


# --- work -------------------------------------------------------------------------------------


def causal_pairs(lengths: Iterable[int]) -> int:
    """Query-key pairs of causal attention within documents of the given lengths."""
    return sum(n * (n + 1) // 2 for n in lengths)


def model_flops(
    *,
    matmul_params: int,
    layers: int,
    heads: int,
    head_width: int,
    lengths: Sequence[int],
    head_params: int = 0,
    headless: int = 0,
    frozen_params: int = 0,
) -> int:
    """Model FLOPs of one forward and backward pass over documents of the given real lengths.

    2 FLOPs per multiply-add; backward twice the forward; each token meets every element of
    every matrix once (`matmul_params`, head included); attention is causal within documents:
    a query-key pair costs 2 * head_width for the score and as much for the value. Padding and
    recomputation are not model work and count nothing, nor does the head (`head_params` elements)
    at the `headless` real tokens for which no logits are computed. Of the backward pass's two
    products, matrices without a gradient (`frozen_params` elements, the head's among them) need
    one only.
    """
    linear = 2 * (matmul_params * sum(lengths) - head_params * headless)
    attention = 4 * layers * heads * head_width * causal_pairs(lengths)
    frozen = frozen_params * sum(lengths) - head_params * headless if frozen_params else 0
    return 3 * (linear + attention) - 2 * frozen


def activation_elements(
    *, n_hidden: float, n_score: float, rows: int, length: int, width: int, heads: int
) -> float:
    """Elements that one layer keeps for its backward pass, to first order (specification equation
    7.2): `n_hidden` tensors of rows x length x width, `n_score` of rows x heads x length^2."""
    return n_hidden * rows * length * width + n_score * rows * heads * length**2


def activation_bytes(
    *,
    element_bytes: int,
    layers: int,
    n_hidden: float,
    n_score: float,
    rows: int,
    length: int,
    width: int,
    heads: int,
) -> float:
    """Bytes that all layers keep, to first order (specification equation 7.3)."""
    elements = activation_elements(
        n_hidden=n_hidden, n_score=n_score, rows=rows, length=length, width=width, heads=heads
    )
    return element_bytes * layers * elements


def optimizer_traffic(*, parameters: int, gradients: int, moments: int) -> int:
    """Bytes that one update of the parameters must move: parameters and moments are read and
    written, gradients read. Clipping and the gradient norm move gradients again; they are not
    counted, so a rate over the whole phase is a lower bound."""
    return 2 * parameters + gradients + 2 * moments


def mfu(*, flops: float, seconds: float, peak_flops_per_s: float | None) -> float | None:
    """Model FLOPs utilisation: model FLOPs per second over the peak of the format that ran."""
    if peak_flops_per_s is None or seconds <= 0:
        return None
    return flops / seconds / peak_flops_per_s
