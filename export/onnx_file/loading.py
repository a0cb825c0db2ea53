"""Read an ONNX file that may come from anywhere: other files than regular ones are refused before they are opened, and
malformed ONNX before a rule sees it.
"""

import os
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path

import onnx
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from ...core.errors import InputError
from ...core.files import regular_file
from .indexed import Indexed

#: How many nodes, attributes, tensors and so on a graph may have: twice those of 45,000 GEMMs written one by one,
#: the experts of the largest open models. A file of a few bytes for each could keep a reader busy for days.
MOST_MESSAGES = 2_000_000
#: Protobuf's limit for one message, and so for an ONNX file, in bytes.
LARGEST_FILE = 2**31 - 1


class TooLargeError(Exception):
    """A file has more messages than are checked."""


def load_graph(path: Path) -> Indexed:
    """Read an ONNX file without its external data.

    Raises InputError where there is no such regular file, it is larger than an ONNX file can be, or it does not parse.
    """
    if os.path.isdir(path):
        raise InputError(path, "is a directory", f"name the ONNX file in it, such as {path / 'model.onnx'}")
    if (size := regular_file(path)) > LARGEST_FILE:
        raise InputError(
            path,
            f"is no ONNX model: it has {size} bytes, and protobuf takes at most {LARGEST_FILE}",
            "export it with its weights as external data",
        )
    try:
        model = onnx.load_model(path, format="protobuf", load_external_data=False)  # whatever the file's name ends in
    except OSError as error:
        raise InputError(path, f"cannot be read ({error.strerror})") from None
    except DecodeError:
        raise InputError(path, "is no ONNX model, or is cut short", "export it again") from None
    if not model.graph.node:
        raise InputError(path, "is no ONNX model, or holds no node", "export it again")
    try:
        damaged = damaged_text(model)
    except TooLargeError:
        raise InputError(
            path, f"has more than {MOST_MESSAGES} nodes, attributes and tensors, which no model has", "export it again"
        ) from None
    if damaged:
        raise InputError(path, f"is damaged ({damaged} is no UTF-8)", "export it again")
    return Indexed(model, path.parent)


def damaged_text(message: Message, counted: Iterator[int] | None = None) -> str | None:
    """The first text field that is no UTF-8, such as `graph.node.name`: protobuf returns bytes for it, which no rule
    and no operator's schema takes.

    Raises TooLargeError for more than `MOST_MESSAGES` messages; `counted` numbers them.
    """
    counted = count(1) if counted is None else counted
    for name, repeated, kind in _fields(message.DESCRIPTOR):
        held = getattr(message, name) if repeated else [getattr(message, name)] if message.HasField(name) else ()
        for value in held:
            if kind == FieldDescriptor.TYPE_MESSAGE:
                if next(counted) > MOST_MESSAGES:
                    raise TooLargeError
                if (inside := damaged_text(value, counted)) is not None:
                    return f"{name}.{inside}"
            elif isinstance(value, bytes):
                return name
    return None


@cache
def _fields(descriptor: Descriptor) -> list[tuple[str, bool, int]]:
    """Name, repetition and type of the fields that are text or may contain some; raw data are left out, as they may be
    gigabytes.
    """
    kinds = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE)
    return [(field.name, field.is_repeated, field.type) for field in descriptor.fields if field.type in kinds]
