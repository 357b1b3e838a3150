"""Writes the journal off the update's path: the loop hands a record over, a thread formats it."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from runner.records import CLOCKED, JournalLine, dumps

INTERVAL_S = 0.2


class Journal:
    """An append-only `journal.jsonl`.

    Without `timed`, what a clock saw is written as null: an emulation's times are nobody's.
    A record that was handed over is on disk within about INTERVAL_S, at `flush` and at `close`.
    One that could not be written (a full disk) makes the next `append`, and `close`, raise: a
    curve with a gap in it would pass for a whole one.
    """

    def __init__(self, path: Path, *, timed: bool = True) -> None:
        self._timed = timed
        self._queue: SimpleQueue[JournalLine] = SimpleQueue()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._failed: OSError | None = None
        self._file = path.open("a", encoding="utf-8")
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._thread.start()

    def append(self, record: JournalLine) -> None:
        """Hand over one record; returns at once. Raises OSError when an earlier one was lost."""
        if self._failed is not None:
            raise self._failed
        self._queue.put(record)

    def flush(self) -> None:
        """Write everything handed over so far."""
        with self._lock:
            lines = []
            while True:
                try:
                    lines.append(dumps(self._line(self._queue.get_nowait())) + "\n")
                except Empty:
                    break
            if lines:
                self._file.write("".join(lines))
                self._file.flush()

    def _line(self, record: JournalLine) -> dict[str, Any]:
        line = record.to_json()
        return line if self._timed else {**line, **{k: None for k in CLOCKED if k in line}}

    def close(self) -> None:
        """Write the rest and close the file; a second call does nothing. Raises OSError when a
        record was lost."""
        if self._file.closed:
            return
        self._closing.set()
        self._thread.join()
        try:
            if self._failed is not None:
                raise self._failed
            self.flush()
        finally:
            self._file.close()

    def _write(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            try:
                self.flush()
            except OSError as error:
                self._failed = error
                return
