"""The largest live object of a job at its peak, as levers are asked what they would leave of it.

Data only, no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

BLOCK = re.compile(r"\bblocks\.(\d+)\b")
"""A block in a module path or a parameter's name, with its number."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """A live object, and of its job what decides whether a lever would make it smaller.

    kind: see `runner.contracts.LiveObjects`, or another category of the memory account. name: the
    operation that made it, or a parameter's name. where: module path it was made in, or empty.
    bytes: it takes. shape, dtype: of the tensor that it was made for. phase: of the peak. layers,
    width, vocab: of the model. accum: micro-batches of an update. rows, length: of the largest of
    them. slots: its positions that the head is applied at.
    """

    kind: str
    name: str
    where: str
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    phase: str
    layers: int
    width: int
    vocab: int
    accum: int
    rows: int
    length: int
    slots: int

    @property
    def elements(self) -> int:
        """Numbers in it."""
        return prod(self.shape)

    @property
    def of_a_block(self) -> bool:
        """Whether it was made inside one of the model's blocks, or is a parameter of one."""
        return bool(BLOCK.search(self.where or self.name))

    @property
    def ends_a_block(self) -> bool:
        """Whether it may be what one block hands to the next: made by the block itself, in none
        of its parts."""
        found = BLOCK.search(self.where)
        return found is not None and found.end() == len(self.where)

    @property
    def of_logits(self) -> bool:
        """Whether it has a number for each word of the vocabulary, and is no weight of the head."""
        return self.shape[-1:] == (self.vocab,) and self.shape != (self.width, self.vocab)

    @property
    def of_a_micro_batch(self) -> bool:
        """Whether it has something for every position of the micro-batch."""
        if self.kind == "scores":
            return True
        positions = (self.rows * self.length, self.slots)
        by_row = self.rows in self.shape and self.length in self.shape
        return by_row or any(count in self.shape for count in positions)
