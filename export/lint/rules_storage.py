"""Rules F4xx: external data.

The weights lie at offsets of other files. These rules check that the files exist and hold the right tensors. Only sizes
and the headers of safetensors files are read.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from onnx import TensorProto, helper
from onnx.external_data_helper import uses_external_data

from ...core.errors import InputError
from ...core.findings import Broken
from ...core.headers import StoredTensor, read_header
from ..onnx_file.indexed import FP8_TYPES, Indexed
from ..onnx_file.tensors import bytes_of, elements_of, type_name
from .rules import rule

AGAIN = "export the graph again"
#: Types whose numbers lie one by one in a tensor's own field, where they do not lie there as bytes.
ONE_BY_ONE = (
    TensorProto.FLOAT,
    TensorProto.DOUBLE,
    TensorProto.FLOAT16,
    TensorProto.BFLOAT16,
    TensorProto.INT64,
    TensorProto.INT32,
    *FP8_TYPES,
)
COPY = "copy the graph's whole directory again"


@rule("F401", "external-location")
def external_location(graph: Indexed) -> Broken:
    """External data lie in the graph's directory or below, symbolic links followed: a graph must not make its reader
    open other files.
    """
    for name, error in graph.storage.placeless:
        yield name, f"its place {error}; {AGAIN}"
    for name, _, where, place in graph.storage.external:
        if Path(where.location).is_absolute() or not place.inside:
            lie = f"its data lie in {where.location or 'no file'}"
            if place.linked:  # as a hub's cache has its files
                yield (
                    name,
                    f"{lie}, a link that leads outside the graph's directory; put a copy of the file in its place",
                )
            else:
                yield name, f"{lie}, outside the graph's directory; put the file beside the graph"


@rule("F402", "external-missing")
def external_missing(graph: Indexed) -> Broken:
    """The files of external data are there, and are files: opening a pipe or a device may never end."""
    missing: dict[str, list[str]] = {}
    for name, _, where, place in graph.storage.external:
        if place.inside and place.size is None:
            missing.setdefault(where.location, []).append(name)
    for location, tensors in missing.items():
        yield (
            tensors[0],
            f"its file {location} {graph.storage.places.at(location).why} (tensors in it: {len(tensors)}); {COPY}",
        )


@rule("F403", "external-bounds")
def external_bounds(graph: Indexed) -> Broken:
    """External data lie within their file: one that was cut short is found here, not when a kernel reads past its
    end.
    """
    for name, tensor, where, place in graph.storage.external:
        end = where.offset + (where.length if where.length is not None else bytes_of(tensor))
        if place.size is None:
            continue
        if where.offset < 0:
            yield name, f"its data begin at byte {where.offset} of {where.location}, before its start; {AGAIN}"
        elif end > place.size:
            yield name, f"its data end at byte {end} of {where.location}, which has {place.size}; {COPY}"


@rule("F404", "external-size")
def external_size(graph: Indexed) -> Broken:
    """The length of external data is that of the tensor's type and shape."""
    for name, tensor, where, _ in graph.storage.external:
        if where.length is not None and where.length != bytes_of(tensor):
            kind = type_name(tensor.data_type)
            yield (
                name,
                f"its data are {where.length} bytes, and {kind} {list(tensor.dims)} takes {bytes_of(tensor)}; {AGAIN}",
            )


@rule("F405", "external-tensor")
def external_tensor(graph: Indexed) -> Broken:
    """Data in a safetensors file are one of its tensors, of the type, and the one of that name if there is one: two of
    one shape are easily taken for each other.
    """
    cached = cache(header_of)
    for name, tensor, where, place in graph.storage.external:
        if place.size is None or place.path.suffix != ".safetensors":
            continue
        header = cached(place.path)
        if header is None:
            yield name, f"its file {where.location} has no safetensors header; {COPY}"
            continue
        here = header.names.get(where.offset)
        if here is None:
            yield name, f"no tensor of {where.location} begins at byte {where.offset}; {AGAIN}"
            continue
        dtype = header.stored[here].dtype
        named = header.stored.get(tensor.name)
        if named and named.start != where.offset:
            yield name, f"its data are those of {here} in {where.location}; {AGAIN}"
        elif dtype != _SAFETENSORS.get(type_name(tensor.data_type), dtype):
            yield (
                name,
                f"its data are {dtype} in {where.location}, and {type_name(tensor.data_type)} in the graph; {AGAIN}",
            )


#: ONNX's names of element types -> safetensors'; of those that are not here nothing is said.
_SAFETENSORS = {
    "FLOAT": "F32", "FLOAT16": "F16", "BFLOAT16": "BF16", "FLOAT8E4M3FN": "F8_E4M3", "FLOAT8E5M2": "F8_E5M2",
    "INT64": "I64", "INT32": "I32", "INT8": "I8", "UINT8": "U8", "BOOL": "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file: `stored` by name, and `names` by the byte they begin at."""

    stored: dict[str, StoredTensor]
    names: dict[int, str]


def header_of(path: Path) -> Header | None:
    """The header of a safetensors file; None when it does not read, or names no tensor."""
    try:
        stored = read_header(path)
    except InputError:
        return None
    if stored:
        return Header(stored, {tensor.start: name for name, tensor in reversed(stored.items())})
    return None


@rule("F406", "external-overlap")
def external_overlap(graph: Indexed) -> Broken:
    """Two tensors share all of their data (a tied weight) or none: a part in common is a wrong offset."""
    places = sorted(
        (where.location, where.offset, where.offset + bytes_of(tensor), name)
        for name, tensor, where, _ in graph.storage.external
    )
    for (file, start, end, name), (other_file, other_start, other_end, other) in pairwise(places):
        if file == other_file and other_start < end and (start, end) != (other_start, other_end):
            yield other, f"its data begin at byte {other_start} of {file}, inside those of {name} (to {end}); {AGAIN}"


@rule("F407", "inline-size")
def inline_size(graph: Indexed) -> Broken:
    """The data of a tensor inside the file are those of its type and shape, bytes or numbers."""
    for name, tensor in graph.tensors:
        kind = f"{type_name(tensor.data_type)} {list(tensor.dims)}"
        if uses_external_data(tensor) or tensor.data_type == TensorProto.UNDEFINED:
            continue
        if tensor.HasField("raw_data"):
            if len(tensor.raw_data) != bytes_of(tensor):
                yield name, f"its data are {len(tensor.raw_data)} bytes, and {kind} takes {bytes_of(tensor)}; {AGAIN}"
        elif tensor.data_type in ONE_BY_ONE:
            count = len(getattr(tensor, helper.tensor_dtype_to_field(tensor.data_type)))
            if count != elements_of(tensor):
                yield name, f"it holds {count} numbers, and {kind} takes {elements_of(tensor)}; {AGAIN}"
