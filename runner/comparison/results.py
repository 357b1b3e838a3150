"""What a comparison says, as data: frozen, JSON-able by `dataclasses.asdict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.comparison.statistics import Paired
from runner.numerics import Extremes, Worst

VERDICTS = (
    "baseline",
    "passed",
    "failed",
    "unknown",
    "diverged",
    "error",
    "incomparable",
    "confounded",
    "unchecked",
)
METRICS = {
    "step_s_median": "lower",
    "useful_tokens_per_s": "higher",
    "peak_allocated_bytes": "lower",
}
"""Figures that are compared as ratios, by name in `summary`, with what is better."""


def signed(nats: float) -> str:
    """A difference with its sign and four decimals; one that rounds to nothing has no sign."""
    text = f"{nats:+.4f}"
    return text[1:] if float(text) == 0 else text


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The rule: `margin` in nats, `confidence` of bounds and intervals, least effect of a win."""

    margin: float = 0.01
    confidence: float = 0.95
    min_effect: float = 0.01


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The quality of a setup: a word of VERDICTS, and why, in words.

    seeds: seeds in all that would settle an `unknown`, or None; commands: what to type for them.
    """

    word: str
    reason: str
    seeds: int | None = None
    commands: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.word not in VERDICTS:
            raise ValueError(f"word: given {self.word!r}; allowed: {', '.join(VERDICTS)}")


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A figure of a setup over the baseline's: geometric mean over seeds.

    low, high: interval at `level`, which Holm's procedure sets; None for one seed.
    outcome: `win`, `better` (clear, but the quality did not pass), `worse`,
        `not distinguishable`, or `one seed`.
    note: what stands beside the figure wherever it is shown.
    """

    value: float
    seeds: int
    outcome: str
    low: float | None = None
    high: float | None = None
    level: float | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Seconds of training until the loss is within the margin of the baseline's final loss of the
    same seed: medians over the shared seeds.

    quantity: `held-out loss` or `training loss`. margin: nats above the baseline's final loss
    that count as reaching it. seconds: None where no seed did. reached, seeds: seeds that did,
    of how many. baseline_seconds: the baseline's own, to the same loss.
    """

    quantity: str
    margin: float
    seconds: float | None
    baseline_seconds: float | None
    reached: int
    seeds: int


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """One setup judged against one baseline.

    difference: held-out loss, setup minus baseline, paired by seed (nats per token).
    values: the differences by seed. ratios: by name in METRICS; absent where there is none.
    gap: smoothed training loss, setup minus baseline, paired by seed.
    """

    baseline: str
    setup: str
    verdict: Verdict
    difference: Paired | None = None
    values: Mapping[int, float] = field(default_factory=dict)
    ratios: Mapping[str, Ratio] = field(default_factory=dict)
    reach: Reach | None = None
    gap: Curve | None = None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A mean over seeds with the lowest and highest seed, by applied update.

    None where a seed's loss is not finite. seconds: mean over seeds of the training time until
    that update; empty when emulated.
    """

    update: Sequence[int]
    mean: Sequence[float | None]
    low: Sequence[float | None]
    high: Sequence[float | None]
    seconds: Sequence[float] = ()
    seeds: int = 1


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run of a setup: where it is, how it ended, and its figures by name in `summary`."""

    run_id: str
    seed: int
    status: str
    message: str
    figures: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class LiveBytes:
    """Live bytes along one update, as the memory account saw them.

    phases: of each point. categories: bytes of each, by point.
    """

    phases: Sequence[str]
    categories: Mapping[str, Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class LookFigure:
    """One figure of the looks at the numerics of a setup.

    first, last: mean over seeds at the first and the last update that all seeds looked at; None
    where it was not finite. extremes: over all looks of all seeds. curve: by update, thinned to
    about 50 points, among them the first, the last, the extremes and the first not finite.
    """

    first: float | None
    last: float | None
    extremes: Extremes
    curve: Curve | None


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Loss scale over all attempts of the seed in which it fell lowest; skipped: attempts that
    were not applied, of the seed with the most."""

    first: float
    last: float
    lowest: float
    skipped: int


