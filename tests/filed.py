"""Files of rows for tests, and corpora read from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.contracts import Corpus, UserError
from runner.data.files import Files, FileSource

END = 257


def write(folder: Path, name: str, content: str | bytes) -> Path:
    """A file below `folder`."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def jsonl(*records: Any) -> str:
    """JSON Lines of these values."""
    return "".join(json.dumps(record) + "\n" for record in records)


def rows(part: Files, launch: Path | None = None) -> tuple[list[Any], dict[str, int]]:
    """The rows of a part's files and what was dropped, without a tokenizer or a cache."""
    from collections import Counter

    dropped: Counter[str] = Counter()
    source = FileSource(part, launch or Path.cwd())
    return [sided.row for sided in source.rows(dropped)], dict(dropped)


def contents(part: Files) -> list[str]:
    """What the rows of a part's files say."""
    return [row.content for row in rows(part)[0]]


def refusal(part: Files) -> str:
    """What is said about the first row that cannot be used."""
    with pytest.raises(UserError) as raised:
        rows(part)
    (fault,) = raised.value.faults
    assert fault.key == "data.files"
    return fault.given


def texts(corpus: Corpus) -> list[str]:
    """The texts of a corpus of bytes, sorted, end of text left out."""
    examples = [*corpus.train, *corpus.eval]
    return sorted(bytes(e.ids[e.ids != END].tolist()).decode() for e in examples)
