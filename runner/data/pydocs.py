"""Python's language reference as it ships with Python: long plain texts, nothing masked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from runner.contracts import Corpus
from runner.data import pipeline, stdlib
from runner.data.docstrings import check_share
from runner.data.texts import collect
from runner.data.tokenizer import ByteTokenizer


@dataclass(frozen=True, kw_only=True)
class PyDocs:
    """The topics of `pydoc_data`, as UTF-8 bytes, each ended by the end-of-text token.

    A topic is cut into consecutive examples of at most `seq_len` tokens, so nothing is lost
    but the prediction of each example's first token. All examples of a topic are on one side of
    the split.

    eval_share: expected share of the topics that are held out, by a hash of their content.
    """

    setup_keys: ClassVar[frozenset[str]] = frozenset()
    name: str = "pydocs"
    eval_share: float = 0.05

    def __post_init__(self) -> None:
        check_share(self.eval_share)

    def load(self, *, seq_len: int, cache: str) -> Corpus:
        """See `runner.contracts.Data`."""
        folder = stdlib.library()
        path = folder / "pydoc_data" / "topics.py"
        files = [path] if path.exists() else []
        return pipeline.load(
            lambda: collect(text for file in files for text in stdlib.topics(file)),
            stamp=f"pydocs-{pipeline.FORMAT}-{stdlib.stamp(folder, files)}",
            options=pipeline.Options(
                name=self.name, seq_len=seq_len, eval_share=self.eval_share, overlong="cut"
            ),
            tokenizer=ByteTokenizer(),
            cache=cache,
        )
