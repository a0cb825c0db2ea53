"""The 8-bit formats as data: exponent bits, mantissa bits, bias and the special codes; and INT8, for comparison.

All else (maximum, grid, midpoints, rounding) is derived. Sources: Micikevicius et al. 2022, "FP8 Formats for Deep
Learning", table 1 (E4M3, E5M2; the "fn" in E4M3FN means finite, with NaN only in the all-ones codes); ONNX, "Float
stored in 8 bits" (the FNUZ kind of Noune et al. 2022: bias one larger, no negative zero, NaN in its place).

A value is quantized as FP32(x) / FP32(scale), clipped to the largest finite value, and rounded once to the nearest
code, ties to even; NaN stays NaN. Infinity is clipped like every large value.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

Float32s = npt.NDArray[np.float32]


class Grid(Protocol):
    """The magnitudes of a format's codes, from which scales are chosen."""

    @property
    def name(self) -> str:
        """The format's name, such as `e4m3`."""

    @property
    def grid(self) -> Float32s:
        """The finite magnitudes, ascending from 0, float32."""

    @property
    def max(self) -> float:
        """The largest finite magnitude."""

    @property
    def clip(self) -> float:
        """The largest magnitude of one code; scale = clip of the tensor / this."""

    @property
    def midpoints(self) -> Float32s:
        """The midpoints of the grid, float32 [len(grid) - 1], at which rounding changes; ties to the even index."""

    @property
    def terms(self) -> Literal[1, 2]:
        """The number of codes for one value."""

    @property
    def power_of_two(self) -> bool:
        """Tell whether scales must be powers of two, even if another grid of scales is asked for."""

    @property
    def by_value(self) -> bool:
        """Tell whether to sum the squared error value by value, since it is too small for differences of prefix
        sums.
        """

    def round(self, magnitudes: Float32s) -> Float32s:
        """Round non-negative, finite magnitudes, divided by their scale, to the grid; saturating."""


class GridFormat(ABC):
    """The grid of a format: its values, its largest magnitude and the midpoints between values."""

    @property
    @abstractmethod
    def grid(self) -> Float32s:
        """The finite magnitudes, ascending from 0, float32."""

    @cached_property
    def max(self) -> float:
        """The largest magnitude of the grid."""
        return float(self.grid[-1])

    @property
    def clip(self) -> float:
        """The largest magnitude of one code."""
        return self.max

    @cached_property
    def midpoints(self) -> Float32s:
        """The midpoints between neighbours of the grid, float32 [len(grid) - 1] (exact), at which rounding changes."""
        return (self.grid[:-1] + self.grid[1:]) / np.float32(2)


