"""Examples on disk: Arrow streams that `datasets` reads too, written batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from runner.contracts import Example
from runner.data.examples import StoredExamples, stored
from runner.data.tokenizer import id_type

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
        self._stream.close()
        self._file.close()

    def write(self, examples: Sequence[Example]) -> None:
        """Append them as one record batch; nothing for no examples."""
        import pyarrow as pa

        if not examples:
            return
        offsets = np.zeros(len(examples) + 1, dtype=np.int32)
        np.cumsum([example.length for example in examples], out=offsets[1:])
        ids = np.concatenate([example.ids for example in examples]).astype(self._type, copy=False)
        loss = np.concatenate([example.loss for example in examples]).view(np.uint8)
        self._stream.write_batch(
            pa.record_batch([_lists(offsets, ids), _lists(offsets, loss)], schema=self._schema)
        )
        self.examples += len(examples)
        self.tokens += int(offsets[-1])


def _lists(offsets: Any, values: Any) -> Any:
    import pyarrow as pa

    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def read_examples(folder: Path) -> StoredExamples:
    """The examples of a folder, memory-mapped: what is not looked at takes no memory."""
    import pyarrow as pa

    with pa.memory_map(str(folder / FILE)) as source:
        return stored(pa.ipc.open_stream(source).read_all())
