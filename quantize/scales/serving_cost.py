"""Compute the cost of a choice where it is served, before anything is built.

A decode step is bound by the bytes it reads: every product's weights once, and the cache of every position before. A
prompt is bound by operations: a product of FP8 codes runs at twice the rate of one in BF16 on every GPU that has it,
and two terms are twice the rows. Norms, biases and embeddings are less than a hundredth of either, and are left out;
where a mixture sends a token to some of its experts, all of them are counted.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .decisions import Scales

#: Bytes of a value that is no code, and of a weight's or channel's scale.
WIDE_BYTES, SCALE_BYTES = 2, 4
#: What a multiplication in BF16 takes, where one of FP8 codes takes 1.
WIDE_OPERATIONS = 2


@dataclass(frozen=True)
class Cost:
    """`weight_bytes`: what every decode step reads of weights and their scales, whatever its rows. `cache_bytes`: what
    a sequence keeps for each position, and reads at each step. `prefill_operations`: multiplications for each token of
    a prompt, in those of FP8 codes.
    """

    weight_bytes: int
    cache_bytes: int
    prefill_operations: int

    def step_bytes(self, positions: int) -> int:
        """Return the bytes that a decode step of one sequence reads, `positions` tokens after its beginning."""
        return self.weight_bytes + positions * self.cache_bytes


def largest_batch(memory: int, held: int, sequence: int) -> int:
    """Return the number of sequences, each of so many bytes of cache, that fit into `memory` bytes, beside the `held`
    bytes of weights; none where these alone do not. What a step needs besides (activations, the runtime itself) is left
    out: no more than these fit.
    """
    return max(0, (memory - held) // sequence)


def cost_of(weights: Mapping[str, tuple[int, ...]], cache: Mapping[str, int], scales: Scales | None = None) -> Cost:
    """Return the cost of `scales` (None: the BF16 model) on a model with products of `weights` (module -> its weight's
    shape) that keeps `cache` (each cache tensor, `<module>.k` or `.v` -> its values a position).
    """
    terms = {name: scale.terms for name, scale in scales.activations.items()} if scales else {}
    codes = scales.kv_cache if scales else {}
    channels = {name: scale.channels for name, scale in scales.weights.items()} if scales else {}
    sizes = {module: math.prod(shape) for module, shape in weights.items()}
    return Cost(
        sum(
            size + SCALE_BYTES * channels[module] if module in terms else WIDE_BYTES * size
            for module, size in sizes.items()
        ),
        sum(values * (1 if name in codes else WIDE_BYTES) for name, values in cache.items()),
        sum(size * terms.get(module, WIDE_OPERATIONS) for module, size in sizes.items()),
    )
