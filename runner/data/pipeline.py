"""Texts to a Corpus: prepared once, cached on disk, read back memory-mapped."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runner.contracts import Corpus, Example, Fault, UserError
from runner.data import cache as store
from runner.data.examples import stored
from runner.data.prepare import Options, prepare, quiet_datasets
from runner.data.texts import Texts
from runner.data.tokenizer import Tokenizer

FORMAT = 1
"""Version of everything here that decides the content of a cached corpus; raise it on change."""


def fingerprint(source: str, options: Options, tokenizer: Tokenizer) -> str:
    """Hex sha256 over all that decides the examples, `source` being the digest of the texts."""
    return store.text_digest(
        {
            "format": FORMAT,
            "python": platform.python_version(),
            "source": source,
            "split": "sha256(prompt+completion)[:8] < eval_share",
            "tokenizer": [tokenizer.identity, tokenizer.vocab, tokenizer.eos_id],
            **asdict(options),
        }
    )


def load(
    read: Callable[[], Texts], *, stamp: str, options: Options, tokenizer: Tokenizer, cache: str
) -> Corpus:
    """The corpus of the texts that `read` returns, from the folder `cache` where it is there.

    stamp: changes whenever `read` could return something else; as long as it is known and the
        corpus is cached, `read` is not called.
    Raises UserError when either split holds no usable example.
    """
    started = time.perf_counter()
    check_limit(options.seq_len)
    root = Path(cache).expanduser()
    texts: Texts | None = None
    source = store.remembered(root / "sources", stamp)
    if source is None:
        texts = read()
        source = texts.digest
    place = folder(root, source, options, tokenizer)
    facts = store.facts_at(place)
    if facts is None:
        texts = texts or read()
        place = folder(root, texts.digest, options, tokenizer)
        facts = built(place, texts, options, tokenizer)
    if texts is not None:
        store.remember(root / "sources", stamp, texts.digest)
    return opened(place, facts, tokenizer, started)


def built(place: Path, texts: Texts, options: Options, tokenizer: Tokenizer) -> dict[str, Any]:
    """The facts of the corpus at `place`, prepared unless another job did so meanwhile."""
    with suppress(store.Damaged):
        return store.verified(place)
    store.build(place, lambda made: prepare(made, texts, options, tokenizer))
    return store.verified(place)


def check_limit(seq_len: int) -> None:
    """A row of one token has no target."""
    if seq_len < 2:
        raise UserError(
            Fault(key="seq_len", given=str(seq_len), allowed="2 or more", next_step="seq_len=256")
        )


def folder(root: Path, source: str, options: Options, tokenizer: Tokenizer) -> Path:
    """Where the corpus lies in the cache."""
    return root / f"{options.name}-{fingerprint(source, options, tokenizer)}"


def opened(place: Path, facts: Mapping[str, Any], tokenizer: Tokenizer, started: float) -> Corpus:
    """The corpus of an intact cache folder; its arrays are memory-mapped."""
    return Corpus(
        train=read_split(place / "train"),
        eval=read_split(place / "eval"),
        fingerprint=place.name.rpartition("-")[2],
        vocab=tokenizer.vocab,
        pad_id=tokenizer.pad_id,
        truncated=facts["truncated"],
        dropped=facts["dropped"],
        prepared_s=time.perf_counter() - started,
    )


def read_split(place: Path) -> Sequence[Example]:
    """Memory-map a saved dataset."""
    from datasets import Dataset

    with quiet_datasets():
        return stored(Dataset.load_from_disk(str(place), keep_in_memory=False))
