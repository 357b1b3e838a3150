"""stub"""

from __future__ import annotations

from runner.comparison.results import Comparison


def page(comparison: Comparison) -> str:
    return ""
