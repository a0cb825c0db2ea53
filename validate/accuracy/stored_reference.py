"""Compare runtimes that need no torch with the stored results of those that ran on another host.

A host that serves has neither torch nor the source model. `tokens.npz` has the loss of every token in every runtime
that the calibrating machine ran, so perplexity and paired losses are exact. Instead of whole distributions
`top_logits.npz` has the likeliest tokens at some positions, which bound KL from below and from above
(`top_divergence`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...calibrate.measure.scoring import log_softmax_of_array
from ...calibrate.text.evaluation import Evaluation, first_not_finite
from .bootstrap import Bootstrap
from .compare import BASELINE, Logits, Outcome, TokenMeasure, WindowBatch, mean
from .divergence import NLL, Baseline, Quantity, TokenValues, Writer, block_size, joined
from .document import AgainstStored, NotFinite, RuntimeAccuracy, StoredDistance
from .top_divergence import bounded_kl
from .top_logits import TopLogits, TopTokens, joined_top, top_of_array

ByRuntime = Mapping[str, npt.NDArray[np.float32]]
#: The names of what is measured at the top positions, against each stored runtime.
LEAST = "kl-least"
MOST = "kl-most"
REST = "rest"
SAME = "top1"


@dataclass(frozen=True)
class StoredReference:
    """The stored side of a comparison: likeliest tokens of the runtimes of a run, and the losses `nll` of all scored
    tokens, float32 [windows, context], nats, NaN where not scored.
    """

    tops: TopTokens
    nll: ByRuntime
    evaluation: Evaluation

    @property
    def top_positions(self) -> npt.NDArray[np.bool_]:
        """The positions whose likeliest tokens are stored: bool [windows, context]."""
        positions = np.zeros_like(self.evaluation.scored)
        positions[self.tops.windows] = self.tops.positions
        return positions

    @property
    def token_measure(self) -> TokenMeasure:
        """Measure with NumPy, against the stored likeliest tokens."""
        return TokenMeasure(self._measure, self.top_positions, frozenset({LEAST, MOST, REST, SAME}))

    def _measure(
        self, logits: Logits, batch: WindowBatch, baselines: Sequence[Baseline], write: Writer | None
    ) -> tuple[TokenValues, TopLogits]:
        """Measure logits [windows, positions, vocabulary]: the loss of each scored token, and the distances at the top
        positions.
        """
        assert not baselines, "what is compared with is stored"
        table = np.asarray(logits)
        positions, vocabulary = table.shape[1:]
        size = block_size(vocabulary)
        flat = table.reshape(-1, vocabulary)
        nll = [np.zeros(0, np.float32)]
        rows = _rows(batch.scored, positions)
        targets = batch.ids[batch.scored]
        for first in range(0, len(rows), size):
            log_q = log_softmax_of_array(flat[rows[first : first + size]])
            nll.append(-log_q[np.arange(len(log_q)), targets[first : first + size]])
        rows = _rows(batch.top_positions, positions)
        stored_rows = batch.top_rows[batch.top_positions]
        # one block at least, so that a batch without a top position has its empty columns
        blocks = [slice(first, first + size) for first in range(0, max(len(rows), 1), size)]
        measured = [self._distances(log_softmax_of_array(flat[rows[some]]), stored_rows[some]) for some in blocks]
        distances = joined([values for values, _ in measured])
        return {NLL: np.concatenate(nll)} | distances, joined_top([top for _, top in measured])

    def _distances(
        self, log_q: npt.NDArray[np.float32], some: npt.NDArray[np.int64]
    ) -> tuple[TokenValues, TopLogits]:  # fmt: skip
        """Compare log-probabilities [n, vocabulary] with the stored likeliest tokens at `some` of the top positions."""
        likeliest = top_of_array(log_q)
        measured: TokenValues = {}
        for name, top in self.tops.runtimes.items():
            stored = top.at(some)
            same = stored.tokens[:, 0] == likeliest.tokens[:, 0]
            for quantity, values in zip((LEAST, MOST, REST, SAME), (*bounded_kl(stored, log_q), same), strict=True):
                measured[Quantity(quantity, name)] = values.astype(np.float32)
        return measured, likeliest


def _rows(chosen: npt.NDArray[np.bool_], positions: int) -> npt.NDArray[np.int64]:
    """Return the rows of logits, of `positions` of each window, that predict the `chosen` tokens: int64."""
    windows, tokens = np.nonzero(chosen)
    return (windows * positions + tokens - 1).astype(np.int64)


def against_stored(outcome: Outcome, reference: StoredReference) -> dict[str, RuntimeAccuracy]:
    """Return the accuracy of each runtime that ran, with its distances from the stored runtimes."""
    base = reference.nll.get(BASELINE)
    return {name: _row(outcome, name, reference, base) for name in outcome.accuracy.runtimes}


def _row(
    outcome: Outcome, name: str, reference: StoredReference, base: npt.NDArray[np.float32] | None
) -> RuntimeAccuracy:
    scored = reference.evaluation.scored
    nll = outcome.nll[name]
    increase = None if base is None else float(np.expm1(mean(nll[scored]) - mean(base[scored])))
    where = first_not_finite(nll, scored)
    place = None
    if where:
        window, position = where
        theirs = None if base is None else not np.isfinite(base[window][scored[window]]).all()
        place = NotFinite(window=window, position=position, bf16=theirs)
    accuracy = outcome.accuracy.runtimes[name]
    return accuracy.model_copy(
        update={
            "perplexity_increase": increase,
            "not_finite": place,
            "stored": _distances(outcome.measured[name], nll, reference),
        }
    )


def _distances(measured: TokenValues, nll: npt.NDArray[np.float32], reference: StoredReference) -> AgainstStored:
    scored = reference.evaluation.scored
    tops = reference.tops
    all_tokens = Bootstrap(np.nonzero(scored)[0])
    top_positions = Bootstrap(np.nonzero(reference.top_positions)[0])
    rows = {}
    for name in tops.runtimes:
        loss = nll[scored].astype(np.float64) - reference.nll[name][scored]
        least = measured[Quantity(LEAST, name)].astype(np.float64)
        rows[name] = StoredDistance(
            nll_increase_nats=all_tokens.interval(loss).estimate,
            kl_nats=top_positions.interval(least).estimate,
            kl_most_nats=mean(measured[Quantity(MOST, name)]),
            rest=mean(measured[Quantity(REST, name)]),
            top1_agreement=mean(measured[Quantity(SAME, name)]),
        )
    first = next(iter(tops.runtimes.values()))
    return AgainstStored(positions=int(reference.top_positions.sum()), top=first.tokens.shape[1], runtimes=rows)
