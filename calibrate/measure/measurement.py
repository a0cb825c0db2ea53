"""The description of one measurement, which both ways to measure (in memory and streamed) take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .moments import SecondMoments
from .statistics import Corpus, ModelIdentity, Statistics, StatisticsRecord, TensorStatistics


@dataclass(frozen=True, eq=False)
class Measurement:
    """A measurement of the model `identity` on `windows` int64 [windows, seq_len] of `corpus`, in batches of its size.

    `batches`: indices of the batches to run, in that order; None for all. `moments`: the store that second moments of
    the inputs are added to; None for none. `all_experts`: run every expert on every token.
    """

    windows: npt.NDArray[np.int64]
    identity: ModelIdentity
    corpus: Corpus
    batches: Sequence[int] | None = None
    moments: SecondMoments | None = None
    all_experts: bool = False

    @cached_property
    def parts(self) -> dict[int, npt.NDArray[np.int64]]:
        """Index of a batch -> its windows int64 [at most batch_size, seq_len], in the order in which they run."""
        size = self.corpus.batch_size
        chosen = range(self.corpus.batches) if self.batches is None else self.batches
        return {batch: self.windows[batch * size : (batch + 1) * size] for batch in chosen}

    @property
    def tokens(self) -> int:
        """The number of tokens that run through the model."""
        return sum(ids.size for ids in self.parts.values())

    def statistics(
        self,
        groups: dict[str, list[str]],
        tensors: dict[str, TensorStatistics],
        weights: Mapping[str, npt.NDArray[np.float32]],
        experts: dict[str, list[str]],
    ) -> Statistics:
        """Make statistics of the measured `tensors` and `weights`, with their record; `experts` as in
        `StatisticsRecord`.
        """
        record = StatisticsRecord(
            model=self.identity,
            corpus=self.corpus,
            tokens=self.tokens,
            groups=groups,
            experts=experts or None,
            all_experts=self.all_experts or None,
        )
        return Statistics(record, tensors, dict(weights))
