"""Read `.npz` files of a run: into memory, and only where type and shape of every array are as they were written.

The SHA-256 of such a file is in the record, but whoever wrote the file could write the record too. `np.savez` does not
compress, so a file that does is refused: its arrays could be a thousand times as large as it is.
"""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .files import RESTORE, reading, regular_file


class Arrays(dict[str, npt.NDArray[Any]]):
    """Arrays by their names in a file; one that is missing is named."""

    def __missing__(self, name: str) -> npt.NDArray[Any]:
        """Raise ValueError with the name."""
        raise ValueError(f"it has no {name}")


def read_arrays(path: Path, what: str, remedy: str = RESTORE) -> Arrays:
    """Read all arrays of an `.npz` file that should contain `what`, by their names.

    Raises InputError, which ends with `remedy`, for a file that is damaged, compressed, or has Python objects, and for
    a pipe or a device, which would be waited for or read without end.
    """
    regular_file(path, remedy)
    with reading(path, what, remedy), open(path, "rb") as handle:
        with zipfile.ZipFile(handle) as archive:
            if any(part.file_size > part.compress_size for part in archive.infolist()):
                raise ValueError("its arrays are compressed")
        handle.seek(0)
        with np.load(handle, allow_pickle=False) as arrays:
            return Arrays({name: arrays[name] for name in arrays.files})


def check_array(name: str, values: npt.NDArray[Any], dtype: str, shape: Sequence[int | None]) -> None:
    """Raise ValueError for an array of another type or shape; None stands for any length."""
    fits = len(values.shape) == len(shape) and all(
        expected in (None, length) for expected, length in zip(shape, values.shape)
    )
    if values.dtype != np.dtype(dtype) or not fits:
        expected = ", ".join("any" if length is None else str(length) for length in shape)
        raise ValueError(f"{name} is {values.dtype} {list(values.shape)} and not {dtype} [{expected}]")


def check_range(name: str, values: npt.NDArray[Any], least: float, most: float) -> None:
    """Raise ValueError for an array with a value below `least` or above `most`; NaN is neither."""
    if np.isnan(values).all():
        return
    low = np.nanmin(values)
    high = np.nanmax(values)
    if not least <= low <= high <= most:
        form = ",d" if values.dtype.kind in "iu" else "g"
        first, last, lower, upper = (format(bound, form) for bound in (low, high, least, most))
        raise ValueError(f"{name} lies between {first} and {last}, and not between {lower} and {upper}")
