"""Docstrings of the Python standard library, each to be predicted from its signature."""

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
class Docstrings(Feeding):
    """Every function and class of the running Python's standard library that has a docstring.

    The signature is the prompt and carries no loss; the cleaned docstring is predicted, with the
    end-of-text token, as UTF-8 bytes
    unless another tokenizer is named. Longer examples lose their right end.

    eval_share: expected share of the texts that are held out, by a hash of their content.
    """

    name: str = "docstrings"
    eval_share: float = 0.05
    tokenizer: Any = field(default_factory=ByteTokenizer)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.options(seq_len=2)

    def options(self, *, seq_len: int) -> Options:
        """What decides the examples; raises ValueError for a field out of range."""
        return Options(
            name=self.name, seq_len=seq_len, eval_share=self.eval_share, overlong="truncate"
        )

    def load(self, *, seq_len: int, cache: str) -> Corpus:
        """See `runner.contracts.Data`."""
        folder = stdlib.library()
        files = stdlib.sources(folder)
        return pipeline.load(
            lambda: collect(stdlib.docstrings(files)),
            stamp=f"docstrings-{pipeline.FORMAT}-{stdlib.stamp(folder, files)}",
            options=self.options(seq_len=seq_len),
            tokenizer=self.tokenizer,
            cache=cache,
        )
