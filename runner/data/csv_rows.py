"""Corpora from tables of comma-separated values."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from runner.data.files import FieldFiles
from runner.data.lines import Block, is_utf8
from runner.data.records import REASONS, Bad, Record


@contextmanager
def long_fields() -> Iterator[None]:
    """Fields of any length within; the module's limit is afterwards as it was."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


@dataclass(frozen=True, kw_only=True)
class Csv(FieldFiles):
    """A header line with the names of the columns, then a row per record, quoted by `"`.

    Every value is text: `007` keeps its zeros and `NA` is two letters. delimiter: one character,
    or `tab`.
    """

    suffix: ClassVar[str] = ".csv"
    delimiter: str = ","

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.separator) != 1 or self.separator in '"\r\n':
            raise ValueError(f"delimiter: given {self.delimiter!r}; allowed: one character, or tab")

    @property
    def separator(self) -> str:
        """The character that the delimiter means; a tabulator cannot be typed as it is."""
        return "\t" if self.delimiter in ("tab", r"\t") else self.delimiter

    def blocks(self, path: Path) -> Sequence[Block]:
        """The file as a whole: a line break inside quotes cannot be told from the middle."""
        return [Block(path, 0, path.stat().st_size)]

    def records(self, block: Block) -> Iterator[tuple[int, Record]]:
        """See `Files`. The number of a record is that of its first line."""
        opened = block.path.open(newline="", encoding="utf-8-sig", errors="surrogateescape")
        with long_fields(), opened as file:
            reader = csv.reader(file, delimiter=self.separator, strict=True)
            header: list[str] | None = None
            while True:
                line = reader.line_num + 1
                try:
                    values = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    yield line, Bad("broken", f"{REASONS['broken']}: {error}")
                    continue
                if not values:
                    continue
                if header is None:
                    header = values
                    if not all(map(is_utf8, header)):
                        yield line, Bad("not_utf8", f"the header {REASONS['not_utf8']}")
                        return
                    if len(set(header)) < len(header):
                        twice = next(name for name in header if header.count(name) > 1)
                        yield line, Bad("repeated_field", f"the header has {twice!r} twice")
                        return
                    continue
                yield line, record(header, values)


def record(header: list[str], values: list[str]) -> Record:
    """The record of a row of the table."""
    if len(values) != len(header):
        detail = f"{len(values)} values under a header of {len(header)}"
        return Bad("broken", f"{REASONS['broken']}: {detail}")
    if not all(map(is_utf8, values)):
        return Bad("not_utf8", f"the row {REASONS['not_utf8']}")
    return dict(zip(header, values, strict=True))
