"""Compute the bytes and operations that serving a model takes under given scales, before anything is built.

A decode step is bound by the bytes it reads: every GEMM's weights once, and the cache of every position before. A
prompt is bound by operations: a GEMM of FP8 codes runs at twice the rate of one in BF16 on every GPU that has it,
and two terms are twice the rows, of a tail alone where there is one. Norms, biases and embeddings are less than a
hundredth of either, and are left out; where a mixture sends a token to some of its experts, all of them are counted.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...options import BF16, Form
from .decisions import Scales

#: Bytes of a value that is no code, and of a weight's or channel's scale.
BF16_BYTES = 2
SCALE_BYTES = 4
#: The cost of a multiplication in BF16, where one of FP8 codes costs 1.
BF16_OPERATIONS = 2
#: The tokens of the prompt that operations are counted for, where they depend on its length.
PROMPT = 2048


@dataclass(frozen=True)
class Cost:
    """The cost of serving a model.

    `weight_bytes`: bytes of weights and their scales that every decode step reads, for any number of sequences.
    `cache_bytes`: bytes of KV cache for each position of a sequence, all of which every step reads.
    `prefill_operations`: multiplications for each token of a prompt, one in BF16 counted as `BF16_OPERATIONS` of FP8
    codes.
    """

    weight_bytes: int
    cache_bytes: int
    prefill_operations: int

    def step_bytes(self, positions: int) -> int:
        """Return the bytes that a decode step of one sequence reads, `positions` tokens after its beginning."""
        return self.weight_bytes + positions * self.cache_bytes


def prompt_operations(form: Form) -> float:
    """The multiplications of FP8 codes that one of a GEMM with an input in `form` costs, in a prompt of `PROMPT`
    tokens.
    """
    if form == BF16:
        return BF16_OPERATIONS
    if form.tail is None:
        return form.terms
    return 1 + min(form.tail, PROMPT) / PROMPT


def largest_batch(memory: int, held: int, sequence: int) -> int:
    """An upper bound of the sequences that fit into `memory` bytes beside `held` bytes of weights.

    `sequence`: the bytes of cache of one. Activations and the runtime itself are not counted. 0 where the weights alone
    do not fit.
    """
    return max(0, (memory - held) // sequence)


def cost_of(weights: Mapping[str, tuple[int, ...]], cache: Mapping[str, int], scales: Scales | None = None) -> Cost:
    """The cost of serving a model under `scales`; None: in BF16.

    `weights`: module -> shape of its weight; `cache`: cache tensor, `<module>.k` or `.v` -> its values a position.
    """
    operations = {name: prompt_operations(form) for name, form in scales.forms.items()} if scales else {}
    codes = scales.kv_cache if scales else {}
    channels = {name: scale.stored for name, scale in scales.weights.items()} if scales else {}
    sizes = {module: math.prod(shape) for module, shape in weights.items()}
    return Cost(
        sum(
            size + SCALE_BYTES * channels[module] if module in operations else BF16_BYTES * size
            for module, size in sizes.items()
        ),
        sum(values * (1 if name in codes else BF16_BYTES) for name, values in cache.items()),
        round(sum(size * operations.get(module, BF16_OPERATIONS) for module, size in sizes.items())),
    )
