"""Sizes as people write them: 24GiB, 512MiB, 1e9."""

from __future__ import annotations

import re

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
ALLOWED = "a size such as 24GiB or 512MiB (KiB, MiB, GiB, TiB, powers of 1024; or plain bytes)"


def bytes_of(text: str) -> int:
    """The number of bytes that a size means. Raises ValueError for anything else.

    GB and its like are refused: of two meanings that differ by 7 %, one would be a guess.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*([KMGT]iB|B|)\s*", str(text))
    if found is None:
        raise ValueError(f"given {text}; allowed: {ALLOWED}")
    return int(float(found[1]) * UNITS[found[2]])
