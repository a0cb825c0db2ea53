"""Find the data of an ONNX file's tensors in other files.

A file may come from anywhere and declare anything as its external data. So each location is checked before it is
opened: it must be a regular file in the graph's directory or below, after symbolic links are followed.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from ...core.errors import InputError
from ...core.files import regular_file
from .tensors import Array, bytes_of

#: A number as it may stand for an offset or a length.
_NUMBER = re.compile(r"-?[0-9]{1,4000}", re.ASCII)


@dataclass(frozen=True)
class ExternalPlace:
    """The place of a tensor's data outside the ONNX file: `location` relative to it, `offset` and `length` in bytes
    (length None: to the end of the file).
    """

    location: str
    offset: int
    length: int | None


def stored_at(tensor: TensorProto) -> ExternalPlace | None:
    """The place of a tensor's external data; None for a tensor inside the ONNX file.

    Raises ValueError for malformed numbers, and for a key with two values, of which readers take different ones.
    """
    if not uses_external_data(tensor):
        return None
    entries: dict[str, str] = {}
    for entry in tensor.external_data:
        if entries.setdefault(entry.key, entry.value) != entry.value:
            raise ValueError(f"has two values for {entry.key}")
    numbers = {key: entries[key] for key in ("offset", "length") if key in entries}
    for key, text in numbers.items():
        if not _NUMBER.fullmatch(text):
            raise ValueError(f"has the {key} {text!r}, which is no number")
    length = numbers.get("length")
    return ExternalPlace(
        entries.get("location", ""), int(numbers.get("offset", 0)), None if length is None else int(length)
    )


@dataclass(frozen=True)
class Place:
    """A file that is declared to hold external data.

    `inside`: whether it is in the graph's directory or below. `size` in bytes; None where there is no such file, and
    `why` says so, as "is missing". `linked`: its name is in the directory, and a link leads out.
    """

    path: Path
    inside: bool
    size: int | None
    why: str = ""
    linked: bool = False


class Places:
    """The files that are declared to hold external data, each examined once and not opened."""

    def __init__(self, directory: Path):
        """`directory` is the graph's."""
        self._directory = directory
        self._root = os.path.realpath(directory)
        self._known: dict[str, Place] = {}

    def at(self, location: str) -> Place:
        """Examine a location; a location outside the directory is not touched."""
        if location not in self._known:
            self._known[location] = self._look(location)
        return self._known[location]

    def _look(self, location: str) -> Place:
        path = self._directory / location
        try:
            inside = bool(location) and Path(os.path.realpath(path)).is_relative_to(self._root)
            if inside and not os.path.lexists(path):
                return Place(path, True, None, "is missing")
            linked = bool(location) and Path(os.path.normpath(os.path.join(self._root, location))).is_relative_to(
                self._root
            )
            return Place(path, inside, regular_file(path) if inside else None, linked=linked and not inside)
        except InputError as error:
            return Place(path, True, None, error.fault)
        except (OSError, ValueError) as error:
            return Place(path, False, None, str(error))


class Storage:
    """The tensors of a file whose data lie outside it."""

    def __init__(self, tensors: Iterable[tuple[str, TensorProto]], directory: Path):
        """Examine `tensors`, each with its name for messages (`every_tensor`), in the graph's directory.

        `external`: name, tensor, place, and the file at that place; `placeless`: tensors without a valid place, and
        why.
        """
        self.places = Places(directory)
        self.external: list[tuple[str, TensorProto, ExternalPlace, Place]] = []
        self.placeless: list[tuple[str, str]] = []
        for name, tensor in tensors:
            try:
                where = stored_at(tensor)
            except ValueError as error:
                self.placeless.append((name, str(error)))
                continue
            if where is not None:
                self.external.append((name, tensor, where, self.places.at(where.location)))


def read_tensor(tensor: TensorProto, places: Places) -> Array | None:
    """Read a tensor's values, from a file where they are external; None where they cannot be read."""
    if tensor.data_type == TensorProto.STRING:
        return None
    try:
        if (where := stored_at(tensor)) is None:
            return numpy_helper.to_array(tensor)
        file = places.at(where.location)
        if file.size is None or where.offset < 0 or where.offset + bytes_of(tensor) > file.size:
            return None
        with open(file.path, "rb") as handle:
            handle.seek(where.offset)
            data = handle.read(bytes_of(tensor))
        return np.frombuffer(data, helper.tensor_dtype_to_np_dtype(tensor.data_type)).reshape(tuple(tensor.dims))
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None
