"""The exact interval of a share (Clopper and Pearson, Biometrika 26, 1934): of tokens that flip, of questions that do.

It holds for independent trials. The tokens of a text depend on each other a little, so that it is somewhat too narrow
for them; the questions of a task are independent.
"""

from collections.abc import Callable

import numpy as np

#: The probability beyond either end of an interval of 95 %.
TAIL = 0.025


def share_interval(hits: int, number: int) -> tuple[float, float]:
    """The ends of the exact 95 % interval of a share, of which `hits` of `number` trials were: the shares under which
    so many, or so few, are as likely as 2.5 %.
    """
    low = 0.0 if not hits else _share_at(lambda share: 1 - _at_most(hits - 1, number, share), rising=True)
    high = 1.0 if hits == number else _share_at(lambda share: _at_most(hits, number, share), rising=False)
    return low, high


def _share_at(tail: Callable[[float], float], *, rising: bool) -> float:
    """The share at which `tail` is 2.5 %, by bisection."""
    low = 0.0
    high = 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if (tail(middle) < TAIL) == rising:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _at_most(hits: int, number: int, share: float) -> float:
    """The probability of at most `hits` of `number` independent trials, each of which is with probability `share`."""
    if share <= 0 or share >= 1:
        return float(share <= 0)
    counts = np.arange(hits)
    ratios = np.log(number - counts) - np.log1p(counts) + np.log(share) - np.log1p(-share)
    logs = number * np.log1p(-share) + np.concatenate([[0.0], np.cumsum(ratios)])
    return min(1.0, float(np.exp(logs).sum()))
