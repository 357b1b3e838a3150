"""Files that can be entered at any block, and so be streamed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.contracts import Corpus, Fault
from runner.data.files import Files, FileSource


@dataclass(frozen=True, kw_only=True)
class Streamed(Files):
    """Files that may be streamed.

    streaming: read and tokenize while training, instead of once before it. buffer: examples that
    are shuffled together, beside the order of the blocks. held_out: examples of the evaluation
    side that are kept, the first ones.
    """

    streaming: bool = False
    buffer: int = 4096
    held_out: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("buffer", "held_out"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: given {getattr(self, name)}; allowed: 1 or more")

    def conflicts(self, job: Mapping[str, Any]) -> Sequence[Fault]:
        """A stream has no length that epochs could be counted in before it was read."""
        return stream_conflicts(self.streaming, job)

    def load(self, *, seq_len: int, cache: str) -> Corpus:
        """See `runner.contracts.Data`."""
        if not self.streaming:
            return super().load(seq_len=seq_len, cache=cache)
        from runner.data.stream import Blocks, open_stream

        source = FileSource(self, Path.cwd())
        return open_stream(
            source,
            Blocks(source),
            options=self.options(seq_len=seq_len),
            part=self.tokenizer,
            cache=cache,
            buffer=self.buffer,
            held_out=self.held_out,
            strict=self.on_bad == "error",
        )


def stream_conflicts(streaming: bool, job: Mapping[str, Any]) -> Sequence[Fault]:
    """What a job asks of a stream that it cannot give."""
    if not streaming or job["epochs"] is None:
        return ()
    return (
        Fault(
            key="epochs",
            given=str(job["epochs"]),
            allowed="updates: how long an epoch of a stream is, is known when it has been read",
            next_step="updates=1000 epochs=null, or data.streaming=false",
        ),
    )
