"""Items of a numbered collection, prepared ahead by processes and delivered in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from runner.contracts import Unsupported

Item = TypeVar("Item")


class ByNumber(Generic[Item]):
    """What `torch.utils.data.DataLoader` asks of a collection."""

    def __init__(self, prepare: Callable[[int], Item]) -> None:
        self.prepare = prepare

    def __getitem__(self, number: int) -> Item:
        return self.prepare(number)


def prepared_ahead(
    prepare: Callable[[int], Item],
    numbers: Iterable[int],
    *,
    workers: int,
    prefetch: int,
    pin: bool = False,
) -> Iterator[Item]:
    """`map(prepare, numbers)`, computed by `workers` processes that are `prefetch` items ahead.

    The order is that of `numbers`, whatever the number of workers. What `prepare` uses goes into
    the processes when the first item is asked for, by forking. The processes end when the
    iterator is closed or dropped, or with this process. pin: whether an item's `pin_memory()` is
    called, on a thread beside.
    """
    from torch.utils.data import DataLoader

    if "fork" not in multiprocessing.get_all_start_methods():
        raise Unsupported("data.workers: this platform cannot fork processes; use data.workers=0")
    loader: DataLoader[Any] = DataLoader(
        ByNumber(prepare),  # type: ignore[arg-type]
        sampler=numbers,
        batch_size=None,
        collate_fn=itself,
        num_workers=workers,
        prefetch_factor=prefetch,
        multiprocessing_context="fork",
        worker_init_fn=begin,
        pin_memory=pin,
    )
    yield from loader


def itself(item: Item) -> Item:
    """No further collation."""
    return item


def begin(number: int) -> None:
    """In each process: signals mean what they mean by default, not what the job makes of them; a
    tokenizer uses this process's one core."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
