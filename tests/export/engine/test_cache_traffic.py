"""The bytes of the cache that a decode step reads, counted in plans of the builder's own."""

from collections.abc import Callable
from typing import Any

import pytest

from fp8q.export.engine.cache_traffic import cache_traffic
from fp8q.export.engine.plan import read_plan
from fp8q.export.engine.profiles import profiles
from fp8q.export.onnx_file.loading import load_graph


@pytest.mark.parametrize("target", ["sm89", "sm120"])
@pytest.mark.parametrize(("fp8_cache", "read"), [(True, 1), (False, 2)])
def test_a_graph_that_concatenates_past_and_new_reads_its_cache_and_a_copy_that_it_writes(
    engine_of: Callable[..., tuple[Any, bytes]], target: str, fp8_cache: bool, read: int
) -> None:
    """All of the cache is read, written in BF16, and read again."""
    written, engine = engine_of(target, fp8_cache=fp8_cache)
    plan = read_plan(engine)
    assert plan is not None
    found = cache_traffic(plan, load_graph(written.path), profiles(4, 128))
    assert found is not None
    assert (found.rows, found.slots, found.held) == (4, 128, read * found.values)
    copied = found.values * 129 // 128  # and the new token's
    assert (found.read, found.written) == (read * found.values + 2 * copied, 2 * copied)
    assert found.read_per_value > 1.1 * read
    assert found.copying
    assert f"writes {found.written:,} of copies, 2.02 a value (" in str(found)


def test_an_inspector_shows_no_program(engine_of: Callable[..., tuple[Any, bytes]]) -> None:
    written, engine = engine_of("sm89")
    plan = read_plan(engine)
    assert plan is not None
    without = type(plan)(plan.profiles, kernels=plan.kernels)
    assert cache_traffic(without, load_graph(written.path), profiles(4, 128)) is None