@dataclass(frozen=True, kw_only=True)
class LooksRow:
    """What the looks at the numerics of a setup found, each on one micro-batch.

    seeds: of the runs that were looked at, however they ended. count: looks of the seed with the
    most, between the first and the last update. figures: by name without `numerics/`. worst: the
    group of layers with the largest rounding error of any look, by name of the figure.
    """

    seeds: Sequence[int]
    count: int
    first_update: int
    last_update: int
    figures: Mapping[str, LookFigure]
    worst: Mapping[str, Worst]
    loss_scale: LossScale | None = None


@dataclass(frozen=True, kw_only=True)
class ExampleCounts:
    """What became of a corpus's examples, both splits together (of a stream, the training side).

    train, held_out: how many there are; train is None for a stream. truncated: cut to `seq_len`;
    dropped: left out, by reason. Both as the least and the most over the runs, since each run of
    a stream counts what it has read; of a prepared corpus the two are one number.
    """

    train: int | None
    held_out: int | None
    truncated: tuple[int, int]
    dropped: Mapping[str, tuple[int, int]]

    @property
    def whole(self) -> bool:
        """Whether nothing was cut or left out in any run."""
        return not any(most for _, most in (self.truncated, *self.dropped.values()))


@dataclass(frozen=True, kw_only=True)
class SetupRow:
    """One setup: its runs by seed, and its figures.

    name: the shortest that tells the setups apart. figures: median over the runs that ended ok,
        by name in `summary`; eval_loss: their mean.
    conditions: global batch, micro-batch, sequence length, recipe: what every rate stands with.
    phases: mean exposed seconds of an update by phase. memory: bytes by category at the peak;
        live: along the update.
    examples: what of them was cut or left out; None where no run states it.
    emulated: whether times would describe an emulation, and are therefore absent.
    probe: the gradient probe against FP32, of the first run; empty where there is none.
    looks: at the numerics while training; None where no run was looked at.
    """

    name: str
    swept: Mapping[str, str]
    setup_id: str | None
    workload_id: str | None
    runs: Sequence[RunRow]
    figures: Mapping[str, float]
    conditions: Mapping[str, Any]
    phases: Mapping[str, float]
    memory: Mapping[str, int]
    live: LiveBytes | None
    largest: str | None
    padding_share: float | None
    examples: ExampleCounts | None
    emulated: bool
    probe: Mapping[str, Any] = field(default_factory=dict)
    train: Curve | None = None
    held_out: Curve | None = None
    looks: LooksRow | None = None


@dataclass(frozen=True, kw_only=True)
class TunedRow:
    """How one setup came to the values of its tuned keys.

    chosen: by key. tried: mean held-out loss by values as typed, those of several keys in one
        text; None where a run did not end ok. passed_over: ids of the runs not chosen.
    """

    setup: str
    chosen: Mapping[str, str]
    tried: Mapping[str, float | None]
    passed_over: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Setups side by side, in the order typed, the baseline among them.

    contrasts: every other setup against the baseline, in the order of `setups`.
    pairs: with several swept keys, further pairs that differ in one key only.
    notes: what a reader must know, a sentence each. tuning: how each setup came to its tuned
    values; empty without `compare.tune`. device: in words, a CPU called a CPU.
    """

    baseline: str | None
    quality: Quality
    setups: Sequence[SetupRow]
    contrasts: Sequence[Contrast]
    pairs: Sequence[Contrast]
    notes: Sequence[str]
    device: str
    workload: Mapping[str, Any]
    tuning: Sequence[TunedRow] = ()
    schema_version: int = 1

    def verdict_of(self, name: str) -> Verdict:
        """The verdict of a setup by its name."""
        if name == self.baseline:
            return Verdict(word="baseline", reason="what the others are held against")
        return next(c.verdict for c in self.contrasts if c.setup == name)
