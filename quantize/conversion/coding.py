"""Encode a part of a matrix in rows or blocks, and prove the codes against the numbers that they were made of.

The proof decodes each code by other means than it was made: its bits are those of an FP16 number of 2^-8 times its
value. As integers, the FP32 bits of the quotient and of the decoded value differ by at most half of a code's step,
2^19, for they count units of the quotient's own octave, in which a step is 2^20 of them; below the normal codes a step
is a fixed 2^-9, and the few codes there are looked up one by one. A quotient of two BF16 numbers is a midpoint of codes
or at least 2^-13 of itself away, so FP32 decides each case exactly.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...calibrate.measure.histogram import INFINITY, magnitudes
from ...core.errors import InputError
from ...options import ScaleGrid
from ..codes.blocks import SIDE, spread_scales, weight_blocks
from ..codes.encoding import CODE, round_quotients
from ..codes.formats import E4M3
from ..scales.clip import SMALLEST_SCALE, scale_of

Float32s = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
#: Values that are encoded and proven at a time: what of them is in FP32 fits into a processor's cache.
CHUNK = 1 << 17
#: A code's step in the bits of an FP32 number, and the bits of a factor of 2^8.
_STEP = 1 << (23 - E4M3.mantissa_bits)
_FACTOR = 8 << 23
#: The largest magnitude whose step is that of the subnormal codes: the smallest normal code.
_SMALL = 1 << E4M3.mantissa_bits


@dataclass(frozen=True)
class Errors:
    """The largest errors of codes: `steps`, of the steps between neighbouring codes, and `relative`, of the values that
    have normal codes.
    """

    steps: float = 0.0
    relative: float = 0.0

    def __or__(self, other: "Errors") -> "Errors":
        """The largest of both."""
        return Errors(max(self.steps, other.steps), max(self.relative, other.relative))


@dataclass(frozen=True)
class CodedPart:
    """Codes uint8 [rows, columns] and scales float32 [rows, 1] or [blocks, blocks], with the proof's largest errors."""

    codes: Bytes
    scales: Float32s
    errors: Errors


def encode_part(name: str, values: torch.Tensor, blocks: ScaleGrid | None) -> CodedPart:
    """Encode `values` [rows, columns], some rows of the matrix `name`, in blocks of 128 x 128 (whole ones, but for the
    matrix's last) with scales on the grid `blocks`, or with a BF16 scale for each row (None), and prove every code.

    Raises InputError for values that are not finite in BF16.
    """
    bf16 = values.to(torch.bfloat16)
    return _encoded(bf16, part_scales(name, bf16, blocks), blocks is not None)


def encode_again(name: str, codes: torch.Tensor, factors: Float32s) -> CodedPart:
    """Encode float8_e4m3fn `codes` [rows, columns] in blocks under scales `factors` [blocks, blocks] again, under the
    least power of two for each block at which nothing saturates, and prove every code. Division by a power of two is
    exact, so FP32 decides each case exactly here too.

    Raises InputError for codes of the matrix `name` that are NaN, and for products with their scales that overflow.
    """
    rows, columns = codes.shape
    values = codes.float().mul_(spread_scales(torch.from_numpy(factors), slice(0, rows), columns))
    largest = weight_blocks(values).abs().amax(1).view(factors.shape).numpy()
    if not np.isfinite(largest).all():
        raise refused_values(name, int(values.isnan().sum()), int(values.isinf().sum()), values.numel())
    scales = np.maximum(scale_of(largest, E4M3, "power-of-two"), np.float32(SMALLEST_SCALE))
    return _encoded(values, scales, blocks=True)


def _encoded(values: torch.Tensor, scales: Float32s, blocks: bool) -> CodedPart:
    """Encode `values` [rows, columns] under `scales`, and prove every code."""
    rows, columns = values.shape
    codes = torch.empty((rows, columns), dtype=CODE)
    errors = Errors()
    for chunk in _chunks(rows, columns, blocks):
        # in FP32 already they would be a view with gaps, which the proof cannot read
        quotients = values[chunk].float().contiguous().div_(_spread(scales, chunk, blocks))
        codes[chunk] = coded = round_quotients(quotients)
        errors |= largest_errors(quotients, coded)
    return CodedPart(codes.view(torch.uint8).numpy(), scales, errors)


