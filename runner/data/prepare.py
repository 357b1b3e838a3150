"""Rows to examples on disk: tokenized, limited and split batch by batch, in bounded memory."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from runner.contracts import Example, Fault, Split, UserError
from runner.data.examples import OVERLONG, encode, pieces
from runner.data.storage import ExampleWriter
from runner.data.texts import Row, side_of
from runner.data.tokenizer import Tokenizer

BATCH_ROWS = 1000
BATCH_CHARACTERS = 2**20
"""A batch of rows is tokenized in one call; it ends at whichever comes first."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything besides source and tokenizer that decides the examples.

    name: the corpus. seq_len: most tokens of an example. eval_share: expected share of rows
    held out. overlong: one of OVERLONG.
    """

    name: str
    seq_len: int
    eval_share: float
    overlong: str

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"name: given {self.name!r}; allowed: letters, digits and _")
        if not 0 < self.eval_share < 1:
            raise ValueError(f"eval_share: given {self.eval_share}; allowed: above 0, below 1")
        if self.overlong not in OVERLONG:
            raise ValueError(f"overlong: given {self.overlong!r}; allowed: {', '.join(OVERLONG)}")


class Sided(NamedTuple):
    """A row and, where its source says so, the side of the split that it is on."""

    row: Row
    side: Split | None = None

    def split(self, eval_share: float) -> Split:
        """The side: the source's, else by a hash of the content."""
        return self.side or side_of(self.row.content, eval_share=eval_share)


@dataclass(kw_only=True)
class Tally:
    """What was counted while rows became examples.

    rows: rows that could be used. truncated: examples that lost their right end and still have a
    target. dropped: rows and examples left out, by reason.
    """

    rows: int = 0
    truncated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


def batches(rows: Iterable[Sided]) -> Iterator[list[Sided]]:
    """Consecutive rows in batches of a bounded size."""
    batch: list[Sided] = []
    characters = 0
    for sided in rows:
        batch.append(sided)
        characters += len(sided.row.content)
        if len(batch) >= BATCH_ROWS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def tokenized(
    batch: Iterable[Sided], options: Options, tokenizer: Tokenizer, tally: Tally
) -> dict[Split, list[Example]]:
    """The usable examples of some rows by side, in order; each row gives one or several."""
    rows = list(batch)
    found: dict[Split, list[Example]] = {"train": [], "eval": []}
    for sided, whole in zip(rows, encode([sided.row for sided in rows], tokenizer), strict=True):
        parts = pieces(whole, limit=options.seq_len, overlong=options.overlong)
        lost = options.overlong == "truncate" and whole.length > options.seq_len
        usable = [part for part in parts if part.loss[1:].any()]
        found[sided.split(options.eval_share)] += usable
        tally.rows += 1
        tally.truncated += lost and bool(usable)
        if len(usable) < len(parts):
            tally.dropped["no_targets"] += len(parts) - len(usable)
    return found


def prepare(
    made: Path, rows: Iterable[Sided], options: Options, tokenizer: Tokenizer, tally: Tally
) -> dict[str, Any]:
    """Write both splits below `made`; returns the facts of the manifest.

    Raises UserError unless each split holds an example.
    """
    writers: dict[Split, ExampleWriter]
    with (
        ExampleWriter(made / "train", tokenizer.vocab) as train,
        ExampleWriter(made / "eval", tokenizer.vocab) as held_out,
    ):
        writers = {"train": train, "eval": held_out}
        for batch in batches(rows):
            for split, examples in tokenized(batch, options, tokenizer, tally).items():
                writers[split].write(examples)
    check_usable(tally, {split: w.examples for split, w in writers.items()}, options)
    warn_of_lost_targets(tally)
    return {
        "truncated": tally.truncated,
        "dropped": dict(tally.dropped),
        "tokens": {split: writer.tokens for split, writer in writers.items()},
    }


def warn_of_lost_targets(tally: Tally) -> None:
    """Say how many examples lost every target to the length limit."""
    lost = tally.dropped["no_targets"]
    if lost:
        warnings.warn(
            f"{lost} examples have no target within the length limit and are left out",
            stacklevel=2,
        )


def check_usable(tally: Tally, usable: Mapping[Split, int], options: Options) -> None:
    """Raise UserError unless each split holds an example."""
    if all(usable.values()):
        return
    found = ", ".join(f"{count} usable for {split}" for split, count in usable.items())
    # Examples without a target are among those of the counted rows: they were not dropped before.
    lost = tally.dropped["no_targets"]
    if lost:
        found = f"{lost} examples without a target, {found}"
    dropped = {k: count for k, count in tally.dropped.items() if count and k != "no_targets"}
    raise UserError(
        Fault(
            key="data",
            given=f"{options.name}: {tally.rows} rows after dropping {dropped}, "
            f"{found} at seq_len={options.seq_len}, eval_share={options.eval_share}",
            allowed="at least 1 usable example for train and 1 for eval",
            next_step="use a larger corpus, a larger seq_len, or another data.eval_share",
        )
    )
