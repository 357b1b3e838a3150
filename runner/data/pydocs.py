"""Python's language reference as it ships with Python: long plain texts, nothing masked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from runner.contracts import Corpus
from runner.data import pipeline, stdlib
from runner.data.feeding import Feeding
from runner.data.prepare import Options
from runner.data.texts import collect
from runner.data.tokenizer import ByteTokenizer


@dataclass(frozen=True, kw_only=True)
class PyDocs(Feeding):
    """The topics of `pydoc_data`, each ended by the end-of-text token.

    A topic is cut into consecutive examples of at most `seq_len` tokens, so nothing is lost
    but the prediction of each example's first token. All examples of a topic are on one side of
    the split.

    eval_share: expected share of the topics that are held out, by a hash of their content. Topics
        are few and differ in length: 0.1 holds out 7 of 78, and 10 % of the text.
    """

    name: str = "pydocs"
    eval_share: float = 0.1
    tokenizer: Any = field(default_factory=ByteTokenizer)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.options(seq_len=2)

    def options(self, *, seq_len: int) -> Options:
        """What decides the examples; raises ValueError for a field out of range."""
        return Options(name=self.name, seq_len=seq_len, eval_share=self.eval_share, overlong="cut")

    def load(self, *, seq_len: int, cache: str) -> Corpus:
        """See `runner.contracts.Data`."""
        folder = stdlib.library()
        path = folder / "pydoc_data" / "topics.py"
        files = [path] if path.exists() else []
        return pipeline.load(
            lambda: collect(text for file in files for text in stdlib.topics(file)),
            stamp=f"pydocs-{pipeline.FORMAT}-{stdlib.stamp(folder, files)}",
            options=self.options(seq_len=seq_len),
            tokenizer=self.tokenizer,
            cache=cache,
        )
