"""Corpora from JSON documents that are one array of objects."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from runner.data.files import FieldFiles
from runner.data.jsonl import Repeated, as_object, distinct
from runner.data.lines import Block, is_utf8
from runner.data.records import REASONS, Bad, Record

SPACE = " \t\n\r"


@dataclass(frozen=True, kw_only=True)
class Json(FieldFiles):
    """One array of objects per file. A file is read whole: large corpora belong into JSON Lines.

    What follows a broken place in an array cannot be found again, so it is never skipped alone:
    the rest of its file is left out as one broken record.
    """

    suffix: ClassVar[str] = ".json"

    def blocks(self, path: Path) -> Sequence[Block]:
        """The file as a whole."""
        return [Block(path, 0, path.stat().st_size)]

    def records(self, block: Block) -> Iterator[tuple[int, Record]]:
        """See `Files`. The number of a record is that of the line it begins on."""
        text = block.path.read_bytes().decode("utf-8-sig", "surrogateescape")
        if not is_utf8(text):
            yield 1, Bad("not_utf8", f"the file {REASONS['not_utf8']}")
            return
        yield from elements(text)


def elements(text: str) -> Iterator[tuple[int, Record]]:
    """The elements of an array with their lines, up to the first that is broken."""
    decoder = json.JSONDecoder(object_pairs_hook=distinct)
    at, line, counted = skip(text, 0), 1, 0
    if text[at : at + 1] != "[":
        if text.strip():
            yield 1, Bad("not_an_object", "the file is no array of objects; data=jsonl reads lines")
        return
    at = skip(text, at + 1)
    while text[at : at + 1] != "]":
        line += text.count("\n", counted, at)
        counted = at
        try:
            value, at = decoder.raw_decode(text, at)
        except Repeated as error:
            yield line, Bad("repeated_field", f"{REASONS['repeated_field']}: {str(error)!r}")
            return
        except (RecursionError, ValueError) as error:
            yield line, Bad("broken", f"{REASONS['broken']}: {error}")
            return
        yield line, as_object(value)
        at = skip(text, at)
        if text[at : at + 1] == ",":
            at = skip(text, at + 1)
        elif text[at : at + 1] != "]":
            line += text.count("\n", counted, at)
            yield line, Bad("broken", f"{REASONS['broken']}: ',' or ']' is missing")
            return
    if text[at + 1 :].strip():
        line += text.count("\n", counted, at)
        yield line, Bad("broken", f"{REASONS['broken']}: something follows the array")


def skip(text: str, at: int) -> int:
    """The next place that is no white space."""
    while text[at : at + 1] and text[at] in SPACE:
        at += 1
    return at
