"""Rows of text before tokenization: what is kept, and on which side of the split it falls."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from runner.contracts import Split


@dataclass(frozen=True, kw_only=True)
class Text:
    """One row: `prompt` is read but never predicted, `completion` is predicted."""

    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The rows of a source, in an order that the source's content alone decides.

    rows: distinct rows with something to predict.
    dropped: rows left out, by reason.
    """

    rows: tuple[Text, ...]
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Hex sha256 over the rows; says nothing of where they came from."""
        found = hashlib.sha256()
        for row in self.rows:
            for part in (row.prompt.encode(), row.completion.encode()):
                found.update(len(part).to_bytes(8, "big"))
                found.update(part)
        return found.hexdigest()


def fault_of(row: Text, seen: Mapping[Text, None]) -> str | None:
    """Why a row is left out, or None."""
    if not row.completion.strip():
        return "empty"
    if row in seen:
        return "duplicates"
    try:
        (row.prompt + row.completion).encode("utf-8")
    except UnicodeEncodeError:
        return "not_utf8"
    return None


def collect(rows: Iterable[Text]) -> Texts:
    """Keep the first of each row that can be used, and count the others by reason."""
    kept: dict[Text, None] = {}
    dropped: Counter[str] = Counter()
    for row in rows:
        fault = fault_of(row, kept)
        if fault is None:
            kept[row] = None
        else:
            dropped[fault] += 1
    return Texts(rows=tuple(kept), dropped=dict(dropped))


def side(prompt: str, completion: str, *, eval_share: float) -> Split:
    """The split of a text, by a hash of its whole content.

    Neither position nor length limit enters: the same text is always on the same side.
    """
    digest = hashlib.sha256((prompt + completion).encode()).digest()
    return "eval" if int.from_bytes(digest[:8], "big") < eval_share * 2**64 else "train"
