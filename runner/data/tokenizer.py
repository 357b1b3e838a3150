"""Text to token ids, without special tokens; the pipeline adds the end-of-text token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from runner.data.texts import Message, Part, plain_chat


class Tokenizer(Protocol):
    """What the pipeline asks of a tokenizer.

    identity: text that differs between any two tokenizers which encode anything differently.
    vocab: number of ids in use, special and added tokens included; every id is below it.
    pad_id: id written into padding. Which positions are padding is known by length, never by
        this id, so it may equal another one.
    eos_id: id that ends each text. begin_ids: ids that the tokenizer puts before each text.
    """

    @property
    def identity(self) -> str: ...
    @property
    def vocab(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def begin_ids(self) -> tuple[int, ...]: ...

    def encode(self, texts: Sequence[str]) -> Sequence[NDArray[np.integer[Any]]]:
        """(n,) ids of each text, nothing added."""

    def render(self, messages: Sequence[Message]) -> tuple[Part, ...]:
        """See `runner.data.texts.Renders`."""


class TokenizerPart(Protocol):
    """The configured part that makes a tokenizer."""

    def make(self, texts: Callable[[], Iterable[str]], *, source: str, cache: Path) -> Tokenizer:
        """The tokenizer. `texts` reads the corpus, whose digest is `source`, for a tokenizer that
        is made from it; what takes long is kept below `cache`."""


@dataclass(frozen=True, kw_only=True)
class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then padding and end of text."""

    identity: ClassVar[str] = "utf8-bytes+pad+eos"
    vocab: ClassVar[int] = 258
    pad_id: ClassVar[int] = 256
    eos_id: ClassVar[int] = 257
    begin_ids: ClassVar[tuple[int, ...]] = ()

    def make(self, texts: Callable[[], Iterable[str]], *, source: str, cache: Path) -> Tokenizer:
        """Itself: nothing to learn."""
        return self

    def encode(self, texts: Sequence[str]) -> Sequence[NDArray[np.integer[Any]]]:
        """(n,) uint8 ids of each; raises UnicodeEncodeError for a lone surrogate."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def render(self, messages: Sequence[Message]) -> tuple[Part, ...]:
        """`role: content` per turn, see `plain_chat`."""
        return plain_chat(messages)


def id_type(vocab: int) -> np.dtype[Any]:
    """The narrowest stored type that holds every id below `vocab` exactly."""
    for candidate in (np.uint16, np.int32, np.int64):
        if vocab - 1 <= np.iinfo(candidate).max:
            return np.dtype(candidate)
    raise ValueError(f"vocab: given {vocab}; allowed: up to 2**63")


def exact_ids(ids: NDArray[np.integer[Any]], vocab: int) -> NDArray[np.integer[Any]]:
    """`ids` in the stored type of `vocab`; raises ValueError where one would not survive it."""
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise ValueError(
            f"token ids from {ids.min()} to {ids.max()}; allowed: 0 to {vocab - 1} (vocab {vocab})"
        )
    return ids.astype(id_type(vocab))
