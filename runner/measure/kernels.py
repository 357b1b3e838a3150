"""Names of the kernels that a GPU ran in an update, from torch's profiler.

Unverified on a GPU: written from the profiler's documentation, its parsing tested on made events.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

PRODUCTS = re.compile(r"gemm|cutlass|nvjet|xmma|attention|flash|fmha|_mm\b|matmul|wgrad", re.I)
"""Words in the names of kernels that multiply matrices."""
MOST = 40
"""So many names are kept, the most frequent first."""


def kernels_of(run: Callable[[], Any], device: torch.device) -> dict[str, int]:
    """Run `run` on a CUDA device, and count the kernels that multiply matrices by name."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize(device)
    return product_kernels(profiler.events() or [])


def product_kernels(events: Iterable[Any]) -> dict[str, int]:
    """Events of a profile that are kernels of matrix products, counted by name."""
    found = Counter(
        event.name
        for event in events
        if event.device_type.name == "CUDA" and PRODUCTS.search(event.name)
    )
    return dict(found.most_common(MOST))
