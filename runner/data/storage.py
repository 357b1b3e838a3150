"""Examples on disk: Arrow streams that `datasets` reads too, written batch by batch."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import numpy as np

from runner.contracts import Example
from runner.data.cache import LARGE
from runner.data.examples import Chunk, StoredExamples, stored
from runner.data.tokenizer import id_type

CHUNK_TOKENS = 2**24
"""Tokens after which a record batch is written. Opening a file looks at a few pages of each batch,
so few and large ones keep what is resident small."""
RELEASE_EVERY = 1024
"""Look-ups in a large file after which its pages are given back; each may hold some 200 KiB."""
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


class ReleasedExamples(StoredExamples):
    """Examples of a large file, whose pages are given back as they add up.

    A page of a mapped file stays resident once it was looked at, with its neighbours; what is
    given back is read again, from the system's cache, by whoever still looks at it.
    """

    def __init__(self, chunks: Sequence[Chunk], release: Callable[[], None]) -> None:
        super().__init__(chunks)
        self._release = release
        self._looked = 0

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        self._looked += 1
        if self._looked % RELEASE_EVERY == 0:
            self._release()
        return super().__getitem__(index)


def read_examples(folder: Path) -> StoredExamples:
    """The examples of a folder, memory-mapped: what is not looked at takes no memory."""
    import pyarrow as pa

    with (folder / FILE).open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    found = stored(pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(mapped))).read_all())
    if len(mapped) < LARGE or not hasattr(mmap, "MADV_DONTNEED"):
        return found
    return ReleasedExamples(found.chunks, lambda: mapped.madvise(mmap.MADV_DONTNEED))
