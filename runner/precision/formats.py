"""Number formats: what each can hold, and what it makes of a value (specification 7.4).

Pure: no torch. `runner.precision.rounding` does to tensors what `Format.round` does to one value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, kw_only=True)
class Format:
    """A set of numbers with a sign, an exponent and a fraction; or integers, see `Integer`.

    fraction_bits: of the significand behind its leading 1. least_exponent, most_exponent: of
    normal numbers. largest: the largest finite value, which is less than the significand's last
    one where codes are taken for NaN. subnormal: whether smaller numbers than the smallest normal
    one are there, in equal steps down to 0. infinity, nan: whether it has codes for them.
    saturates: what becomes of values beyond `largest` in the cast that training uses: clamped, or
    else infinity (NaN where there is none).
    bits: of one code. scale: what the usual block scaling adds, in bits a value. source: of the
    definition.
    """

    name: str
    bits: int
    fraction_bits: int
    least_exponent: int
    most_exponent: int
    largest: float
    subnormal: bool = True
    infinity: bool = False
    nan: bool = True
    saturates: bool = False
    scale: float = 0.0
    source: str

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with a whole significand."""
        return math.ldexp(1.0, self.least_exponent)

    @property
    def smallest(self) -> float:
        """The smallest positive number."""
        if not self.subnormal:
            return self.smallest_normal
        return math.ldexp(1.0, self.least_exponent - self.fraction_bits)

    @property
    def storage_bytes(self) -> float:
        """Bytes of one stored value, its share of the scales included."""
        return (self.bits + self.scale) / 8

    def spacing(self, value: float) -> float:
        """Distance between neighbouring numbers of the format around `value`.

        Raises ValueError for a value that is not finite or beyond `largest`.
        """
        size = abs(value)
        if not size <= self.largest:
            raise ValueError(f"{value} is beyond the largest value of {self.name}, {self.largest}")
        exponent = math.frexp(size)[1] - 1 if size else self.least_exponent
        return math.ldexp(1.0, max(exponent, self.least_exponent) - self.fraction_bits)

    def round(self, value: float) -> float:
        """The number of the format nearest to `value`, ties to the even significand; what lies
        beyond the largest is clamped or overflows, as the format does."""
        if math.isnan(value) or value == 0:
            return value
        if math.isinf(value) or self.overflows(value):
            return self._beyond(value)
        step = Fraction(self.spacing(min(abs(value), self.largest)))
        count = round(Fraction(abs(value)) / step)  # Python rounds ties to even
        size = min(float(count * step), self.largest)
        if not self.subnormal and size < self.smallest_normal:
            size = 0.0 if abs(value) <= self.smallest_normal / 2 else self.smallest_normal
        return math.copysign(size, value)

    def overflows(self, value: float) -> bool:
        """Whether a value lies so far beyond the largest that it does not round to it: by half a
        step or more, the tie included, as its even neighbour would be the first that is missing."""
        half = Fraction(math.ldexp(1.0, self.most_exponent - self.fraction_bits)) / 2
        over = Fraction(abs(value)) - Fraction(self.largest)
        # Where codes above the largest stand for NaN, the largest itself has an even significand.
        even = (Fraction(self.largest) / (2 * half)) % 2 == 0
        return over > half or (over == half and not even)

    def _beyond(self, value: float) -> float:
        if self.saturates:
            return math.copysign(self.largest, value)
        if self.infinity:
            return math.copysign(math.inf, value)
        return math.nan


