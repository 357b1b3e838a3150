"""Tokenizers of the library `tokenizers`: a batch of texts in one call, on all cores."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.data.texts import Message, Part, plain_chat


@dataclass(frozen=True, kw_only=True, eq=False)
class FastTokenizer:
    """A `tokenizers.Tokenizer` as the pipeline uses one; see `runner.data.tokenizer.Tokenizer`.

    chat: writes a chat down; template: the text that it goes by, for the identity.
    """

    backend: Any
    eos_id: int
    pad_id: int
    begin_ids: tuple[int, ...] = ()
    chat: Callable[[Sequence[Message]], tuple[Part, ...]] = plain_chat
    template: str = ""
    vocab: int = field(init=False)
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        # A saved tokenizer may have been left set to cut or pad: that is the pipeline's to do.
        self.backend.no_truncation()
        self.backend.no_padding()
        # Ids may have gaps, and added tokens lie above the vocabulary: the largest id counts.
        largest = max(self.backend.get_vocab(with_added_tokens=True).values())
        object.__setattr__(self, "vocab", largest + 1)
        special = self.backend.encode_special_tokens
        described = json.dumps([self.backend.to_str(), special, self.template])
        digest = hashlib.sha256(described.encode()).hexdigest()
        object.__setattr__(self, "identity", f"tokenizers-{digest}")

    def encode(self, texts: Sequence[str]) -> Sequence[NDArray[np.integer[Any]]]:
        """(n,) ids of each text, nothing added."""
        found = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int64) for one in found]

    def render(self, messages: Sequence[Message]) -> tuple[Part, ...]:
        """See `runner.data.texts.Renders`."""
        return self.chat(messages)
