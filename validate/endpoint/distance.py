"""Distances between two sets of likeliest tokens: a KL that is never more than the whole one, and flips.

Both sides know only their likeliest tokens, so KL is over those that both know and one rest (`top_divergence`).

Two of the run's own runtimes are compared by the same sums, so a server's distance stands beside theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..accuracy.top_divergence import Values, coarse_kl
from ..accuracy.top_logits import KeptTokens
from .answers import LikelyTokens

#: Log-probabilities of the run's own runtimes that are taken for a server's.
SERVED = 20


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


def distances(kept: KeptTokens, answers: LikelyTokens) -> dict[str, Distances]:
    """The distances of `answers` from every runtime of `kept`."""
    found = {}
    for name, top in kept.runtimes.items():
        kl, rest = coarse_kl(top.at(answers.rows), answers.tokens, answers.logprobs)
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
