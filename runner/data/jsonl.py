"""Corpora from files with one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from runner.data import lines
from runner.data.files import FieldFiles
from runner.data.lines import Block
from runner.data.records import REASONS, Bad, Record
from runner.data.streamed import Streamed


class Repeated(ValueError):
    """An object that names a field twice: which of the two is meant is anybody's guess."""


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's fields; raises Repeated."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise Repeated(next(name for name in names if names.count(name) > 1))
    return found


def parsed(line: str) -> Record:
    """The record of a line of JSON."""
    if not lines.is_utf8(line):
        return Bad("not_utf8", f"the line {REASONS['not_utf8']}")
    try:
        found = json.loads(line, object_pairs_hook=distinct)
    except json.JSONDecodeError as error:
        array = "; data=json reads an array of objects" if line.lstrip().startswith("[") else ""
        return Bad("broken", f"{REASONS['broken']}: {error.msg} at column {error.colno}{array}")
    except Repeated as error:
        return Bad("repeated_field", f"{REASONS['repeated_field']}: {str(error)!r}")
    except (RecursionError, ValueError) as error:
        return Bad("broken", f"{REASONS['broken']}: {error}")
    return as_object(found)


def as_object(found: Any) -> Record:
    """A JSON value that must be an object."""
    if isinstance(found, Mapping):
        return found
    return Bad("not_an_object", f"{REASONS['not_an_object']}, but of type {type(found).__name__}")


@dataclass(frozen=True, kw_only=True)
class Jsonl(Streamed, FieldFiles):
    """JSON Lines: an object per line; blank lines between them are no rows."""

    suffix: ClassVar[str] = ".jsonl"

    def blocks(self, path: Path) -> Sequence[Block]:
        """See `Files`."""
        return lines.blocks(path)

    def records(self, block: Block) -> Iterator[tuple[int, Record]]:
        """See `Files`."""
        for number, line in enumerate(lines.lines(block)):
            if line and not line.isspace():
                yield number, parsed(line)

    def place(self, block: Block, number: int) -> int:
        """See `Files`."""
        return lines.line_number(block, number)
