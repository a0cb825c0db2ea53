"""Rules F4xx: external data.

The weights lie in files beside the graph, at an offset; here is checked that they are there, and are the right ones.

Only sizes and the headers of safetensors files are read (8 bytes of length, JSON, data: the format's whole
specification).
"""

import json
import math
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

from onnx import TensorProto, helper
from onnx.external_data_helper import uses_external_data

from .indexed import FP8_TYPES, Indexed, Stored, bytes_of, stored_at
from .rules import Broken, rule
from .rules_codes import type_name

AGAIN = "export the graph again"
#: Types whose numbers lie one by one in a tensor's own field, where they do not lie there as bytes.
ONE_EACH = (
    TensorProto.FLOAT,
    TensorProto.DOUBLE,
    TensorProto.FLOAT16,
    TensorProto.BFLOAT16,
    TensorProto.INT64,
    TensorProto.INT32,
    *FP8_TYPES,
)
COPY = "copy the graph's whole directory again"


def external(graph: Indexed) -> Iterator[tuple[TensorProto, Stored]]:
    """Every initializer whose data lie outside the file, and where; those with unreadable numbers are left to F401."""
    for tensor in graph.initializers.values():
        try:
            where = stored_at(tensor)
        except ValueError:
            continue
        if where is not None:
            yield tensor, where


def present(graph: Indexed) -> Iterator[tuple[TensorProto, Stored, Path]]:
    """Those whose file is inside the directory and there, and their file."""
    for tensor, where in external(graph):
        path = graph.directory / where.location
        if _inside(path, graph.directory) and path.is_file():
            yield tensor, where, path


def _inside(path: Path, directory: Path) -> bool:
    return path.resolve().is_relative_to(directory.resolve())


@rule("F401", "external-location")
def external_location(graph: Indexed) -> Broken:
    """External data lie in the graph's directory or below, symbolic links followed: a graph must not make its reader
    open other files.
    """
    for tensor in graph.initializers.values():
        try:
            where = stored_at(tensor)
        except ValueError as error:
            yield tensor.name, f"its place in the file is no number ({error}); {AGAIN}"
            continue
        if where is not None and (
            not where.location
            or Path(where.location).is_absolute()
            or not _inside(graph.directory / where.location, graph.directory)
        ):
            yield (
                tensor.name,
                (
                    f"its data lie in {where.location or 'no file'}, outside the graph's directory; put the file "
                    "beside "
                    "the graph"
                ),
            )


@rule("F402", "external-missing")
def external_missing(graph: Indexed) -> Broken:
    """The files of external data are there."""
    missing: dict[str, list[str]] = {}
    for tensor, where in external(graph):
        path = graph.directory / where.location
        if where.location and _inside(path, graph.directory) and not path.is_file():
            missing.setdefault(where.location, []).append(tensor.name)
    for location, tensors in missing.items():
        yield tensors[0], f"its file {location} is missing (tensors in it: {len(tensors)}); {COPY}"


@rule("F403", "external-bounds")
def external_bounds(graph: Indexed) -> Broken:
    """External data lie within their file: one that was cut short is found here, not when a kernel reads on."""
    for tensor, where, path in present(graph):
        end, size = where.offset + (where.length if where.length is not None else bytes_of(tensor)), path.stat().st_size
        if where.offset < 0:
            yield tensor.name, f"its data begin at byte {where.offset} of {where.location}, before its start; {AGAIN}"
        elif end > size:
            yield tensor.name, f"its data end at byte {end} of {where.location}, which has {size}; {COPY}"


@rule("F404", "external-size")
def external_size(graph: Indexed) -> Broken:
    """The length of external data is that of the tensor's type and shape."""
    for tensor, where in external(graph):
        if where.length is not None and where.length != bytes_of(tensor):
            kind = type_name(tensor.data_type)
            yield (
                tensor.name,
                f"its data are {where.length} bytes, and {kind} {list(tensor.dims)} takes {bytes_of(tensor)}; {AGAIN}",
            )


@rule("F405", "external-tensor")
def external_tensor(graph: Indexed) -> Broken:
    """Data in a safetensors file are one of its tensors, of the type, and the one of that name if there is one: two of
    one shape are easily taken for each other.
    """
    header = cache(safetensors_header)
    for tensor, where, path in present(graph):
        if path.suffix != ".safetensors":
            continue
        stored = header(path)
        if stored is None:
            yield tensor.name, f"its file {where.location} has no safetensors header; {COPY}"
            continue
        here = [name for name, (start, _) in stored.items() if start == where.offset]
        if not here:
            yield tensor.name, f"no tensor of {where.location} begins at byte {where.offset}; {AGAIN}"
        elif tensor.name in stored and stored[tensor.name][0] != where.offset:
            yield tensor.name, f"its data are those of {here[0]} in {where.location}; {AGAIN}"
        elif stored[here[0]][1] != _SAFETENSORS.get(type_name(tensor.data_type), stored[here[0]][1]):
            yield (
                tensor.name,
                (
                    f"its data are {stored[here[0]][1]} in {where.location}, and {type_name(tensor.data_type)} in the "
                    f"graph; {AGAIN}"
                ),
            )


#: ONNX's names of element types -> safetensors'; of those that are not here nothing is said.
_SAFETENSORS = {
    "FLOAT": "F32", "FLOAT16": "F16", "BFLOAT16": "BF16", "FLOAT8E4M3FN": "F8_E4M3", "FLOAT8E5M2": "F8_E5M2",
    "INT64": "I64", "INT32": "I32", "INT8": "I8", "UINT8": "U8", "BOOL": "BOOL",
}  # fmt: skip


def safetensors_header(path: Path) -> dict[str, tuple[int, str]] | None:
    """Name -> where in the file a tensor of a safetensors file begins, and its type; None when the header does not
    read.
    """
    try:
        with open(path, "rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            header = json.loads(handle.read(length)) if length < path.stat().st_size else {}
        return {
            name: (8 + length + entry["data_offsets"][0], entry["dtype"])
            for name, entry in header.items()
            if name != "__metadata__"
        } or None
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


@rule("F406", "external-overlap")
def external_overlap(graph: Indexed) -> Broken:
    """Two tensors share all of their data (a tied weight) or none: a part in common is a wrong offset."""
    places = sorted(
        (where.location, where.offset, where.offset + bytes_of(tensor), tensor.name)
        for tensor, where in external(graph)
    )
    for (file, start, end, name), (other_file, other_start, other_end, other) in pairwise(places):
        if file == other_file and other_start < end and (start, end) != (other_start, other_end):
            yield other, f"its data begin at byte {other_start} of {file}, inside those of {name} (to {end}); {AGAIN}"


@rule("F407", "inline-size")
def inline_size(graph: Indexed) -> Broken:
    """The data of a tensor inside the file are those of its type and shape, bytes or numbers."""
    for name, tensor in graph.initializers.items():
        kind = f"{type_name(tensor.data_type)} {list(tensor.dims)}"
        if uses_external_data(tensor) or tensor.data_type == TensorProto.UNDEFINED:
            continue
        if tensor.HasField("raw_data"):
            if len(tensor.raw_data) != bytes_of(tensor):
                yield name, f"its data are {len(tensor.raw_data)} bytes, and {kind} takes {bytes_of(tensor)}; {AGAIN}"
        elif tensor.data_type in ONE_EACH:
            found = len(getattr(tensor, helper.tensor_dtype_to_field(tensor.data_type)))
            if found != math.prod(tensor.dims):
                yield name, f"it holds {found} numbers, and {kind} takes {math.prod(tensor.dims)}; {AGAIN}"
