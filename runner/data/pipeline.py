"""Rows of a source to a Corpus: prepared once, cached on disk, read back memory-mapped."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from runner.contracts import Corpus, Fault, UserError
from runner.data import cache as store
from runner.data.prepare import Options, Sided, Tally, prepare
from runner.data.storage import read_examples
from runner.data.texts import Texts
from runner.data.tokenizer import ByteTokenizer, Tokenizer, TokenizerPart

FORMAT = 2
"""Version of everything here that decides the content of a cached corpus; raise it on change."""


class Source(Protocol):
    """Rows that can be read again.

    stamp: changes whenever `rows` could give something else; costs next to nothing.
    """

    @property
    def stamp(self) -> str: ...

    def digest(self) -> str:
        """Hex digest of all that the rows depend on: content and how it is read."""

    def rows(self, dropped: Counter[str]) -> Iterator[Sided]:
        """Every row that can be used; those left out are added to `dropped` by reason."""


class TextsSource:
    """Rows that `read` returns all at once; it is called once at most."""

    def __init__(self, read: Callable[[], Texts], stamp: str) -> None:
        self._read = read
        self._texts: Texts | None = None
        self.stamp = stamp

    def texts(self) -> Texts:
        """The rows and what was dropped."""
        if self._texts is None:
            self._texts = self._read()
        return self._texts

    def digest(self) -> str:
        """Digest of the rows."""
        return self.texts().digest

    def rows(self, dropped: Counter[str]) -> Iterator[Sided]:
        """See `Source`."""
        dropped.update(self.texts().dropped)
        return (Sided(row) for row in self.texts().rows)


def fingerprint(source: str, options: Options, tokenizer: Tokenizer) -> str:
    """Hex sha256 over all that decides the examples, `source` being the digest of the source."""
    used = [tokenizer.identity, tokenizer.vocab, tokenizer.eos_id, list(tokenizer.begin_ids)]
    return store.text_digest(
        {
            "format": FORMAT,
            "python": platform.python_version(),
            "source": source,
            "split": "sha256(content)[:8] < eval_share, unless the source says",
            "tokenizer": used,
            **asdict(options),
        }
    )


def load(
    read: Callable[[], Texts],
    *,
    stamp: str,
    options: Options,
    tokenizer: TokenizerPart,
    cache: str,
) -> Corpus:
    """The corpus of the texts that `read` returns, from the folder `cache` where it is there.

    stamp: changes whenever `read` could return something else; as long as it is known and the
        corpus is cached, `read` is not called.
    Raises UserError when either split holds no usable example, or `cache` cannot be written.
    """
    return load_source(TextsSource(read, stamp), options=options, tokenizer=tokenizer, cache=cache)


def load_source(
    source: Source,
    *,
    options: Options,
    tokenizer: TokenizerPart,
    cache: str,
    strict: bool = False,
) -> Corpus:
    """The corpus of a source; see `load`. strict: see `Corpus.whole_updates`."""
    started = time.perf_counter()
    check_limit(options.seq_len)
    root = Path(cache).expanduser().absolute()
    digest = store.remembered(root / "sources", source.stamp)
    known = digest is not None
    with writable(root):
        used, place = placed(source, digest or source.digest(), options, tokenizer, root)
        facts = store.facts_at(place)
        if facts is None and known:
            used, place = placed(source, source.digest(), options, tokenizer, root)
        if facts is None:
            facts = built(place, source, options, used)
            known = False
        if not known:
            store.remember(root / "sources", source.stamp, source.digest())
    return opened(place, facts, used, started, strict)


def placed(
    source: Source, digest: str, options: Options, part: TokenizerPart, root: Path
) -> tuple[Tokenizer, Path]:
    """The tokenizer of a corpus, and where the corpus lies in the cache."""
    tokenizer = part.make(lambda: training_texts(source, options), source=digest, cache=root)
    return tokenizer, root / f"{options.name}-{fingerprint(digest, options, tokenizer)}"


def training_texts(source: Source, options: Options) -> Iterator[str]:
    """The texts of the training side, for a tokenizer that learns from them."""
    for sided in source.rows(Counter()):
        if sided.split(options.eval_share) == "train":
            for part in sided.row.parts(ByteTokenizer()):
                yield part.text


def built(place: Path, source: Source, options: Options, tokenizer: Tokenizer) -> dict[str, Any]:
    """The facts of the corpus at `place`, prepared unless another job did so meanwhile."""
    with suppress(store.Damaged):
        return store.verified(place)
    tally = Tally()
    rows = source.rows(tally.dropped)
    store.build(place, lambda made: prepare(made, rows, options, tokenizer, tally))
    return store.verified(place)


@contextmanager
def writable(root: Path) -> Iterator[None]:
    """Turn what the file system refuses within into a UserError about the cache."""
    try:
        yield
    except OSError as error:
        raise UserError(
            Fault(
                key="cache",
                given=f"{root}: {error.strerror or error}",
                allowed="a folder that can be written, with room for the tokenized corpus",
                next_step="cache=FOLDER",
            )
        ) from error


def check_limit(seq_len: int) -> None:
    """A row of one token has no target."""
    if seq_len < 2:
        raise UserError(
            Fault(key="seq_len", given=str(seq_len), allowed="2 or more", next_step="seq_len=256")
        )


def opened(
    place: Path, facts: Mapping[str, Any], tokenizer: Tokenizer, started: float, strict: bool
) -> Corpus:
    """The corpus of an intact cache folder; its arrays are memory-mapped."""
    return Corpus(
        train=read_examples(place / "train"),
        eval=read_examples(place / "eval"),
        fingerprint=place.name.rpartition("-")[2],
        vocab=tokenizer.vocab,
        pad_id=tokenizer.pad_id,
        truncated=facts["truncated"],
        dropped=facts["dropped"],
        prepared_s=time.perf_counter() - started,
        tokens=facts["tokens"]["train"],
        whole_updates=strict,
    )
