"""A byte-level BPE tokenizer that is trained on the corpus it will read."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from runner.contracts import Unsupported
from runner.data.cache import text_digest
from runner.data.fast_tokenizer import FastTokenizer
from runner.data.tokenizer import Tokenizer
from runner.records import write_atomically

PAD, END = "<|pad|>", "<|endoftext|>"
SMALLEST = 258
"""The 256 bytes, padding and end of text."""


def installed() -> Any:
    """The library; raises Unsupported where it is missing."""
    try:
        import tokenizers
    except ImportError as error:
        raise Unsupported(
            "data.tokenizer needs the library tokenizers: pip install 'fullstep[hub]'"
        ) from error
    return tokenizers


@dataclass(frozen=True, kw_only=True)
class Bpe:
    """Trained on the texts of the training side, once, and kept in the cache.

    size: ids to reach; a small corpus may give fewer. sample: 2^20 characters of text, from the
        corpus's start on, that it is trained on; all of a smaller corpus. Tokens spelled out in a
        text are text: only the pipeline ends one.
    """

    size: int = 4096
    sample: int = 64

    def __post_init__(self) -> None:
        if self.size < SMALLEST:
            raise ValueError(f"size: given {self.size}; allowed: {SMALLEST} or more")
        if self.sample < 1:
            raise ValueError(f"sample: given {self.sample}; allowed: 1 or more MiB")

    def make(self, texts: Callable[[], Iterable[str]], *, source: str, cache: Path) -> Tokenizer:
        """See `runner.data.tokenizer.TokenizerPart`."""
        library = installed()
        facts = [source, self.size, self.sample, version("tokenizers")]
        place = cache / "tokenizers" / f"bpe-{text_digest(facts)}.json"
        described = kept(place)
        if described is None:
            described = trained(within(texts(), self.sample * 2**20), self.size)
            keep(place, described)
        backend = library.Tokenizer.from_str(described)
        backend.encode_special_tokens = True
        return FastTokenizer(
            backend=backend, eos_id=backend.token_to_id(END), pad_id=backend.token_to_id(PAD)
        )


def within(texts: Iterable[str], limit: int) -> Iterator[str]:
    """The first texts, up to `limit` characters."""
    left = limit
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def trained(texts: Iterable[str], size: int) -> str:
    """A tokenizer over these texts, as `tokenizers` describes it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    described: str = tokenizer.to_str()
    return described


def keep(place: Path, described: str) -> None:
    """Write a tokenizer with its digest."""
    place.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(described.encode()).hexdigest()
    write_atomically(place, json.dumps({"sha256": digest, "tokenizer": described}))


def kept(place: Path) -> str | None:
    """The tokenizer that was written; None when there is none, or a damaged one, of which it
    warns."""
    if not place.exists():
        return None
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
        described: str = found["tokenizer"]
        if found["sha256"] == hashlib.sha256(described.encode()).hexdigest():
            return described
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    warnings.warn(f"damaged tokenizer {place} is trained again", stacklevel=2)
    return None
