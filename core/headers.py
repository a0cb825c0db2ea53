"""The headers of safetensors files: which tensors lie where, told without reading one, and without torch.

The format is 8 bytes of length, JSON, data. Its own library, which looks through a whole file when it opens one and so
judges what users give (`calibrate.checkpoint.weights`), tells names, types and shapes, but not at which byte a tensor
begins: a graph that points into the file must know that, and the lint speaks of files that are cut short.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from .errors import InputError
from .files import regular_file

#: The longest header, in bytes: what safetensors' own library takes.
LONGEST = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its type in safetensors' words, its shape, and its bytes, from `start` to `end`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def header_bytes(file: Path) -> bytes:
    """The header of a file as it is written, without its length. Raises InputError, naming the file, where there is
    none.
    """
    size = regular_file(file)
    with open(file, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if not 0 < length <= min(size - 8, LONGEST):
            raise damaged(file, f"it has {size} bytes, and a header of {length}")
        return handle.read(length)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Name -> place, of the tensors of a file. Whether the data are all there is not looked at.

    Raises InputError, naming the file, for a header that does not read.
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


def damaged(file: Path, why: object) -> InputError:
    """Make the error for a file that does not read."""
    return InputError(f"{file}: is damaged or cut short ({why}); copy or download it again")
