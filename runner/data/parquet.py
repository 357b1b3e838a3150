"""Corpora from Parquet files, read with pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from runner.data.files import FieldFiles
from runner.data.lines import Block
from runner.data.records import Record
from runner.data.streamed import Streamed

BATCH_ROWS = 1000


@dataclass(frozen=True, kw_only=True)
class Parquet(Streamed, FieldFiles):
    """Parquet files. A block is a row group, the unit that they are stored in."""

    suffix: ClassVar[str] = ".parquet"
    unit: ClassVar[str] = "row"

    def blocks(self, path: Path) -> Sequence[Block]:
        """See `Files`."""
        groups = opened(path).num_row_groups
        return [Block(path, group, group + 1) for group in range(groups)]

    def records(self, block: Block) -> Iterator[tuple[int, Record]]:
        """See `Files`. Only the columns that are read are decoded."""
        file = opened(block.path)
        names = file.schema_arrow.names
        wanted = self.fields.columns
        if not set(wanted) <= set(names):
            yield 0, dict.fromkeys(names)  # whoever reads it says which field is missing
            return
        batches = file.iter_batches(BATCH_ROWS, row_groups=[block.start], columns=wanted)
        yield from enumerate(record for batch in readable(batches) for record in batch.to_pylist())

    def place(self, block: Block, number: int) -> int:
        """See `Files`."""
        file = opened(block.path)
        earlier = (file.metadata.row_group(group).num_rows for group in range(block.start))
        return int(sum(earlier)) + number + 1


def readable(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches; raises OSError where the file's content is damaged."""
    import pyarrow as pa

    try:
        yield from batches
    except pa.ArrowException as error:
        raise OSError(f"damaged Parquet file ({error})") from error


def opened(path: Path) -> Any:
    """The file; raises OSError when it is no Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise OSError(f"no Parquet file ({error})") from error
