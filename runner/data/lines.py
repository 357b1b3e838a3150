"""Lines of UTF-8 files in blocks of bytes, each of which can be read without those before it.

A line ends at LF, CR LF or CR, and at nothing else: U+2028, U+2029, U+0085 and form feed are
content. A byte-order mark is no part of the first line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BLOCK = 2**20
"""Bytes of a block: what is tokenized in one go, and the unit that a stream is shuffled in."""
PIECE = 2**16
MARK = b"\xef\xbb\xbf"
ENDS = (b"\n", b"\r")


class Block(NamedTuple):
    """A part of a file that is read as a whole: bytes of a text file, row groups of a Parquet one.

    start, stop: a line belongs to the block in which it starts.
    """

    path: Path
    start: int
    stop: int


def blocks(path: Path, size: int = BLOCK) -> list[Block]:
    """The blocks of a file, in order; none of an empty file."""
    total = path.stat().st_size
    return [Block(path, start, min(start + size, total)) for start in range(0, total, size)]


def content(block: Block) -> bytes:
    """The whole lines that start in the block, each ended by LF or by the end of the file."""
    with block.path.open("rb") as file:
        before = b"\n"
        if block.start:
            file.seek(block.start - 1)
            before = file.read(1)
        # First of all what begins here: a block in the middle of a long line is not read on.
        data = starting(before, file.read(block.stop - block.start))
        pieces = [data]
        while data and pieces[-1][-1:] not in ENDS and (more := file.read(PIECE)):
            end = first_end(more)
            pieces.append(more if end < 0 else more[: end + 1])
    data = b"".join(pieces)  # added one by one, a line of a GiB would be copied 16,000 times
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def starting(before: bytes, data: bytes) -> bytes:
    """`data` from the first line that starts in it; `before` is the byte in front of it."""
    if before == b"\r":
        return data.removeprefix(b"\n")
    if before == b"\n":
        return data
    end = first_end(data)
    if end < 0:
        return b""
    return data[end + 2 :] if data[end : end + 2] == b"\r\n" else data[end + 1 :]


def first_end(data: bytes) -> int:
    """Place of the first line end, or -1."""
    found = [place for end in ENDS if (place := data.find(end)) >= 0]
    return min(found, default=-1)


def lines(block: Block) -> list[str]:
    """The lines that start in the block, without their ends. Bytes that are no UTF-8 become lone
    surrogates, which `Fields` and `is_utf8` notice."""
    data = content(block)
    if block.start == 0:
        data = data.removeprefix(MARK)
    found = data.decode("utf-8", "surrogateescape").split("\n")
    return found[:-1] if found[-1] == "" else found


def is_utf8(text: str) -> bool:
    """Whether no byte of a line was broken."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def line_number(block: Block, number: int) -> int:
    """Number in the file, from 1, of the line with this number, from 0, in the block.

    Reads the file up to the block: for messages only.
    """
    size = max(block.stop - block.start, 1)
    earlier = (
        Block(block.path, at, min(at + size, block.start)) for at in range(0, block.start, size)
    )
    return sum(len(lines(one)) for one in earlier) + number + 1


def broken_byte(path: Path) -> tuple[int, int] | None:
    """Offset and value of the first byte that is no UTF-8, or None. Reads the file."""
    offset = 0
    for data in _pieces(path):
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as error:
            return offset + error.start, data[error.start]
        offset += len(data)
    return None


def _pieces(path: Path) -> Iterator[bytes]:
    """The file in pieces that end at a LF where they can, so that none splits a character."""
    with path.open("rb") as file:
        while data := file.read(BLOCK):
            yield data if data.endswith(b"\n") else data + file.readline()
