"""A corpus that is read block by block while it is trained on, and never as a whole.

The blocks of all files are visited in an order that seed and epoch fix. Their examples, in that
order, are handed out in windows of `buffer` examples, each shuffled by a permutation that seed,
epoch and the window's place fix. So a stream goes on from a place by reading one window again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

from runner.contracts import START, Corpus, Example, Place, Split, StreamDraw, UserError
from runner.data.files import FileSource
from runner.data.lines import Block
from runner.data.order import order, permutation
from runner.data.pipeline import check_limit, fingerprint, training_texts, writable
from runner.data.prepare import Options, Sided, Tally, batches, check_usable, tokenized
from runner.data.processes import prepared_ahead
from runner.data.tokenizer import Tokenizer, TokenizerPart

EVAL_ROWS = 64
"""Held-out rows that are tokenized at a time."""


class Blocks:
    """The blocks of a source by number. `read` gives the rows of one, strict or counting."""

    def __init__(self, source: FileSource) -> None:
        self._source = source
        self._blocks: dict[Split, list[Block]] = {
            split: [block for path in paths for block in source.blocks(path)]
            for split, paths in source.paths.items()
        }

    def __len__(self) -> int:
        return len(self._blocks["train"])

    def read(self, number: int, dropped: Counter[str]) -> Iterator[Sided]:
        """The rows of a block of the files that are trained on."""
        return self._source.block_rows("train", self._blocks["train"][number], dropped)

    def held_out(self, dropped: Counter[str]) -> Iterator[Sided]:
        """Rows that may be held out: of the evaluation files, or of all files."""
        split: Split = "eval" if self._blocks["eval"] else "train"
        for block in self._blocks[split]:
            yield from self._source.block_rows(split, block, dropped)


@dataclass(kw_only=True, eq=False)
class Piece:
    """Examples of a block that were read in one go, and what was counted meanwhile.

    seconds: what it took. fault: a mistake of the user's that was met; it is raised where it is
    seen, not in whichever process met it.
    """

    examples: list[Example] = field(default_factory=list)
    truncated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    fault: UserError | None = None


@dataclass(kw_only=True, eq=False)
class ExampleStream:
    """See `runner.contracts.Stream`."""

    blocks: Any
    options: Options
    tokenizer: Tokenizer
    buffer: int
    truncated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def pieces(self, number: int) -> Iterator[Piece]:
        """The training examples of a block, in batches."""
        dropped: Counter[str] = Counter()
        rows = (
            Sided(sided.row, "train")
            for sided in self.blocks.read(number, dropped)
            if sided.split(self.options.eval_share) == "train"
        )
        begin = time.perf_counter()
        try:
            for batch in batches(rows):
                tally = Tally()
                found = tokenized(batch, self.options, self.tokenizer, tally)
                left_out, seconds = tally.dropped + dropped, time.perf_counter() - begin
                yield Piece(
                    examples=found["train"],
                    truncated=tally.truncated,
                    dropped=left_out,
                    seconds=seconds,
                )
                dropped.clear()
                begin = time.perf_counter()
        except UserError as error:
            yield Piece(fault=error)
        yield Piece(dropped=dropped, seconds=time.perf_counter() - begin)

    def whole(self, number: int) -> Piece:
        """A block in one piece: what a process prepares ahead."""
        whole = Piece()
        for piece in self.pieces(number):
            whole.examples += piece.examples
            whole.truncated += piece.truncated
            whole.dropped += piece.dropped
            whole.seconds += piece.seconds
            whole.fault = whole.fault or piece.fault
        return whole

    def updates(
        self, *, batch: int, seed: int, place: Place = START, workers: int = 0, prefetch: int = 2
    ) -> Iterator[StreamDraw]:
        """See `runner.contracts.Stream`. What is counted is counted anew by each pass."""
        self.truncated = 0
        self.dropped.clear()
        numbers = self._numbers(seed, place)
        blocks: Iterator[Iterator[Piece]] = map(self.pieces, numbers)
        if workers:
            ahead = prepared_ahead(self.whole, numbers, workers=workers, prefetch=prefetch)
            blocks = (iter([piece]) for piece in ahead)
        for epoch in count(place.epoch):
            run = Epoch(self, blocks, seed=seed, start=place)
            yield from run.updates(batch)
            place = Place(epoch + 1)

    def _numbers(self, seed: int, place: Place) -> Iterator[int]:
        """The numbers of the blocks in their order, epoch after epoch, from a place on."""
        first = place.block
        for epoch in count(place.epoch):
            yield from order(len(self.blocks), seed=seed, epoch=epoch)[first:].tolist()
            first = 0


class Epoch:
    """What is left of one epoch from a place on. blocks: its blocks come first."""

    def __init__(
        self, stream: ExampleStream, blocks: Iterator[Iterator[Piece]], *, seed: int, start: Place
    ) -> None:
        self._stream, self._blocks, self._seed, self._start = stream, blocks, seed, start
        self._seconds = 0.0

    def updates(self, batch: int) -> Iterator[StreamDraw]:
        """The updates; the last one of an epoch is shorter, never dropped."""
        chosen: list[Example] = []
        examples = self._examples()
        taken = self._start.taken
        empty = True
        while window := list(islice(examples, self._stream.buffer)):
            empty = False
            start = window[0][0]
            key = (start.epoch, start.block, start.offset)  # longer than that of an epoch's order
            shuffled = permutation(len(window), seed=self._seed, key=key)
            for number in range(taken, len(window)):
                chosen.append(window[shuffled[number]][1])
                if len(chosen) == batch:
                    yield self._draw(chosen, start._replace(taken=number + 1))
                    chosen = []
            taken = 0
        if chosen:
            yield self._draw(chosen, Place(self._start.epoch + 1))
        if empty:
            tally = Tally(dropped=self._stream.dropped)
            check_usable(tally, {"train": 0}, self._stream.options)

    def _draw(self, chosen: list[Example], after: Place) -> StreamDraw:
        seconds, self._seconds = self._seconds, 0.0
        return StreamDraw(chosen, after, seconds)

    def _examples(self) -> Iterator[tuple[Place, Example]]:
        """Every example with its place, from the start on; raises what reading met."""
        start, skipped = self._start, self._start.offset
        for block in range(start.block, len(self._stream.blocks)):
            offset = 0
            for piece in next(self._blocks):
                self._count(piece)
                for example in piece.examples:
                    if offset >= skipped:
                        yield Place(start.epoch, block, offset), example
                    offset += 1
            skipped = 0

    def _count(self, piece: Piece) -> None:
        if piece.fault is not None:
            raise piece.fault
        self._seconds += piece.seconds
        if self._start.epoch == 0:
            self._stream.truncated += piece.truncated
            self._stream.dropped.update(piece.dropped)


def open_stream(
    source: Any,
    blocks: Any,
    *,
    options: Options,
    part: TokenizerPart,
    cache: str,
    buffer: int,
    held_out: int,
    strict: bool,
) -> Corpus:
    """A corpus that is streamed; the first `held_out` examples of the evaluation side are kept.

    strict: see `Corpus.whole_updates`.

    Raises UserError when there is none, or nothing to train on.
    """
    started = time.perf_counter()
    check_limit(options.seq_len)
    root = Path(cache).expanduser().absolute()
    digest = source.sample_digest()
    with writable(root):
        tokenizer = part.make(lambda: training_texts(source, options), source=digest, cache=root)
    tally = Tally()
    kept = list(islice(evaluation(blocks, options, tokenizer, tally), held_out))
    stream = ExampleStream(blocks=blocks, options=options, tokenizer=tokenizer, buffer=buffer)
    check_usable(tally, {"train": len(blocks), "eval": len(kept)}, options)
    return Corpus(
        train=(),
        eval=kept,
        fingerprint=fingerprint(digest, options, tokenizer),
        vocab=tokenizer.vocab,
        pad_id=tokenizer.pad_id,
        dropped=stream.dropped,
        prepared_s=time.perf_counter() - started,
        whole_updates=strict,
        stream=stream,
    )


def evaluation(
    blocks: Any, options: Options, tokenizer: Tokenizer, tally: Tally
) -> Iterator[Example]:
    """The examples of the evaluation side, in the order of the source, as they are asked for."""
    rows = (
        Sided(sided.row, "eval")
        for sided in blocks.held_out(tally.dropped)
        if sided.split(options.eval_share) == "eval"
    )
    while batch := list(islice(rows, EVAL_ROWS)):
        yield from tokenized(batch, options, tokenizer, tally)["eval"]
