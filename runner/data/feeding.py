"""How examples are fed to training: what every data part lets a comparison vary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Feeding:
    """Settings that change when an update is prepared, never what is in it.

    workers: processes that prepare updates ahead; 0 prepares each when it is needed. prefetch:
    updates (blocks of a stream) that each of them is ahead by.
    """

    setup_keys: ClassVar[frozenset[str]] = frozenset({"workers", "prefetch"})
    workers: int = 0
    prefetch: int = 2

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"workers: given {self.workers}; allowed: 0 or more")
        if self.prefetch < 1:
            raise ValueError(f"prefetch: given {self.prefetch}; allowed: 1 or more")
