"""Read and make the headers of safetensors files: names, types, shapes and positions of the tensors, without their data
and without torch.

The format is 8 bytes of length, JSON, data. The safetensors library validates a whole file when it opens one, and is
used for files of users (`calibrate.checkpoint.weights`). But it does not give the byte at which a tensor begins, which
a graph that points into the file needs; and the lint reports files that are cut short.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from .errors import InputError
from .files import regular_file

#: The longest header in bytes: the limit of the safetensors library.
LONGEST = 100_000_000
#: Bits of a value of the types whose names do not say so.
BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its type as safetensors spells it, its shape, and its bytes, from `start` to `end`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.end - self.start


def value_bits(dtype: str) -> int:
    """The bits of a value of a type: 16 for `BF16`, 8 for `F8_E4M3`; 0 for a type that is not known."""
    digits = dtype.partition("_")[0].lstrip("BFIUC")
    by_name = int(digits) if digits.isdecimal() and len(digits) < 4 else 0
    return BITS.get(dtype, by_name)


def header_bytes(file: Path) -> bytes:
    """Read the raw header of a file, without its length; raise InputError, naming the file, where there is none."""
    size = regular_file(file)
    with open(file, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if not 0 < length <= min(size - 8, LONGEST):
            raise damaged(file, f"it has {size} bytes, and a header of {length}")
        return handle.read(length)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read the header of a file: name -> tensor. It does not check that the file contains all the data.

    Raises InputError, naming the file, for a header that does not parse.
    """
    raw = header_bytes(file)
    try:
        entries = json.loads(raw)
        return {
            name: StoredTensor(
                file,
                str(entry["dtype"]),
                tuple(map(int, entry["shape"])),
                *(8 + len(raw) + int(offset) for offset in entry["data_offsets"]),
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise damaged(file, f"its header does not read: {type(error).__name__}") from None


def make_header(
    file: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> tuple[bytes, dict[str, StoredTensor]]:
    """Make the first bytes of `file`, up to its data, of `tensors`: name -> type and shape; and where each tensor lies.

    Wider types come first, so that each value lies at a multiple of its size, which readers that map a file need.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, tuple[int, int]] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: -value_bits(tensors[name][0])):
        dtype, shape = tensors[name]
        start = end
        end = end + prod(shape) * value_bits(dtype) // 8
        offsets[name] = start, end
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = 8 + len(text)
    stored = {
        name: StoredTensor(file, *tensors[name], data + start, data + end) for name, (start, end) in offsets.items()
    }
    return len(text).to_bytes(8, "little") + text, stored


def damaged(file: Path, why: object) -> InputError:
    """Make the error for a file that is damaged or cut short."""
    return InputError(file, f"is damaged or cut short ({why})", "copy or download it again")
