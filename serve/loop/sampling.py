"""From one row of logits to the next token: OpenAI's penalties, temperature, nucleus, one uniform number a token.

Temperature 0 takes the best token and draws nothing. Every request draws from a generator of its own, so a seed gives
it the same numbers whatever it shares a batch with.

Penalties (OpenAI's API reference): logit[j] -= count[j] · frequency + (count[j] > 0) · presence, where count[j] is how
often the model has produced token j so far; the prompt does not count. Nucleus: Holtzman et al., "The Curious Case of
Neural Text Degeneration", section 3.1.

Copied as it is into Triton repositories: imports only NumPy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sampling:
    """The options of choosing the next token from the logits."""

    temperature: float = 0.0
    top_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


def choose(
    logits: NDArray[np.float32], sampling: Sampling, counts: Mapping[int, int], random: np.random.Generator | None
) -> int:
    """The next token id.

    `logits` [vocabulary]; `counts` how often each token was produced so far; `random` may be None where the temperature
    is 0. Raises FloatingPointError when the best
    logit is NaN or infinite: the model is broken, and argmax would return a token all the same. `batch_sampling` does
    this for many rows.
    """
    uniform = 0.0
    if sampling.temperature:
        assert random is not None, "there is nothing to draw from"
        uniform = random.random()
    return token_at(penalized(logits, sampling, counts), sampling, uniform)


def token_at(logits: NDArray[np.float32], sampling: Sampling, uniform: float) -> int:
    """The token at `uniform`, from 0 to 1, of the nucleus; the best one at temperature 0.

    `logits` [vocabulary], less the penalties. Raises what `choose` raises.
    """
    best = int(logits.argmax())  # argmax returns the first NaN where there is one
    if not isfinite(logits[best]):
        raise FloatingPointError(
            f"the model's logit of token {best} is {logits[best]}; `fp8q inspect` shows its scales, `fp8q validate` "
            "where it goes wrong"
        )
    if sampling.temperature == 0.0:
        return best
    tokens, weights = nucleus(probabilities(logits, sampling.temperature), sampling.top_p)
    cumulative = weights.cumsum()
    drawn = cumulative.searchsorted(uniform * cumulative[-1], side="right")
    return int(tokens[min(int(drawn), len(tokens) - 1)])


def penalized(logits: NDArray[np.float32], sampling: Sampling, counts: Mapping[int, int]) -> NDArray[np.float32]:
    """`logits` [vocabulary] less the penalties; the same array where there are none."""
    if not counts or (sampling.frequency_penalty == 0.0 and sampling.presence_penalty == 0.0):
        return logits
    tokens = np.fromiter(counts.keys(), np.int64, len(counts))
    repeats = np.fromiter(counts.values(), np.float32, len(counts))
    logits = logits.copy()
    logits[tokens] -= repeats * np.float32(sampling.frequency_penalty) + np.float32(sampling.presence_penalty)
    return logits


def probabilities(logits: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    """softmax(logits / temperature), float64 [vocabulary]."""
    weights = logits.astype(np.float64)
    weights -= weights.max()
    weights /= temperature
    np.exp(weights, out=weights)
    weights /= weights.sum()
    return weights


def nucleus(probability: NDArray[np.float64], top_p: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The fewest tokens that hold `top_p` of the probability, and their probabilities, best first (all of them, by id,
    for 1).

    Sorting a whole vocabulary would cost more than the rest of the step. The tokens below (1 - top_p) / vocabulary hold
    less than 1 - top_p together, so none of them is in the nucleus: only the others are sorted.
    """
    if top_p >= 1.0:
        return np.arange(len(probability)), probability
    candidates = np.flatnonzero(probability >= (1.0 - top_p) / len(probability))
    candidates = candidates[np.argsort(-probability[candidates], kind="stable")]
    size = int(probability[candidates].cumsum().searchsorted(top_p)) + 1
    return candidates[:size], probability[candidates[:size]]


def log_probabilities(
    logits: NDArray[np.float32], token: int, most: int
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The natural logarithm of the probability that the model itself gives `token`, before penalties and temperature;
    and those of its `most` best tokens, best first.

    `logits` [vocabulary].
    """
    shifted = logits.astype(np.float64) - float(logits.max())
    shifted -= np.log(np.exp(shifted).sum())
    most = min(most, len(shifted))
    best = np.argpartition(-shifted, most - 1)[:most] if most else np.empty(0, np.int64)
    ranked = best[np.argsort(-shifted[best], kind="stable")].tolist()
    return float(shifted[token]), tuple((best_token, float(shifted[best_token])) for best_token in ranked)
