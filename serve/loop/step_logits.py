"""The logits of a step's rows, in host memory or on a device, which hands over what is asked for.

Imports only NumPy, as it is copied into Triton repositories.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
#: Weights and probabilities of tokens.
Weights = NDArray[np.float64]
#: Tokens, rows, blocks or positions, by their numbers.
Indices = NDArray[np.int64]


class Summary(NamedTuple):
    """Blocks of the logits of some rows: the largest logit of each, the sum of e^((logit - largest) / temperature) over
    it, and where in the block the largest is, the first of equals; float32, float32 and int32, each [rows, blocks]. A
    sum is NaN where a logit of the block is.
    """

    maxima: Logits
    sums: Logits
    places: NDArray[np.int32]


class Summaries(Protocol):
    """A device that has the logits of a step, and summarizes them in blocks of `sampling.BLOCK`."""

    @property
    def count(self) -> int:
        """Rows of the step."""

    @property
    def most_blocks(self) -> int:
        """Blocks in one call of `blocks`."""

    def summary(self, temperatures: Logits) -> Summary:
        """Summarize all rows, each under its temperature, [rows], which is not 0."""

    def blocks(self, pairs: NDArray[np.int32]) -> Logits:
        """Return the logits of some blocks, [count, BLOCK], with -inf behind a row's last logit; `pairs` [count, 2]:
        their rows and their numbers in these.
        """


class StepLogits(Protocol):
    """The logits of a step, there until the next step with as many rows."""

    @property
    def summaries(self) -> Summaries | None:
        """Their summaries; None where all logits are on the host."""

    def rows(self, rows: Sequence[int]) -> Sequence[Logits]:
        """Return all logits, [vocabulary], of each of these rows."""


@dataclass(frozen=True)
class HostLogits:
    """`StepLogits` in host memory: `values` [rows, vocabulary]."""

    values: Logits
    summaries: Summaries | None = None

    def rows(self, rows: Sequence[int]) -> Sequence[Logits]:
        """Views of rows: `StepLogits.rows`."""
        return [self.values[row] for row in rows]