@dataclass(frozen=True)
class Format(GridFormat):
    """A floating-point format of 8 bits: a sign, `exponent_bits` and `mantissa_bits`.

    `ieee`: the largest exponent is infinity and NaN; `unsigned_zero`: 0x80 is the only NaN, and there is no -0.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    ieee: bool = False
    unsigned_zero: bool = False
    terms: ClassVar[Literal[1]] = 1
    power_of_two: ClassVar[bool] = False
    by_value: ClassVar[bool] = False

    @property
    def codes(self) -> "Format":
        """The format of one code."""
        return self

    @cached_property
    def values(self) -> Float32s:
        """The value of each code, float32 [256]."""
        codes = np.arange(256)
        exponent = (codes & 0x7F) >> self.mantissa_bits
        fraction = (codes & ((1 << self.mantissa_bits) - 1)) / (1 << self.mantissa_bits)
        magnitude = np.where(
            exponent > 0, (1 + fraction) * 2.0 ** (exponent - self.bias), fraction * 2.0 ** (1 - self.bias)
        )
        values = np.where(codes < 0x80, magnitude, -magnitude)
        top = exponent == (1 << self.exponent_bits) - 1
        if self.unsigned_zero:
            values[0x80] = np.nan
        elif self.ieee:
            values[top] = np.where(fraction[top] == 0, np.copysign(np.inf, values[top]), np.nan)
        else:
            values[[0x7F, 0xFF]] = np.nan
        return values.astype(np.float32)

    @cached_property
    def grid(self) -> Float32s:
        """The finite magnitudes, ascending from 0: the value of code i is grid[i], float32."""
        positive = self.values[:0x80]
        return positive[np.isfinite(positive)]

    @cached_property
    def smallest_subnormal(self) -> float:
        """The smallest magnitude above zero."""
        return float(self.grid[1])

    @cached_property
    def nan_code(self) -> int:
        """The code of NaN."""
        return 0x80 if self.unsigned_zero else 0x7F

    def encode(self, values: npt.ArrayLike) -> npt.NDArray[np.uint8]:
        """The codes of float32 `values`, which are divided by their scale already, uint8 of the same shape; saturating,
        ties to even.

        This is the slow reference: a binary search among the midpoints. A value on a midpoint gets the even one of both
        codes.
        """
        x = np.asarray(values, np.float32)
        magnitude = np.minimum(np.abs(x), np.float32(self.max))
        below = np.searchsorted(self.midpoints, magnitude, side="left")
        above = np.searchsorted(self.midpoints, magnitude, side="right")
        code = np.where(below % 2 == 0, below, above)
        sign = np.signbit(x) & ((code > 0) | (not self.unsigned_zero))
        return np.where(np.isnan(x), self.nan_code, code | (sign.astype(np.int64) << 7)).astype(np.uint8)

    def decode(self, codes: npt.NDArray[np.uint8]) -> Float32s:
        """The float32 values of `codes`."""
        return self.values[codes]

    def round(self, magnitudes: Float32s) -> Float32s:
        """Round non-negative, finite magnitudes, divided by their scale, to the grid; saturating."""
        return self.grid[self.encode(magnitudes)]


@dataclass(frozen=True)
class Integers(GridFormat):
    """Signed integers of `bits` bits, used symmetrically: magnitudes up to 127, and no -128."""

    name: str
    bits: int
    terms: ClassVar[Literal[1]] = 1
    power_of_two: ClassVar[bool] = False
    by_value: ClassVar[bool] = False

    @cached_property
    def grid(self) -> Float32s:
        """The magnitudes 0, 1, 2 …, float32."""
        return np.arange(1 << (self.bits - 1), dtype=np.float32)

    def round(self, magnitudes: Float32s) -> Float32s:
        """Round non-negative magnitudes, divided by their scale, to the nearest integer, ties to even; saturating."""
        return np.minimum(np.rint(magnitudes), np.float32(self.max))


@dataclass(frozen=True)
class TwoTerms(GridFormat):
    """Two codes a and b for one value, a + b / `divisor`, under a scale that is a power of two.

    a is the value's nearest code, and b the code of `divisor` times the rounding error of a. `divisor` is 2 to the
    number of a code's binary digits: with E4M3's four digits it is 16, and a and b represent the eight digits of a BF16
    number exactly. Between two neighbours a the values are as dense as b's codes, and at their midpoint the two
    representations meet, so rounding a and then b is rounding to the nearest value of `grid`.
    """

    format: Format
    terms: ClassVar[Literal[2]] = 2
    power_of_two: ClassVar[bool] = True
    by_value: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """The format's name, such as `e4m3 in two terms`."""
        return f"{self.format.name} in two terms"

    @property
    def codes(self) -> Format:
        """The format of one code."""
        return self.format

    @property
    def divisor(self) -> int:
        """The divisor of the second term: 2 to the number of a code's binary digits."""
        return int(2 << self.format.mantissa_bits)

    @property
    def clip(self) -> float:
        """The largest first term a; a value may exceed it by the largest b / `divisor`."""
        return self.format.max

    @cached_property
    def grid(self) -> Float32s:
        """The magnitudes a + b / `divisor`, ascending from 0, float32 (exact)."""
        codes = self.format.grid.astype(np.float64)
        second = np.concatenate([-codes[:0:-1], codes]) / self.divisor
        half = np.diff(codes) / 2
        below = np.concatenate([[0], half])
        above = np.concatenate([half, [np.inf]])
        terms = [
            a + second[(second >= -low) & (second <= high)] for a, low, high in zip(codes, below, above, strict=True)
        ]
        return np.unique(np.concatenate(terms)).astype(np.float32)

    def encode(self, values: npt.ArrayLike) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """The codes a and b of float32 `values` divided by their scale, uint8 of the same shape each; saturating."""
        x = np.asarray(values, np.float32)
        first = self.format.encode(x)
        with np.errstate(invalid="ignore", over="ignore"):
            rest = (x - self.format.decode(first)) * np.float32(self.divisor)
        return first, self.format.encode(rest)

    def decode(self, first: npt.NDArray[np.uint8], second: npt.NDArray[np.uint8]) -> Float32s:
        """The float32 values of both codes together."""
        return self.format.decode(first) + self.format.decode(second) / np.float32(self.divisor)

    def round(self, magnitudes: Float32s) -> Float32s:
        """Round each non-negative, finite magnitude (divided by its scale) to the sum of its two codes; saturating."""
        return self.decode(*self.encode(magnitudes))


E4M3 = Format("e4m3", exponent_bits=4, mantissa_bits=3, bias=7)
E5M2 = Format("e5m2", exponent_bits=5, mantissa_bits=2, bias=15, ieee=True)
E4M3FNUZ = Format("e4m3fnuz", exponent_bits=4, mantissa_bits=3, bias=8, unsigned_zero=True)
#: The type of the codes as safetensors spells it.
CODE_DTYPE = "F8_E4M3"
FORMATS = {kind.name: kind for kind in (E4M3, E5M2, E4M3FNUZ)}
INT8 = Integers("int8", bits=8)
TWO_TERMS = TwoTerms(E4M3)
#: The grids of values that are made of codes: one code, or two.
CodeGrid = Format | TwoTerms
