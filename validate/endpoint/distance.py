"""Distances between two sets of likeliest tokens: a KL that is never more than the whole one, and flips.

Both sides know only their likeliest tokens. Those that both know and one rest, the sum of all others, are a coarser
partition of the vocabulary, and the KL over a coarser partition is at most the whole KL (data processing). What is lost
lies within the rest, whose probability says how much that can matter. Rests under `LEAST_REST` count as that: a rest is
a difference of single-precision numbers near one.

Two of the run's own runtimes are compared by the same sums, so a server's distance stands beside theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..accuracy.top_logits import KeptTokens, TopLogits
from .answers import LikelyTokens

#: The least probability that a rest is given.
LEAST_REST = 1e-6
#: Log-probabilities of the run's own runtimes that are taken for a server's.
SERVED = 20
Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Distances:
    """From one runtime, for each answered position: `kl` in nats (NaN where only the likeliest token is known), `rest`
    the probability that is not looked into, `flips` 1 where the likeliest tokens differ, and `loss` the difference of
    the losses of the text's own token, in nats.
    """

    kl: Values
    rest: Values
    flips: Values
    loss: Values

    def compared(self, with_logprobs: bool) -> Values:
        """The values that a verdict is by: KL, or flips where there is no more."""
        return self.kl if with_logprobs else self.flips


def coarse_kl(top: TopLogits, answers: LikelyTokens) -> tuple[Values, Values]:
    """KL(top || answers) in nats at the rows of `answers`, over the tokens that both have and one rest, and the
    probability of that rest: float64 [n] each.
    """
    rows = answers.rows
    tokens, own = top.tokens[rows], top.logprobs[rows].astype(np.float64)
    same = (answers.tokens[:, :, None] == tokens[:, None, :]) & np.isfinite(answers.logprobs)[:, :, None]
    common = same.any(axis=1)
    theirs = np.where(common, np.take_along_axis(np.nan_to_num(answers.logprobs), same.argmax(axis=1), axis=1), 0.0)
    p, q = np.where(common, np.exp(own), 0.0), np.where(common, np.exp(theirs), 0.0)
    rest = np.exp(top.rest[rows].astype(np.float64)) + np.where(common, 0.0, np.exp(own)).sum(axis=1)
    p_rest, q_rest = np.maximum(rest, LEAST_REST), np.maximum(1 - q.sum(axis=1), LEAST_REST)
    kl = (p * np.where(common, own - theirs, 0.0)).sum(axis=1) + p_rest * np.log(p_rest / q_rest)
    return np.maximum(kl, 0.0), rest


def distances(kept: KeptTokens, answers: LikelyTokens) -> dict[str, Distances]:
    """The distances of `answers` from every runtime of `kept`."""
    found = {}
    for name, top in kept.runtimes.items():
        kl, rest = coarse_kl(top, answers)
        known = np.isfinite(answers.logprobs).any(axis=1)
        first = answers.tokens[:, 0]
        found[name] = Distances(
            kl=np.where(known, kl, np.nan),
            rest=np.where(known, rest, np.nan),
            flips=(first != top.tokens[answers.rows, 0]).astype(np.float64),
            loss=answers.nll - kept.nll[name][answers.rows],
        )
    return found


def as_answers(kept: KeptTokens, name: str, rows: npt.NDArray[np.int64]) -> LikelyTokens:
    """A runtime of the run in the place of a server, at `rows`."""
    top = kept.runtimes[name]
    tokens, logprobs = top.tokens[rows, :SERVED].astype(np.int64), top.logprobs[rows, :SERVED].astype(np.float64)
    return LikelyTokens(rows, tokens, logprobs, kept.nll[name][rows].astype(np.float64), 0, 0)


def own_distances(kept: KeptTokens, rows: npt.NDArray[np.int64]) -> Mapping[str, dict[str, Distances]]:
    """`own_distances(kept, rows)[other][runtime]`: the distances of `other` from `runtime`, both of the run."""
    return {name: distances(kept, as_answers(kept, name, rows)) for name in kept.runtimes}
