"""Bound KL from below and from above, from the likeliest tokens of two models.

Only the likeliest tokens of p are stored, and the probability of all others together; a server gives as little of q.
Take the tokens that both name, those that p alone names, and all others: a coarser partition of the vocabulary,
over which KL is at most the whole KL (data processing). Of the second part q is not known, but not more than what q's
own names leave, nor than the number of its tokens times the last probability that q's list has, since that list has the
likeliest. KL falls with it until q is divided as p is, so the least KL is there or at that bound. Without the bound two
models that share no name would be 0 apart.

What is lost lies within the parts, whose probability says how much that can matter. Parts under `LEAST_REST` count as
that: they are differences of single-precision numbers near one.

Where q is known whole there is a bound from above too. Within the rest KL is a convex function of p, whose values are
at most that of the last token that is kept, so it is largest where p has that value at the tokens that q finds least
likely, and nothing elsewhere. No model is so, and this bound is far above the KL: it tells what the file excludes, not
what to expect (docs/validate.md has both, measured).
"""

import numpy as np
import numpy.typing as npt

from .top_logits import TopLogits

#: The least probability that a rest is given.
LEAST_REST = 1e-6
Values = npt.NDArray[np.float64]


def coarse_kl(
    top: TopLogits, tokens: npt.NDArray[np.int64], logprobs: Values, unlisted: Values | None = None
) -> tuple[Values, Values]:
    """Return a lower bound of KL(top || answers) in nats at each position of `top`, and the probability of all tokens
    but those that both name: float64 [n] each.

    `tokens` int64 [n, k], `logprobs` float64 [n, k]: the answers' tokens and their log-probabilities, NaN where
    unknown; a negative token is listed, and unknown. `unlisted` float64 [n]: the most probability that the answers give
    to a token that they do not list; None: unknown.
    """
    log_p = top.logprobs.astype(np.float64)
    listed = np.isfinite(logprobs)
    same = (tokens[:, :, None] == top.tokens[:, None, :]) & listed[:, :, None]
    common = same.any(axis=1)
    log_q = np.where(common, np.take_along_axis(np.nan_to_num(logprobs), same.argmax(axis=1), axis=1), 0.0)
    p = np.where(common, np.exp(log_p), 0.0)
    q = np.where(common, np.exp(log_q), 0.0)
    alone = np.where(common, 0.0, np.exp(log_p)).sum(axis=1)
    unnamed = np.exp(top.rest.astype(np.float64))
    q_rest = np.maximum(1 - q.sum(axis=1), LEAST_REST)
    named, nameless = (_sum_of(logprobs, listed & part) for part in (tokens >= 0, tokens < 0))
    q_alone = 1 - named
    if unlisted is not None:
        q_alone = np.minimum(q_alone, (~common).sum(axis=1) * unlisted + nameless)
    kl = (p * np.where(common, log_p - log_q, 0.0)).sum(axis=1) + _least_of_two(alone, unnamed, q_alone, q_rest)
    return np.maximum(kl, 0.0), alone + unnamed


def _sum_of(logprobs: Values, some: npt.NDArray[np.bool_]) -> Values:
    """Sum the probabilities of `some` of the listed tokens: float64 [n]."""
    total: Values = np.exp(np.where(some, logprobs, -np.inf)).sum(axis=1)
    return total


def _least_of_two(first: Values, second: Values, q_first_most: Values, q_sum: Values) -> Values:
    """Return the minimum of Σ p log(p / q) over two sets: p is `first` and `second`, q is at most `q_first_most` in the
    first set and sums to `q_sum`; float64 [n] each.

    Without that limit the minimum divides q as p is divided, as if both were one set. Where the limit is less, the sum
    falls with the first set's q up to it.
    """
    both = np.maximum(first + second, LEAST_REST)
    free = both * np.log(both / q_sum)
    limited = np.maximum(q_first_most, LEAST_REST)
    others = np.maximum(q_sum - limited, LEAST_REST)
    first = np.maximum(first, LEAST_REST)
    second = np.maximum(second, LEAST_REST)
    bound = first * np.log(first / limited) + second * np.log(second / others)
    return np.where(limited * both < q_sum * first, bound, free)


def bounded_kl(top: TopLogits, log_q: npt.NDArray[np.float32]) -> tuple[Values, Values, Values]:
    """Return lower and upper bounds of KL(top || q) in nats at each position of `top`, and the probability of all
    tokens but those of `top`; float64 [n] each.

    `log_q` float32 [n, vocabulary]: the log-probabilities of all tokens.
    """
    tokens = top.tokens.astype(np.int64)
    log_q_top = np.take_along_axis(log_q, tokens, axis=1).astype(np.float64)
    least, rest = coarse_kl(top, tokens, log_q_top)
    log_p = top.logprobs.astype(np.float64)
    most = (np.exp(log_p) * (log_p - log_q_top)).sum(axis=1) + largest_rest(log_p[:, -1], rest, log_q, tokens)
    return least, np.maximum(least, most), rest


def largest_rest(cap: Values, rest: Values, log_q: npt.NDArray[np.float32], tokens: npt.NDArray[np.int64]) -> Values:
    """Return the maximum of Σ p (log p - log q) over all tokens but `tokens` int64 [n, k], where p is at most
    exp(`cap`) and its sum is `rest`, both float64 [n].
    """
    others = log_q.astype(np.float64)
    np.put_along_axis(others, tokens, np.inf, axis=1)
    count = others.shape[1] - tokens.shape[1]
    if not count:
        return np.zeros(len(rest))
    at_cap = np.minimum(np.floor(rest / np.exp(cap)), count).astype(np.int64)
    needed = min(int(at_cap.max(initial=0)) + 1, count)
    least = np.sort(np.partition(others, needed - 1, axis=1)[:, :needed], axis=1)
    below = np.concatenate([np.zeros((len(least), 1)), np.cumsum(least, axis=1)], axis=1)
    full = np.take_along_axis(below, at_cap[:, None], axis=1)[:, 0]
    part = np.maximum(rest - at_cap * np.exp(cap), 0.0)
    last = np.take_along_axis(least, np.minimum(at_cap, needed - 1)[:, None], axis=1)[:, 0]
    entropy = np.where(part > 0, part * np.log(np.where(part > 0, part, 1.0)), 0.0)
    most: Values = at_cap * np.exp(cap) * cap - np.exp(cap) * full + entropy - part * last
    return most
