"""Scales of the heads of a cache tensor, from its channels and its histogram."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fp8q.calibrate.measure.observe import Observer
from fp8q.calibrate.measure.statistics import TensorStatistics
from fp8q.core.errors import InputError
from fp8q.options import METHODS, Clipping
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.scales.activation_scales import unfit
from fp8q.quantize.scales.cache_scales import bf16_attentions, query_scales, scaled_by_head
from fp8q.quantize.scales.clip import SMALLEST_SCALE, bf16_ceil


def observed(values: npt.NDArray[np.float32]) -> TensorStatistics:
    """The statistics of keys [tokens, heads · size]."""
    observer = Observer(1)
    observer.update(torch.from_numpy(values).bfloat16(), 0)
    tensor = observer.statistics()
    assert tensor is not None
    return tensor


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 4]),
    arrays.arrays(np.float32, (3, 8), elements=st.floats(-65504, 65504, width=16)),
)
def test_by_amax_a_heads_scale_is_its_amax_over_448_on_the_bf16_grid_rounded_up(
    heads: int, values: npt.NDArray[np.float32]
) -> None:
    tensor = observed(values)
    if unfit(tensor.histogram):
        return
    chosen = scaled_by_head("0.k", tensor, Clipping(), heads)
    amax = torch.from_numpy(values).bfloat16().float().abs().numpy().reshape(3, heads, -1).max((0, 2))
    expected = bf16_ceil(amax / np.float32(448))
    expected[expected < SMALLEST_SCALE] = expected.max()
    assert chosen.heads == expected.tolist()
    assert (amax <= expected * 448).all()  # nothing saturates
    assert (chosen.scale, chosen.amax, chosen.saturation) == (expected.max(), amax.max(), 0)
    assert chosen.model_copy(update={"heads": None}) == scaled_by_head("0.k", tensor, Clipping(), None)


def test_a_head_without_values_takes_the_tensors_scale() -> None:
    chosen = scaled_by_head("0.v", observed(np.array([[448, 0, 0, 0]], np.float32)), Clipping(), 2)
    assert chosen.heads == [1.0, 1.0]


@pytest.mark.parametrize("method", METHODS)
def test_a_clip_of_the_tensor_bounds_those_of_its_heads(method: str) -> None:
    """The second head lies far below it, so that its own amax is its clip; the first has an outlier."""
    values = np.random.default_rng(0).normal(size=(4096, 8)).astype(np.float32)
    values[:, 4:] /= 64
    values[0, 0] = 500
    tensor, clipping = observed(values), Clipping(method=method)
    chosen, whole = (scaled_by_head("0.k", tensor, clipping, heads) for heads in (2, None))
    assert chosen.heads is not None
    second = float(bf16_ceil(tensor.amax_channels[4:].max() / np.float32(E4M3.max)))
    assert chosen.heads == [min(whole.scale, float(bf16_ceil(tensor.histogram.amax / np.float32(E4M3.max)))), second]
    assert chosen.saturation <= whole.saturation


@pytest.mark.parametrize(
    ("clipping", "expected"),
    [
        (Clipping(margin=2), [4.0, 1.0]),
        (Clipping(scale_grid="power-of-two"), [1.0, 0.25]),
        (Clipping(margin=-1), [0.5, 0.125]),
    ],
)
def test_margin_and_grid_are_of_each_head(clipping: Clipping, expected: list[float]) -> None:
    values = np.array([[448, 1, 112 if clipping.scale_grid == "bf16" else 100, 1]], np.float32)
    chosen = scaled_by_head("0.k", observed(values), clipping, 2)
    assert (chosen.heads, chosen.scale) == (expected, expected[0])


def test_stored_scales_have_compressed_tensors_shapes() -> None:
    tensor = observed(np.array([[448, 0, 112, 0]], np.float32))
    for heads, shape in ((None, (1,)), (2, (2, 1, 1))):
        stored = scaled_by_head("0.k", tensor, Clipping(), heads).stored
        assert (str(stored.dtype), stored.shape) == ("float32", shape)


def test_channels_that_are_not_so_many_heads_are_refused() -> None:
    tensor = observed(np.ones((2, 6), np.float32))
    with pytest.raises(InputError) as raised:
        query_scales({"0.q": tensor}, Clipping(), 4)
    assert str(raised.value) == "--kv-scale head: 0.q has 6 channels, and config.json 4 heads; leave it out"


LAYERS = [f"model.layers.{number}.self_attn" for number in range(4)]
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}


def test_the_layers_with_a_window_are_named_as_vllm_names_them() -> None:
    assert bf16_attentions(["sliding_window"], LAYERS, WINDOWS) == [LAYERS[0], LAYERS[2]]
    assert bf16_attentions(["sliding_window", "*.3.*"], LAYERS, WINDOWS) == [LAYERS[0], LAYERS[2], LAYERS[3]]
    assert bf16_attentions(["sliding_window"], LAYERS[1:], WINDOWS) == [LAYERS[2]], "a hybrid's first layer has none"
    assert bf16_attentions([], LAYERS, WINDOWS) == []


def test_a_window_of_all_layers_or_of_none_leaves_nothing_to_choose() -> None:
    with pytest.raises(InputError, match=r"^--kv-skip sliding_window: matches the cache of all 4 layers; give --kv"):
        bf16_attentions(["sliding_window"], LAYERS, {"sliding_window": 4096})
    full: dict[str, Any] = {"layer_types": ["full_attention"] * 4, "sliding_window": 8}
    for config in ({}, {"sliding_window": None}, full):
        with pytest.raises(InputError, match=r"^--kv-skip sliding_window: matches no attention module; names are like"):
            bf16_attentions(["sliding_window"], LAYERS, config)