@dataclass(frozen=True, kw_only=True)
class Integer:
    """Whole codes from `least` to `most`, times a scale that is stored beside them.

    bits: of one code. scale: bits of scales a value. source: of the scheme.
    """

    name: str
    bits: float
    least: int
    most: int
    scale: float = 0.0
    source: str

    @property
    def storage_bytes(self) -> float:
        """Bytes of one stored value, its share of the scales included."""
        return (self.bits + self.scale) / 8

    def round(self, value: float) -> float:
        """The nearest code at scale 1, ties to even, clamped to the ends."""
        if math.isnan(value):
            return value
        if math.isinf(value):
            return float(self.most if value > 0 else self.least)
        return float(min(max(round(value), self.least), self.most))


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Powers of two without sign or fraction: the block scales of the MX formats."""

    name: str
    bits: int
    least_exponent: int
    most_exponent: int
    source: str

    @property
    def storage_bytes(self) -> float:
        """Bytes of one scale."""
        return self.bits / 8

    def round(self, value: float) -> float:
        """The power of two that torch casts to: the nearest, halfway (in the significand) up.

        Between the two lowest it is always the upper one: torch rounds a number below FP32's
        smallest normal by the bits behind its first, whose place is the format's last. NaN for
        what is not a number, negative, infinite or above the largest; the lowest for what is less.
        """
        if math.isnan(value) or math.isinf(value) or value < 0:
            return math.nan
        if value == 0:
            return math.ldexp(1.0, self.least_exponent)
        lowest = math.ldexp(1.0, self.least_exponent)
        if lowest < value < 2 * lowest:
            return 2 * lowest
        significand, exponent = math.frexp(value)
        exponent += -1 if significand < 0.75 else 0
        if exponent > self.most_exponent:
            return math.nan
        return math.ldexp(1.0, max(exponent, self.least_exponent))


IEEE = "IEEE 754-2019"
OCP8 = "OCP 8-bit floating point specification 1.0"
OCPMX = "OCP microscaling formats specification 1.0"

TOY = Format(
    name="toy",
    bits=5,
    fraction_bits=2,
    least_exponent=-2,
    most_exponent=2,
    largest=7.0,
    subnormal=False,
    infinity=True,
    source="specification 7.4, worked example",
)
FP32 = Format(
    name="fp32",
    bits=32,
    fraction_bits=23,
    least_exponent=-126,
    most_exponent=127,
    largest=(2 - 2.0**-23) * 2.0**127,
    infinity=True,
    source=IEEE,
)
TF32 = Format(
    name="tf32",
    bits=32,
    fraction_bits=10,
    least_exponent=-126,
    most_exponent=127,
    largest=(2 - 2.0**-10) * 2.0**127,
    infinity=True,
    source="NVIDIA A100 architecture white paper: a way to multiply; stored as fp32",
)
BF16 = Format(
    name="bf16",
    bits=16,
    fraction_bits=7,
    least_exponent=-126,
    most_exponent=127,
    largest=(2 - 2.0**-7) * 2.0**127,
    infinity=True,
    source="Kalamkar et al. 2019, arXiv:1905.12322",
)
FP16 = Format(
    name="fp16",
    bits=16,
    fraction_bits=10,
    least_exponent=-14,
    most_exponent=15,
    largest=65504.0,
    infinity=True,
    source=IEEE,
)
E4M3 = Format(
    name="fp8_e4m3",
    bits=8,
    fraction_bits=3,
    least_exponent=-6,
    most_exponent=8,
    largest=448.0,
    saturates=True,
    source=OCP8,
)
E5M2 = Format(
    name="fp8_e5m2",
    bits=8,
    fraction_bits=2,
    least_exponent=-14,
    most_exponent=15,
    largest=57344.0,
    infinity=True,
    saturates=True,
    source=OCP8,
)
MXFP8 = Format(
    name="mxfp8",
    bits=8,
    fraction_bits=3,
    least_exponent=-6,
    most_exponent=8,
    largest=448.0,
    saturates=True,
    scale=8 / 32,
    source=f"{OCPMX}: e4m3 with one e8m0 scale for 32 values",
)
E2M1 = Format(
    name="fp4_e2m1",
    bits=4,
    fraction_bits=1,
    least_exponent=0,
    most_exponent=2,
    largest=6.0,
    nan=False,
    saturates=True,
    source=OCPMX,
)
NVFP4 = Format(
    name="nvfp4",
    bits=4,
    fraction_bits=1,
    least_exponent=0,
    most_exponent=2,
    largest=6.0,
    nan=False,
    saturates=True,
    scale=8 / 16,
    source="Transformer Engine 2.19: e2m1 with one e4m3 scale for 16 values and one fp32 a tensor",
)
E8M0 = Scales(name="e8m0", bits=8, least_exponent=-127, most_exponent=127, source=OCPMX)
INT8 = Integer(name="int8", bits=8, least=-128, most=127, source="codes with one fp32 scale a row")
INT4 = Integer(
    name="int4",
    bits=4,
    least=-8,
    most=7,
    scale=32 / 32,
    source="codes with one fp32 scale for 32 values",
)
TERNARY = Integer(
    name="ternary",
    bits=math.log2(3),
    least=-1,
    most=1,
    source="Ma et al. 2024, arXiv:2402.17764: one scale a matrix",
)

FLOATS = (FP32, TF32, BF16, FP16, E5M2, E4M3, MXFP8, E2M1, NVFP4)
OTHERS = (E8M0, INT8, INT4, TERNARY)
