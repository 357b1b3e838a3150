"""The format whose values a tensor holds, where its dtype does not tell."""

from __future__ import annotations

from torch import Tensor

ATTRIBUTE = "operand_format"


def labelled(operand: Tensor, name: str | None) -> Tensor:
    """A tensor of the same values that says which format they are rounded to.

    Another tensor object, so that one operand never speaks for another's view of its storage.
    """
    if name is None:
        return operand
    view = operand.view_as(operand)
    setattr(view, ATTRIBUTE, name)
    return view


def format_of(operand: Tensor) -> str:
    """The format that an operand is labelled with, else its dtype."""
    found: str | None = getattr(operand, ATTRIBUTE, None)
    return found or str(operand.dtype).removeprefix("torch.")
