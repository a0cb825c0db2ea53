"""Choosing a token row by row: what many rows at once are held against, and what holds that in turn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fp8q.serve.loop.sampling import Sampling, penalized, token_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

#: A share of all weight by which sums in FP64 may be off.
NEAR = 1e-9


def choose(
    logits: NDArray[np.float32], sampling: Sampling, counts: Mapping[int, int], random: np.random.Generator | None
) -> int:
    """Choose the next token of one row from all of its logits in FP64; it draws one number unless it is greedy."""
    uniform = 0.0
    if sampling.temperature:
        assert random is not None
        uniform = random.random()
    return token_at(penalized(logits, sampling, counts), sampling.temperature, sampling.top_p, uniform)


def possible_tokens(logits: NDArray[np.float32], temperature: float, top_p: float, uniform: float) -> set[int]:
    """Return the tokens of the nucleus at `uniform`, by Python's floats and exact sums: several next to a boundary."""
    values = [float(value) for value in logits]
    top = max(values)
    weights = [math.exp((value - top) / temperature) for value in values]
    total = math.fsum(weights)
    order = range(len(values)) if top_p >= 1.0 else sorted(range(len(values)), key=lambda token: -values[token])
    ends = [math.fsum(weights[token] for token in order[: count + 1]) / total for count in range(len(order))]
    begins = [0.0, *ends[:-1]]
    sizes = {len(ends)}
    if top_p < 1.0:
        sizes = {sum(end < bound for end in ends[:-1]) + 1 for bound in (top_p - NEAR, top_p + NEAR)}
    return {
        order[at]
        for size in sizes
        for at in range(size)
        if begins[at] - NEAR <= uniform * ends[size - 1] <= ends[at] + NEAR
    }
