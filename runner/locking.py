"""One job at a time on a GPU: a lock per device that ends with the process that holds it."""

from __future__ import annotations

import fcntl
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.2


def lock_path(device_id: str) -> Path:
    """The lock file of a device, the same for every user of this machine's temporary folder."""
    return Path(tempfile.gettempdir()) / f"fullstep-{re.sub('[^A-Za-z0-9-]', '_', device_id)}.lock"


@contextmanager
def exclusive(
    device_id: str | None, *, waiting: Callable[[], None], stop: Callable[[], bool]
) -> Iterator[bool]:
    """Hold the lock of a device inside; None locks nothing.

    `waiting` is called once if another job holds it. Yields False, without the lock, when `stop`
    asked to give up. The lock is the kernel's: a killed process leaves none behind.
    """
    if device_id is None:
        yield True
        return
    with lock_path(device_id).open("a") as file:
        held = _taken(file.fileno())
        if not held:
            waiting()
        while not held and not stop():
            time.sleep(POLL_S)
            held = _taken(file.fileno())
        yield held


def _taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
