"""Delayed scaling against a plain-Python simulation written from Transformer Engine's user guide: a buffer, position 0
staging, rotated at every step.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8q.core.errors import InputError
from fp8q.options import AmaxAlgorithm, Clipping
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.scales.clip import amax_in_use, clip_delayed, largest_jump, saturated_batches, scale_of


def simulation(amax_batches: list[float], length: int, algorithm: str, interval: int) -> list[float]:
    """The amax each step's scale is made from, and the next step's; NaN while the scale is still the initial one."""
    history, in_use, used = [0.0] * length, math.nan, []
    for step, current in enumerate(amax_batches, 1):
        used.append(in_use)
        history[0] = current
        if step % interval == 0:
            found = max(history) if algorithm == "max" else history[0]
            if found > 0:
                in_use = found
        history = [0.0, *history[2:], history[0]] if length > 1 else [0.0]
    return [*used, in_use]


@given(
    amax=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 40.0]), max_size=30),
    length=st.integers(1, 40),
    algorithm=st.sampled_from(["max", "most_recent"]),
    interval=st.integers(1, 7),
)
@settings(max_examples=300)
def test_the_amax_in_use_is_transformer_engine_s(
    amax: list[float], length: int, algorithm: AmaxAlgorithm, interval: int
) -> None:
    clipping = Clipping("delayed", amax_history_len=length, amax_compute_algo=algorithm, interval=interval)
    found = amax_in_use(np.array(amax, np.float32), clipping)
    np.testing.assert_array_equal(found, np.array(simulation(amax, length, algorithm, interval), np.float32))


def test_a_history_longer_than_the_batches_is_the_largest_so_far() -> None:
    amax = np.array([3, 9, 2, 4], np.float32)
    assert clip_delayed(amax, Clipping("delayed", amax_history_len=1024)) == 9
    assert clip_delayed(amax, Clipping("delayed", amax_history_len=2)) == 4
    assert clip_delayed(amax, Clipping("delayed", amax_compute_algo="most_recent")) == 4
    assert clip_delayed(amax, Clipping("delayed", amax_history_len=2, interval=3)) == 9


def test_batches_that_were_not_measured_here_are_left_out() -> None:
    amax = np.array([np.nan, 3, np.nan, 2], np.float32)
    assert clip_delayed(amax, Clipping("delayed", amax_history_len=1)) == 2
    assert len(saturated_batches(amax, E4M3, Clipping("delayed"))) == 1


def test_an_interval_longer_than_the_batches_has_no_scale() -> None:
    with pytest.raises(
        InputError, match=r"^--interval 5: no scale is computed in 2 batches; give a smaller one, or more --samples$"
    ):
        clip_delayed(np.ones(2, np.float32), Clipping("delayed", interval=5))


def test_a_batch_saturates_where_it_exceeds_the_scale_of_those_before_it() -> None:
    amax = np.array([1, 2, 1.99, 5, 5, 40], np.float32)
    assert saturated_batches(amax, E4M3, Clipping("delayed")).tolist() == [True, False, True, False, True]
    # four times the headroom
    assert saturated_batches(amax, E4M3, Clipping("delayed", margin=2)).tolist() == [
        False,
        False,
        False,
        False,
        True,
    ]
    assert saturated_batches(amax, E4M3, Clipping("delayed", amax_history_len=1)).tolist() == [
        True,
        False,
        True,
        False,
        True,
    ]


def test_headroom_of_the_scale_s_rounding_counts() -> None:
    above = float(scale_of(1.0, E4M3)) * 448
    assert above > 1
    assert saturated_batches(np.array([1, above], np.float32), E4M3, Clipping("delayed")).tolist() == [False]


def test_the_largest_jump_passes_zeros_over() -> None:
    assert largest_jump(np.array([4, 0, 8, 2, 24, 3], np.float32)) == 12
    assert largest_jump(np.array([4], np.float32)) == 1
    assert largest_jump(np.array([np.nan, 8, 4], np.float32)) == 1
