"""Updates of so many tokens instead of so many examples: another workload than `batch` examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from runner.contracts import Example, Fault, MicroBatch, Numerics
from runner.data.heads import HeadChoice
from runner.data.packed import pack
from runner.data.padded import refuse_overlong

if TYPE_CHECKING:
    from runner.data.arranged import Budgeted
    from runner.data.order import Numbered

KEY = "batching.tokens"


@dataclass(frozen=True, kw_only=True)
class TokenBudget(HeadChoice):
    """An update takes the next examples of the order that together have at most `tokens` tokens,
    in packed rows of at most `tokens / accum` each.

    `batch` is then the most examples that an update may have. Updates have different numbers of
    examples than with any other batching, so `tokens` belongs to the workload: runs with other
    budgets, or without one, are never compared as setups of the same work.

    tokens: real tokens of an update. accum: the job's, by which it is divided.
    """

    numerics: ClassVar[Numerics] = "same"
    workload_keys: ClassVar[frozenset[str]] = frozenset({"tokens"})
    rearranges: ClassVar[bool] = True
    tokens: int
    accum: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens < 2:
            raise ValueError(f"tokens: given {self.tokens}; allowed: 2 or more")

    def conflicts(self, job: Mapping[str, Any]) -> Sequence[Fault]:
        """The longest example must fit into a row, and epochs have no number of updates that is
        known before."""
        return tuple(self._faults(job))

    def _faults(self, job: Mapping[str, Any]) -> Iterator[Fault]:
        if self.row < job["seq_len"]:
            yield Fault(
                key=KEY,
                given=f"{self.tokens} in {self.accum} micro-batches: rows of {self.row}",
                allowed=f"rows of at least seq_len={job['seq_len']} tokens",
                next_step=f"{KEY}={job['seq_len'] * self.accum}, a smaller accum or seq_len",
            )
        if job["updates"] is None:
            yield Fault(
                key="epochs",
                given=f"{job['epochs']} with a budget of tokens",
                allowed="updates: how many an epoch has depends on the order of its examples",
                next_step="updates=80 epochs=null",
            )

    @property
    def row(self) -> int:
        """Most tokens of a micro-batch."""
        return self.tokens // max(self.accum, 1)

    def arrange(self, order: Numbered, length: Callable[[int], int]) -> Budgeted:
        """See `runner.contracts.Batching`."""
        from runner.data.arranged import Budgeted

        return Budgeted(order, length, tokens=self.tokens)

    def micro_batches(
        self, examples: Sequence[Example], *, size: int, pad_id: int, seq_len: int
    ) -> list[MicroBatch]:
        """Packed rows of at most `row` tokens, examples in order. Raises ValueError for an
        example over `seq_len`."""
        refuse_overlong(examples, seq_len)
        return [self.choose(pack(chunk)) for chunk in fitting(examples, self.row)]


def fitting(examples: Sequence[Example], tokens: int) -> Iterator[Sequence[Example]]:
    """Consecutive runs of examples with at most `tokens` tokens together."""
    start = used = 0
    for number, example in enumerate(examples):
        if used + example.length > tokens and number > start:
            yield examples[start:number]
            start, used = number, 0
        used += example.length
    yield examples[start:]
