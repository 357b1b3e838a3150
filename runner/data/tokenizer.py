"""Text to token ids, without special tokens; the pipeline adds the end-of-text token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray


class Tokenizer(Protocol):
    """What the pipeline asks of a tokenizer.

    identity: text that differs between any two tokenizers which encode anything differently.
    vocab: number of ids in use, special and added tokens included; every id is below it.
    pad_id: id written into padding. Which positions are padding is known by length, never by
        this id, so it may equal another one.
    eos_id: id that ends each text.
    """

    @property
    def identity(self) -> str: ...
    @property
    def vocab(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def eos_id(self) -> int: ...

    def encode(self, text: str) -> NDArray[np.integer[Any]]:
        """(n,) ids of `text`, nothing added."""


@dataclass(frozen=True, kw_only=True)
class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then padding and end of text."""

    identity: ClassVar[str] = "utf8-bytes+pad+eos"
    vocab: ClassVar[int] = 258
    pad_id: ClassVar[int] = 256
    eos_id: ClassVar[int] = 257

    def encode(self, text: str) -> NDArray[np.integer[Any]]:
        """(n,) uint8 ids; raises UnicodeEncodeError for a lone surrogate."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)


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
