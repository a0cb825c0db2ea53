"""Refuse log-probabilities that no model can have, where they come from a server or a file.

Of the likeliest tokens of a position, natural logarithms of their probabilities are

- numbers, and none of them +inf. -inf is the probability 0 of a masked token, and stands as `LEAST`, as vLLM writes it:
  where another runtime finds that token likely the divergence is then large, and no infinity that no mean survives;
- of probabilities that add up to 1 at most. `ROUNDING` is allowed on top: a server whose log-probabilities are in BF16
  is off by 2**-9 of each, and their sum by 2**-9 of the entropy of the listed tokens, 0.006 for 20 of them;
- and the likeliest is no less likely than one of all tokens of the vocabulary by chance.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

#: The largest amount by which a sum of probabilities may exceed 1, or differ from it.
ROUNDING = 0.01
#: The log-probability of a token that cannot come.
LEAST = -9999.0


def check_logprobs(logprobs: npt.NDArray[Any], vocabulary: int | None, rest: npt.NDArray[Any] | None = None) -> None:
    """Raise ValueError, naming the value, for log-probabilities [positions, tokens] that no model can have.

    `vocabulary`: the model's tokens, where the likeliest of a position is among those listed. `rest` [positions]: the
    logarithm of the probability of all others, where it is known: then all add up to 1, no less.
    """
    every = logprobs if rest is None else np.concatenate([logprobs, rest[:, None]], axis=1)
    if not every.size:
        return
    _refuse(every, np.isnan(every) | (every == np.inf), "is no log-probability")
    with np.errstate(over="ignore"):
        total = np.exp(every.astype(np.float64)).sum(axis=1, keepdims=True)
    _refuse(every, every > np.log1p(ROUNDING), "is above 0")
    _refuse(total, total > 1 + ROUNDING, "is the sum of probabilities, which is 1 at most")
    if rest is not None:
        _refuse(total, total < 1 - ROUNDING, "is the sum of all probabilities, which is 1")
    if vocabulary is not None:
        best = logprobs.max(axis=1, keepdims=True)
        least = -np.log(vocabulary) - ROUNDING
        _refuse(best, best < least, f"is the likeliest of {vocabulary:,} tokens, of which one has {least:.4g} or more")


def _refuse(values: npt.NDArray[Any], wrong: npt.NDArray[np.bool_], why: str) -> None:
    """Raise ValueError with the first of `values` that is `wrong`, and its position where there are several."""
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        at = f" at position {row}" if len(values) > 1 else ""
        raise ValueError(f"{values[row, column]:.5g}{at} {why}")


def within_bounds(logprob: float) -> float:
    """The log-probability as it is counted: from `LEAST` to 0, rounding above that left out."""
    return min(max(logprob, LEAST), 0.0)
