"""The lever that is not pulled: option `none` of the groups that change nothing by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.config import TARGET
from runner.contracts import Lever


@dataclass(frozen=True, kw_only=True)
class Nothing(Lever):
    """Changes nothing."""


def pulled(job: Mapping[str, Any], group: str) -> bool:
    """Whether the job has a lever in `memory/<group>` and it is another than `none`."""
    node = job["memory"].get(group)
    return node is not None and node[TARGET] != f"{Nothing.__module__}.{Nothing.__name__}"
