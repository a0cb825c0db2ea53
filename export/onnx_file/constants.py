"""The small constants of a graph, read when a rule asks for one: scales and zero points.

A file may say that a scale has any number of values, and may have any number of scales at the same place of another
file. So there is a limit to what is read of one, and of all.
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
LARGEST_CONSTANT, LARGEST_SUM = 1 << 22, 1 << 28


@dataclass(frozen=True)
class _Source:
    """The source of a constant: a tensor of the file, and the types it is cast to on the way."""

    tensor: TensorProto
    casts: tuple[int, ...]


class Constants:
    """The numbers of constants by name; those that were read are kept."""

    def __init__(self, tensors: Mapping[str, TensorProto], producers: Mapping[str, NodeProto], places: Places):
        """`tensors` of the file by name, the node that makes each value, and the files of external data."""
        self._tensors, self._producers, self._places = tensors, producers, places
        self._read: dict[str, Numbers | None] = {}
        self._fingerprints: dict[str, bytes | None] = {}
        self._unread: dict[str, str] = {}
        self._sum = 0

    def get(self, value: str) -> Numbers | None:
        """The numbers of a constant as FP32, through Cast and Identity; None where it is computed, its data cannot be
        read, or it is not read (`unread`).
        """
        if value not in self._read:
            self._read[value] = self._numbers(value)
        return self._read[value]

    def fingerprint(self, value: str) -> bytes | None:
        """Return a hash that is the same for equal numbers; None where there are none."""
        if value not in self._fingerprints:
            numbers = self.get(value)
            self._fingerprints[value] = None if numbers is None else blake2b(numbers.tobytes()).digest()
        return self._fingerprints[value]

    def unread(self, value: str) -> str | None:
        """Why a constant that the file has is not read; None where it is, or there is none."""
        self.get(value)
        return self._unread.get(value)

    def is_stored(self, value: str) -> bool:
        """Tell whether a value is a tensor of the file, or one cast."""
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
        return None if numbers is None else numbers.astype(np.float32, copy=False)

    def _source(self, value: str) -> _Source | None:
        """Return the source of a constant; None for a value that is computed."""
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
    """Numbers cast from type to type; None for none, and for strings."""
    for kind in kinds:
        if numbers is None or kind == TensorProto.STRING:
            return None
        with np.errstate(all="ignore"):  # what becomes infinite or NaN is found as such
            numbers = numbers.real.astype(helper.tensor_dtype_to_np_dtype(kind))
    return numbers
