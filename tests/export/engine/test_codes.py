"""Whether a matrix lies in a file of bytes: as it is, turned, beside others, padded; not when one code is another."""

import json
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given

from fp8q.export.engine.codes import find, modules_held
from fp8q.export.lint.loading import load_graph

Codes = npt.NDArray[np.uint8]


def matrix(seed: int, rows: int = 16, columns: int = 24) -> Codes:
    return np.random.default_rng(seed).integers(0, 256, (rows, columns), dtype=np.uint8)


def around(*parts: Codes) -> Codes:
    """Bytes with the parts in them, at odd places."""
    return np.concatenate(
        [np.concatenate([matrix(90 + i, 1, 101 + i).ravel(), part.ravel()]) for i, part in enumerate(parts)]
        + [matrix(80, 1, 57).ravel()]
    )


def test_a_matrix_is_found_as_it_is_and_turned_and_padded_and_beside_others() -> None:
    codes, other = matrix(1), matrix(2, 40)
    assert find(around(codes), codes) == 101
    assert find(around(other, codes), codes) == 101 + other.size + 102
    assert find(around(codes.T.copy()), codes) == 101
    # columns of both side by side, as merged products lie
    assert find(around(np.concatenate([other, codes]).T.copy()), codes) == 101 + 40
    assert find(around(np.pad(codes, ((0, 0), (0, 8)))), codes) == 101


def test_a_row_that_occurs_earlier_as_well_does_not_mislead() -> None:
    codes = matrix(1)
    assert find(around(codes[0], codes), codes) == 101 + 24 + 102


def test_dead_channels_are_passed_over_in_the_search_and_not_in_the_comparison() -> None:
    codes = matrix(1)
    codes[:3] = 0
    assert find(around(np.zeros((9, 24), np.uint8), codes), codes) == 101 + 9 * 24 + 102
    changed = codes.copy()
    changed[0, 5] = 1
    assert find(around(changed), codes) is None


@given(st.integers(0, 15), st.integers(0, 23), st.integers(1, 255), st.booleans())
def test_one_other_code_anywhere_and_it_is_another_matrix(row: int, column: int, by: int, turned: bool) -> None:
    codes = matrix(1)
    changed = codes.copy()
    changed[row, column] ^= by
    assert find(around(changed.T.copy() if turned else changed), codes) is None


def test_a_weight_whose_codes_might_lie_anywhere_is_passed_over(decoder: Callable[..., Any]) -> None:
    written = decoder()
    plan, graph = np.zeros(1000, np.uint8), load_graph(written.path)
    assert dict(modules_held(plan, graph, written.modules)) == dict.fromkeys(written.modules, False)
    file = written.path.with_name("model.safetensors")
    data = bytearray(file.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    start, end = (
        8 + int.from_bytes(data[:8], "little") + offset
        for offset in header[f"{written.modules[0]}.weight"]["data_offsets"]
    )
    data[start:end] = bytes(end - start)
    file.write_bytes(data)
    assert dict(modules_held(plan, graph, written.modules)) == dict.fromkeys(written.modules[1:], False)


@pytest.mark.parametrize("target", ["sm89", "sm120"])
@pytest.mark.parametrize(
    "options", [{}, {"hidden": 172}, {"hidden": 65}, {"transposed": False}, {"per_channel": False}], ids=str
)
def test_the_codes_of_a_graph_are_in_its_engine_however_they_are_stored(
    engine_of: Callable[..., Any], target: str, options: dict[str, Any]
) -> None:
    written, plan = engine_of(target, **options)
    assert dict(
        modules_held(np.frombuffer(plan, np.uint8), load_graph(written.path), written.modules)
    ) == dict.fromkeys(written.modules, True)


def test_a_matrix_cut_off_at_the_end_is_not_there() -> None:
    codes = matrix(1)
    assert find(around(codes)[: 101 + codes.size - 1], codes) is None
    assert find(np.zeros(0, np.uint8), codes) is None
