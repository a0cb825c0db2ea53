"""Read the small constants of a graph on demand: scales and zero points.

A file may declare a scale with any number of values, and any number of scales at one place of another file. So the
bytes that are read of one constant, and of all, are limited.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper

from .external import Places, read_tensor
from .tensors import Array, attribute, elements_of

Numbers = npt.NDArray[np.float32]
#: How many Cast and Identity a constant is read through; no exporter writes more than two.
LONGEST_CAST = 8
#: How many numbers a constant may have to be read, sixteen for each token of the largest vocabulary; and all together.
LARGEST_CONSTANT = 1 << 22
LARGEST_SUM = 1 << 28


@dataclass(frozen=True)
class _Source:
    """The tensor behind a constant, and the types that it is cast to on the way."""

    tensor: TensorProto
    casts: tuple[int, ...]


class Constants:
    """The values of constants by name, cached."""

    def __init__(self, tensors: Mapping[str, TensorProto], producers: Mapping[str, NodeProto], places: Places):
        """`tensors` of the file by name, the node that makes each value, and the files of external data."""
        self._tensors = tensors
        self._producers = producers
        self._places = places
        self._read: dict[str, Numbers | None] = {}
        self._fingerprints: dict[str, bytes | None] = {}
        self._unread: dict[str, str] = {}
        self._sum = 0

    def get(self, value: str) -> Numbers | None:
        """The values of a constant as FP32, through Cast and Identity; None where it is computed, unreadable, or too
        large (`unread`).
        """
        if value not in self._read:
            self._read[value] = self._numbers(value)
        return self._read[value]

    def fingerprint(self, value: str) -> bytes | None:
        """Hash the values of a constant; None where there are none. Equal values have equal hashes."""
        if value not in self._fingerprints:
            numbers = self.get(value)
            self._fingerprints[value] = None if numbers is None else blake2b(numbers.tobytes()).digest()
        return self._fingerprints[value]

    def unread(self, value: str) -> str | None:
        """Say why a constant of the file was not read; None where it was, or where there is no such constant."""
        self.get(value)
        return self._unread.get(value)

    def is_stored(self, value: str) -> bool:
        """Tell whether a value is a tensor of the file, or a Cast of one."""
        return self._source(value) is not None

    def _numbers(self, value: str) -> Numbers | None:
        source = self._source(value)
        if source is None:
            return None
        size = elements_of(source.tensor)
        if size > LARGEST_CONSTANT:
            self._unread[value] = f"has {size} numbers and is not read: no scale has more than {LARGEST_CONSTANT}"
        elif self._sum + size > LARGEST_SUM:
            self._unread[value] = f"is not read: the scales have more than {LARGEST_SUM} numbers together"
        if value in self._unread:
            return None
        self._sum += size
        numbers = _cast(read_tensor(source.tensor, self._places), (*source.casts, TensorProto.FLOAT))
        if numbers is None:
            return None
        return numbers.astype(np.float32, copy=False)

    def _source(self, value: str) -> _Source | None:
        """Find the tensor behind a value; None for a computed value."""
        casts: list[int] = []
        for _ in range(LONGEST_CAST + 1):
            if value in self._tensors:
                return _Source(self._tensors[value], tuple(reversed(casts)))
            node = self._producers.get(value)
            if node is None or node.op_type not in ("Cast", "Identity"):
                return None
            casts += [attribute(node, "to", 0)] if node.op_type == "Cast" else []
            value = node.input[0]
        return None


def _cast(numbers: Array | None, kinds: tuple[int, ...]) -> Array | None:
    """Cast values through a chain of types; None for strings, and for no values."""
    for kind in kinds:
        if numbers is None or kind == TensorProto.STRING:
            return None
        with np.errstate(all="ignore"):  # what becomes infinite or NaN is found as such
            numbers = numbers.real.astype(helper.tensor_dtype_to_np_dtype(kind))
    return numbers
