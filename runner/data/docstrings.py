"""Docstrings of the Python standard library, each to be predicted from its signature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from runner.contracts import Corpus
from runner.data import pipeline, stdlib
from runner.data.texts import collect
from runner.data.tokenizer import ByteTokenizer


def check_share(eval_share: float) -> None:
    """Raise ValueError unless some texts, not all, are held out."""
    if not 0 < eval_share < 1:
        raise ValueError(f"eval_share: given {eval_share}; allowed: above 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class Docstrings:
    """Every function and class of the running Python's standard library that has a docstring.

    The signature is the prompt and carries no loss; the cleaned docstring is predicted, with the
    end-of-text token, as UTF-8 bytes. Longer examples lose their right end.

    eval_share: expected share of the texts that are held out, by a hash of their content.
    """

    setup_keys: ClassVar[frozenset[str]] = frozenset()
    name: str = "docstrings"
    eval_share: float = 0.05

    def __post_init__(self) -> None:
        check_share(self.eval_share)

    def load(self, *, seq_len: int, cache: str) -> Corpus:
        """See `runner.contracts.Data`."""
        folder = stdlib.library()
        files = stdlib.sources(folder)
        return pipeline.load(
            lambda: collect(stdlib.docstrings(files)),
            stamp=f"docstrings-{pipeline.FORMAT}-{stdlib.stamp(folder, files)}",
            options=pipeline.Options(
                name=self.name, seq_len=seq_len, eval_share=self.eval_share, overlong="truncate"
            ),
            tokenizer=ByteTokenizer(),
            cache=cache,
        )
