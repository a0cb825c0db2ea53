"""Whether an engine holds the very FP8 codes of a checkpoint: an engine of the same architecture and other weights
would run all the same.

TensorRT-RTX stores a weight's codes once, in one of two ways (read off its plans for sm89 and sm120): as they are,
[out, in]; or, where products of one input were merged, turned and side by side, so that one row holds a column of each
weight. Padding adds to a row. In all of these the rows of the matrix, or of its transpose, lie at equal distances; so
two neighbouring rows are searched for, and the rest must follow at their distance.
"""

import re
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from .. import names
from ..lint.external import stored_at
from ..lint.indexed import Indexed
from ..lint.rules_products import weight_of
from ..lint.tensors import bytes_of

Codes = npt.NDArray[np.uint8]
#: Bytes on both sides of the last weight found that are searched before the whole engine is: neighbours in the model
#: are neighbours there.
NEAR = 1 << 26
#: A row with fewer different codes may lie anywhere; a row of a dead channel does.
TELLING = 4


def modules_held(plan: Codes, graph: Indexed, modules: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """For each module its weight's codes, as the graph points at them, are looked for in a plan (uint8 [bytes], a
    mapping of the file): whether all are there.

    A weight whose codes might lie anywhere (nearly all of them the same) is passed over.
    """
    products, near = {product.node.name: product for product in graph.products}, len(plan) // 2
    for module in modules:
        product = products.get(names.matmul(module))
        side = weight_of(graph, product) if product is not None else None
        codes = (
            stored_codes(graph, side.dequantize.input[0]) if side is not None and side.dequantize is not None else None
        )
        if codes is not None and _anchor(codes) is None and _anchor(codes.T) is None:
            continue
        place = find(plan, codes, near) if codes is not None else None
        near = near if place is None else place
        yield module, place is not None


def stored_codes(graph: Indexed, tensor: str) -> Codes:
    """The codes of a weight, uint8 [rows, columns], mapped from its file; empty where they do not lie in one.

    Raises InputError for a file cut short or gone.
    """
    found = graph.initializers[tensor]
    where = stored_at(found)
    if where is None or len(found.dims) != 2:
        return np.zeros((0, 0), np.uint8)
    place, end = graph.storage.places.at(where.location), where.offset + bytes_of(found)
    if place.size is None:
        raise InputError(f"{place.path}: {place.why or 'lies outside model/'}; copy the whole of model/ again")
    if where.offset < 0 or end > place.size:
        raise InputError(
            f"{place.path}: is cut short: the codes of {tensor} end at byte {end}, and it has {place.size}; copy the "
            "whole of model/ again"
        )
    return np.memmap(place.path, np.uint8, "r", where.offset, tuple(found.dims))


def find(plan: Codes, codes: Codes, near: int = 0) -> int | None:
    """Where the matrix or its transpose lies in the plan with its rows at equal distances; None where it does not.

    The search begins around `near`.
    """
    nearby = (max(0, near - NEAR), min(len(plan), near + NEAR))
    layouts = (codes, codes.T)
    for start, end in (nearby, (0, len(plan))):
        for rows in layouts:
            if (place := _rows_at(plan, rows, start, end)) is not None:
                return place
    return None


def _rows_at(plan: Codes, rows: Codes, start: int, end: int) -> int | None:
    if (anchor := _anchor(rows)) is None:
        return None
    size, (first, second) = rows.shape[1], (rows[i].tobytes() for i in (anchor, anchor + 1))
    for match in re.finditer(re.escape(first), plan[start:end].data):
        place = start + match.start()
        follower = re.compile(re.escape(second)).search(plan[: place + len(rows) * size * 16].data, place + size)
        distance = follower.start() - place if follower else 0
        begin = place - anchor * distance
        if follower and begin >= 0 and begin + distance * (len(rows) - 1) + size <= len(plan):
            view = np.lib.stride_tricks.as_strided(plan[begin:], rows.shape, (distance, 1), writeable=False)
            if np.array_equal(view, rows):
                return begin
    return None


def _anchor(rows: Codes) -> int | None:
    """The first of two neighbouring rows that are unlike anything else."""
    return next((i for i in range(len(rows) - 1) if all(len(np.unique(rows[j])) >= TELLING for j in (i, i + 1))), None)