def part_scales(name: str, values: torch.Tensor, blocks: ScaleGrid | None) -> Float32s:
    """The scale of each row, or of each block on the grid `blocks`, of BF16 `values` [rows, columns], float32.

    A row of zeros has the smallest scale, under which its codes are zeros as under any other.
    """
    patterns = np.bitwise_and(values.contiguous().view(torch.int16).numpy(), 0x7FFF)
    rows, columns = patterns.shape
    if blocks is not None:
        starts = np.arange(0, rows, SIDE), np.arange(0, columns, SIDE)
        bands = [patterns[start : start + SIDE].max(axis=0) for start in starts[0]]
        largest = np.maximum.reduceat(np.stack(bands), starts[1], axis=1)
    else:
        largest = patterns.max(axis=1, keepdims=True)
    if largest.max() >= INFINITY:
        nan = int((patterns > INFINITY).sum())
        infinite = int((patterns == INFINITY).sum())
        raise refused_values(name, nan, infinite, patterns.size)
    scales: Float32s = scale_of(magnitudes(largest), E4M3, blocks or "bf16")
    return np.maximum(scales, np.float32(SMALLEST_SCALE))


def refused_values(name: str, nan: int, infinite: int, size: int) -> InputError:
    """Make the error for the tensor `name`, some of whose values are no numbers; `size`: the values that were read."""
    return InputError(
        name,
        f"holds {nan:,} NaN and {infinite:,} Inf in BF16 among {size:,} values",
        "take an earlier checkpoint of the training, or copy or download the file again",
    )


def _chunks(rows: int, columns: int, blocks: bool) -> Iterator[tuple[slice, slice]]:
    """Cut a part of a matrix into pieces of about `CHUNK` values: of whole rows, or of one row of blocks."""
    high = SIDE if blocks else max(1, CHUNK // columns)
    width = CHUNK // SIDE if blocks else columns
    for top in range(0, rows, high):
        for left in range(0, columns, width):
            yield slice(top, min(top + high, rows)), slice(left, min(left + width, columns))


def _spread(scales: Float32s, chunk: tuple[slice, slice], blocks: bool) -> torch.Tensor:
    """The scales of a chunk, to be broadcast over it."""
    rows, columns = chunk
    if not blocks:
        return torch.from_numpy(scales[rows])
    of_columns = np.repeat(scales[rows.start // SIDE, columns.start // SIDE : -(-columns.stop // SIDE)], SIDE)
    return torch.from_numpy(of_columns[: columns.stop - columns.start])


def largest_errors(quotients: torch.Tensor, codes: torch.Tensor) -> Errors:
    """Decode `codes` float8_e4m3fn, and compare them with the `quotients` float32 that they stand for, both of one
    shape and contiguous; `quotients` are overwritten.
    """
    bits = codes.view(torch.int8)
    # the sign is spread over nine bits; FP16's sign is the upper one, and 0x4000 its largest exponent bit
    halves = bits.to(torch.int16).mul_(1 << (10 - E4M3.mantissa_bits)).bitwise_and_(~0x4000)
    decoded = halves.view(torch.float16).float()
    small = np.flatnonzero(np.bitwise_and(bits.numpy(), 0x7F).reshape(-1) <= _SMALL)
    fine = 0.0
    if small.size:
        flat: Any = quotients.numpy().reshape(-1)
        values: Any = decoded.numpy().reshape(-1)
        differences = np.abs(flat[small] - values[small] * 256)
        fine = float(differences.max()) / E4M3.smallest_subnormal
        flat[small], values[small] = 1, 1 / 256
    low, high = torch.aminmax(quotients.view(torch.int32) - decoded.view(torch.int32))
    coarse = max(abs(int(low) - _FACTOR), abs(int(high) - _FACTOR)) / _STEP
    least, most = torch.aminmax(decoded.div_(quotients))
    return Errors(max(fine, coarse), max(1 - 256 * float(least), 256 * float(most) - 1, 0.0))
