"""`python -m runner.formats [value=X]`: the number formats, or what each makes of a value."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from runner.contracts import Fault, UserError
from runner.precision.formats import FLOATS, OTHERS, Format, Integer
from runner.terminal import print_faults

USAGE = """python -m runner.formats            the formats: bits, range, spacing, bytes
python -m runner.formats value=3.1  what each format makes of a value"""


LEGEND = """
bytes: of a stored value, its share of block scales included; beyond: what becomes of larger
values in the scaled casts of training (torch's plain cast of fp8_e5m2 overflows to infinity);
tf32 is a way to multiply, stored as fp32"""


def parse(words: Sequence[str]) -> float | None:
    """The value that is asked about, or None. Raises UserError for anything else."""
    if not words:
        return None
    key, mark, text = words[0].partition("=")
    if len(words) > 1 or key != "value" or not mark:
        raise UserError(_fault(" ".join(words), "nothing, or value=NUMBER"))
    try:
        return float(text)
    except ValueError:
        raise UserError(_fault(text, "a number")) from None


def _fault(given: str, allowed: str) -> Fault:
    return Fault(key="value", given=given, allowed=allowed, next_step="value=3.1")


def table() -> list[list[str]]:
    """One row a format, the header first."""
    rows = [
        [
            "format",
            "bits",
            "largest",
            "smallest normal",
            "smallest",
            "spacing at 1",
            "bytes",
            "beyond",
        ]
    ]
    for form in FLOATS:
        rows.append(
            [
                form.name,
                str(form.bits),
                number(form.largest),
                number(form.smallest_normal),
                number(form.smallest),
                number(form.spacing(1.0)),
                f"{form.storage_bytes:g}",
                beyond(form),
            ]
        )
    for other in OTHERS:
        bounds = (
            [str(other.most), "", "", "1"]
            if isinstance(other, Integer)
            else [
                number(2.0**other.most_exponent),
                number(2.0**other.least_exponent),
                "",
                "powers of 2",
            ]
        )
        ends = "clamped" if isinstance(other, Integer) else "nan"
        rows.append([other.name, f"{other.bits:.3g}", *bounds, f"{other.storage_bytes:.3g}", ends])
    return rows


def beyond(form: Format) -> str:
    """What becomes of a value beyond the largest one."""
    return "clamped" if form.saturates else ("infinity" if form.infinity else "nan")


def number(value: float) -> str:
    """Six significant digits, or all of a short whole number."""
    return f"{value:,.0f}" if value == round(value) and value < 1e6 else f"{value:.6g}"


def rounded(value: float) -> list[list[str]]:
    """What each format makes of a value at scale 1, the header first."""
    rows = [["format", "value", "error", ""]]
    for form in (*FLOATS, *OTHERS):
        found = form.round(value)
        rows.append([form.name, repr(found), error(value, found), remark(form, value, found)])
    return rows


def error(value: float, found: float) -> str:
    """The relative error, where there is one."""
    if not (math.isfinite(value) and math.isfinite(found)) or value == 0:
        return ""
    return f"{(found - value) / abs(value):+.2%}" if found != value else "exact"


def remark(form: object, value: float, found: float) -> str:
    """What happened besides rounding."""
    if math.isfinite(value) and not math.isfinite(found):
        return "overflows"
    if found == 0 and value != 0:
        return "rounds to zero"
    if isinstance(form, Format) and abs(value) > form.largest >= abs(found):
        return "clamped"
    if isinstance(form, Integer) and (value < form.least or value > form.most):  # not for nan
        return "clamped"
    if isinstance(form, Format) and 0 < abs(found) < form.smallest_normal:
        return "subnormal"
    return ""


def lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as columns: the first to the left, numbers to the right, the last to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if place in (0, last) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def main(words: Sequence[str]) -> int:
    """Exit code: 0 printed, 2 the command is wrong."""
    if any(word in ("-h", "--help") for word in words):
        print(USAGE)
        return 0
    try:
        value = parse(words)
    except UserError as fault:
        print_faults(sys.stderr, fault.faults, "nothing was printed")
        return 2
    if value is None:
        print("\n".join(lines(table())))
        print(LEGEND)
    else:
        print("\n".join(lines(rounded(value))))
        print("\nat scale 1: recipes choose a scale for each tensor, row or block first")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
