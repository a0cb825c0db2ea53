"""Read the headers of safetensors files: names, types, shapes and positions of the tensors, without their data and
without torch.

The format is 8 bytes of length, JSON, data. The safetensors library validates a whole file when it opens one, and is
used for files of users (`calibrate.checkpoint.weights`). But it does not give the byte at which a tensor begins, which
a graph that points into the file needs; and the lint reports files that are cut short.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from .errors import InputError
from .files import regular_file

#: The longest header in bytes: the limit of the safetensors library.
LONGEST = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its type as safetensors spells it, its shape, and its bytes, from `start` to `end`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


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
                str(entry["dtype"]),
                tuple(map(int, entry["shape"])),
                *(8 + len(raw) + int(offset) for offset in entry["data_offsets"]),
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise damaged(file, f"its header does not read: {type(error).__name__}") from None


def make_header(tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> tuple[bytes, dict[str, StoredTensor]]:
    """Make the first bytes of a file, up to its data, of `tensors`: name -> type, shape and bytes, in their order; and
    the place of each tensor in the file.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends = [*accumulate((size for _, _, size in tensors.values()), initial=0)]
    for (name, (dtype, shape, _)), start, end in zip(tensors.items(), ends, ends[1:], strict=False):
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = 8 + len(text)
    places = {
        name: StoredTensor(dtype, shape, data + start, data + end)
        for (name, (dtype, shape, _)), start, end in zip(tensors.items(), ends, ends[1:], strict=False)
    }
    return len(text).to_bytes(8, "little") + text, places


def damaged(file: Path, why: object) -> InputError:
    """Make the error for a file that is damaged or cut short."""
    return InputError(file, f"is damaged or cut short ({why})", "copy or download it again")
