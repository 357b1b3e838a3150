"""Corpora from plain text files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from runner.data import lines
from runner.data.lines import Block
from runner.data.records import REASONS, Bad, Record
from runner.data.streamed import Streamed

ROWS = ("line", "file")


@dataclass(frozen=True, kw_only=True)
class PlainText(Streamed):
    """Plain text. rows: a row is a `line` (blank ones are no rows), or the whole `file`."""

    suffix: ClassVar[str] = ".txt"
    rows: str = "line"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows not in ROWS:
            raise ValueError(f"rows: given {self.rows!r}; allowed: {', '.join(ROWS)}")

    def blocks(self, path: Path) -> Sequence[Block]:
        """See `Files`."""
        return lines.blocks(path, lines.BLOCK if self.rows == "line" else max(1, size(path)))

    def records(self, block: Block) -> Iterator[tuple[int, Record]]:
        """See `Files`."""
        found = lines.lines(block)
        for number, text in enumerate(found if self.rows == "line" else ["\n".join(found)]):
            if not lines.is_utf8(text):
                yield number, Bad("not_utf8", f"the line {REASONS['not_utf8']}")
            elif text and not text.isspace():
                yield number, {"text": text}

    def place(self, block: Block, number: int) -> int:
        """See `Files`."""
        return lines.line_number(block, number)


def size(path: Path) -> int:
    """Bytes of a file."""
    return path.stat().st_size
