"""Examples on disk: Arrow streams that `datasets` reads too, written batch by batch."""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import numpy as np

from runner.contracts import Example
from runner.data.cache import LARGE
from runner.data.examples import StoredExamples, stored
from runner.data.tokenizer import id_type

CHUNK_TOKENS = 2**24
"""Tokens after which a record batch is written. Opening a file looks at a few pages of each batch,
so few and large ones keep what is resident small."""
FILE = "data.arrow"
"""`datasets.Dataset.from_file` opens it: an Arrow IPC stream with the columns `ids` and `loss`."""


class ExampleWriter:
    """Writes examples to a folder, in bounded memory.

    vocab: every id is below it; decides the type that ids are stored in.
    """

    def __init__(self, folder: Path, vocab: int) -> None:
        import pyarrow as pa

        self._type = id_type(vocab)
        ids = pa.list_(pa.from_numpy_dtype(self._type))
        self._schema = pa.schema({"ids": ids, "loss": pa.list_(pa.uint8())})
        folder.mkdir()
        self._file = pa.OSFile(str(folder / FILE), "wb")
        self._stream = pa.ipc.new_stream(self._file, self._schema)
        self._waiting: list[tuple[Any, Any, Any]] = []
        self._waiting_tokens = 0
        self.examples = 0
        self.tokens = 0

    def __enter__(self) -> ExampleWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if error is None:
            self._flush()
        self._stream.close()
        self._file.close()

    def write(self, examples: Sequence[Example]) -> None:
        """Append them; they reach the file in batches of some CHUNK_TOKENS tokens."""
        if not examples:
            return
        lengths = np.array([example.length for example in examples], dtype=np.int32)
        ids = np.concatenate([example.ids for example in examples])
        loss = np.concatenate([example.loss for example in examples])
        self._waiting.append((lengths, ids.astype(self._type, copy=False), loss))
        self._waiting_tokens += len(ids)
        self.examples += len(examples)
        self.tokens += len(ids)
        if self._waiting_tokens >= CHUNK_TOKENS:
            self._flush()

    def _flush(self) -> None:
        """Write what waits as one record batch."""
        import pyarrow as pa

        waiting, self._waiting, self._waiting_tokens = self._waiting, [], 0
        if not waiting:
            return
        lengths, ids, loss = (np.concatenate(column) for column in zip(*waiting, strict=True))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        columns = [_lists(offsets, ids), _lists(offsets, loss.view(np.uint8))]
        self._stream.write_batch(pa.record_batch(columns, schema=self._schema))


def _lists(offsets: Any, values: Any) -> Any:
    import pyarrow as pa

    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


class ReadExamples(Sequence[Example]):
    """Examples of a large file, each read when it is looked up.

    A mapped file would become resident page by page, with the neighbours of every page that was
    looked at: most of a large corpus after some thousand random look-ups. Only where examples
    begin is kept in memory, four bytes for each.
    """

    def __init__(self, path: Path, mapped: StoredExamples, base: int) -> None:
        """mapped: views of the mapped file, which begins at the address `base`."""
        self._file = path.open("rb", buffering=0)
        self._types = [(chunk.ids.dtype, chunk.loss.dtype) for chunk in mapped.chunks]
        self._at = [
            (chunk.ids.ctypes.data - base, chunk.loss.ctypes.data - base) for chunk in mapped.chunks
        ]
        self._offsets = [np.array(chunk.offsets) for chunk in mapped.chunks]
        self._starts = mapped.starts

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        number = bisect_right(self._starts, place) - 1
        row = place - self._starts[number]
        start, end = self._offsets[number][row : row + 2].tolist()
        columns = zip(self._at[number], self._types[number], strict=True)
        ids, loss = (self._read(at, kind, start, end) for at, kind in columns)
        return Example(ids=ids, loss=loss)

    def _read(self, at: int, kind: np.dtype[Any], start: int, end: int) -> Any:
        """Values `start` to `end` of the array that begins at byte `at` of the file."""
        size = kind.itemsize
        # With a place of its own, a read is safe in processes that share the file.
        data = os.pread(self._file.fileno(), (end - start) * size, at + start * size)
        return np.frombuffer(data, dtype=kind)


def read_examples(folder: Path) -> Sequence[Example]:
    """The examples of a folder: of a small file views of its pages, of a large one read singly."""
    import pyarrow as pa

    path = folder / FILE
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    found = stored(pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(mapped))).read_all())
    if len(mapped) < LARGE:
        return found
    return ReadExamples(path, found, np.frombuffer(mapped, dtype=np.uint8).ctypes.data)
