"""Compute distances between two sets of likeliest tokens: a lower bound of KL, flips, and losses.

Both sides know only their likeliest tokens. KL is over those that both name, those that only the run's runtime names,
and the rest of them (`top_divergence`). A token that the answers do not list has at most the probability of the last
one that they do, so that a model which shares few names with the runtime is far from it, and not near for want of what
could be compared.

Two of the run's runtimes are compared by the same sums, over lists as long as the answers', so that a server's distance
is comparable with theirs: fewer names make every distance less.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..accuracy.top_divergence import Values, coarse_kl
from ..accuracy.top_logits import TopTokens
from .answers import LikelyTokens

#: Log-probabilities that are asked of a server, and taken of a checkpoint.
SERVED = 20


@dataclass(frozen=True)
class Distances:
    """Distances from one runtime, for each answered position: `kl` in nats (NaN where only the likeliest token is
    known), `rest` the probability outside of the compared tokens, `flips` 1 where the likeliest tokens differ, and
    `loss` the difference of the losses of the text's token, in nats.
    """

    kl: Values
    rest: Values
    flips: Values
    loss: Values

    def compared(self, with_logprobs: bool) -> Values:
        """Return the values that the verdict is based on: KL, or flips without log-probabilities."""
        return self.kl if with_logprobs else self.flips


def distances(tops: TopTokens, answers: LikelyTokens) -> dict[str, Distances]:
    """Return the distances of `answers` from every runtime of `tops`."""
    by_runtime = {}
    unlisted = most_unlisted(answers, tops.ids[tops.positions][answers.rows])
    for name, top in tops.runtimes.items():
        kl, rest = coarse_kl(top.at(answers.rows), answers.tokens, answers.logprobs, unlisted)
        known = np.isfinite(answers.logprobs).any(axis=1)
        first = answers.tokens[:, 0]
        by_runtime[name] = Distances(
            kl=np.where(known, kl, np.nan),
            rest=np.where(known, rest, np.nan),
            flips=(first != top.tokens[answers.rows, 0]).astype(np.float64),
            loss=answers.nll - tops.nll[name][answers.rows],
        )
    return by_runtime


def most_unlisted(answers: LikelyTokens, text_tokens: npt.NDArray[np.int64]) -> Values:
    """Bound the probability that `answers` give to a token that they do not list, float64 [n]; `text_tokens` int64 [n]:
    the tokens of the text itself.

    Servers list the text's token with the likeliest ones, so that it bounds nothing. A list with fewer others than the
    longest may have lost some, as those of two tokens with one text, and bounds nothing either: 1.
    """
    others = np.where(_others(answers, text_tokens), answers.logprobs, np.inf)
    count = np.isfinite(others).sum(axis=1)
    return np.where(count == count.max(initial=1), np.exp(np.minimum(others.min(axis=1, initial=np.inf), 0.0)), 1.0)


def _others(answers: LikelyTokens, text_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Mark the listed tokens that are not the `text_tokens`: bool [n, k]."""
    others: npt.NDArray[np.bool_] = np.isfinite(answers.logprobs) & (answers.tokens != text_tokens[:, None])
    return others


def flip_shares(tops: TopTokens) -> Mapping[tuple[str, str], float]:
    """Return the share of all positions of `tops` at which two runtimes have another likeliest token."""
    first = {name: top.tokens[:, 0] for name, top in tops.runtimes.items()}
    return {(r, c): float((first[r] != first[c]).mean()) for r in first for c in first if r != c}


def runtime_distances(tops: TopTokens, answers: LikelyTokens) -> Mapping[str, dict[str, Distances]]:
    """`runtime_distances(tops, answers)[other][runtime]`: the distances of `other` from `runtime`, both of the run, at
    the positions of `answers` and over as many likeliest tokens.
    """
    longest = int(_others(answers, tops.ids[tops.positions][answers.rows]).sum(axis=1).max(initial=0))
    return {name: distances(tops, _answered_by(tops, name, answers, longest or SERVED)) for name in tops.runtimes}


def _answered_by(tops: TopTokens, name: str, answers: LikelyTokens, number: int) -> LikelyTokens:
    """Return the answers that a runtime of the run would give as a server that lists so many tokens, and knows the
    losses of `answers`.
    """
    top = tops.runtimes[name].at(answers.rows)
    nll = np.where(np.isfinite(answers.nll), tops.nll[name][answers.rows].astype(np.float64), np.nan)
    tokens = top.tokens[:, :number].astype(np.int64)
    logprobs = top.logprobs[:, :number].astype(np.float64)
    return LikelyTokens(answers.rows, tokens, logprobs, nll, 0, 0)
