"""What choices cost where they are served, on a model that can be counted by hand."""

from dataclasses import replace

import pytest

from fp8q.quantize.scales.decisions import Scales, TensorScale, WeightScales
from fp8q.quantize.scales.serving_cost import Cost, cost_of, prompt_operations

#: Two GEMMs of 4 × 8 and 6 × 4, and a cache of 2 values for each of keys and values.
WEIGHTS = {"a": (4, 8), "head": (6, 4)}
CACHE = {"attn.k": 2, "attn.v": 2}
TENSOR = TensorScale(
    method="amax", amax=448, clip=448, scale=1, terms=1, saturation=0, underflow=0, sqnr_db=30, sqnr_best_db=30
)
A = WeightScales(method="amax", axis=0, channels=4, scale_min=1, scale_max=1, sqnr_db=30)


def scales(terms: int = 1, **cache: TensorScale) -> Scales:
    """`a` in FP8, the head in BF16."""
    kv_cache = {f"attn.{part}": scale for part, scale in cache.items()}
    activation = TENSOR.model_copy(update={"terms": terms})
    return Scales(weights={"a": A}, activations={"a": activation}, kv_cache=kv_cache, skipped={})


def test_bf16_costs_two_bytes_a_value_and_two_operations_a_weight() -> None:
    assert cost_of(WEIGHTS, CACHE) == Cost(2 * (32 + 24), 2 * 4, 2 * (32 + 24))


def test_codes_cost_a_byte_a_scale_a_channel_and_one_operation() -> None:
    assert cost_of(WEIGHTS, CACHE, scales()) == Cost(32 + 4 * 4 + 2 * 24, 2 * 4, 32 + 2 * 24)


def test_a_second_term_costs_operations_alone() -> None:
    one, two = cost_of(WEIGHTS, CACHE, scales()), cost_of(WEIGHTS, CACHE, scales(terms=2))
    assert two == replace(one, prefill_operations=2 * 32 + 2 * 24)


def test_a_cache_in_codes_costs_a_byte_a_value() -> None:
    assert cost_of(WEIGHTS, CACHE, scales(v=TENSOR)).cache_bytes == 2 * 2 + 2
    assert cost_of(WEIGHTS, CACHE, scales(k=TENSOR, v=TENSOR)).cache_bytes == 2 + 2


def test_a_step_reads_the_weights_once_and_the_cache_of_every_position() -> None:
    assert Cost(100, 8, 0).step_bytes(50) == 500


@pytest.mark.parametrize(("terms", "tail", "found"), [(1, None, 1), (2, None, 2), (2, 64, 1.03125), (2, 4096, 2)])
def test_a_tail_costs_its_share_of_a_long_prompt(terms: int, tail: int | None, found: float) -> None:
    scale = TENSOR.model_copy(update={"terms": terms, "tail": tail})
    assert prompt_operations(scale.form) == found
    one = Scales(weights={"a": A}, activations={"a": scale}, skipped={})
    assert cost_of({"a": (4, 1024)}, {}, one).prefill_operations == 4096 * found
