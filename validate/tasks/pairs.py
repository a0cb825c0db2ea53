"""Compare two models' answers to the same questions: flips, McNemar's exact test, and recovery with its interval.

Near the original, KL and perplexity no longer predict scores of benchmarks (arXiv 2606.19558), and a score alone hides
that answers changed: as many may have turned right as wrong. So questions are paired. A flip is a question that one
model answers right and the other wrong (arXiv 2407.09141). McNemar's test (Psychometrika 12, 1947) asks if flips to
wrong and to right are equally likely: of n = b + c flips, b is then binomial with one half, and the two-sided p is
twice the smaller tail, at most 1; it is exact, where the chi-squared form needs 25 flips. Recovery is the score of FP8
over that of BF16, and its interval draws whole questions again, with both models' answers, so that what makes some
questions hard cancels.
"""

from collections.abc import Sequence
from math import comb, isfinite
from typing import NamedTuple

import numpy as np

from ..accuracy.bootstrap import Bootstrap


class Flips(NamedTuple):
    """Questions whose answers are right in one model and wrong in the other."""

    right_to_wrong: int
    wrong_to_right: int


def is_judged(values: Sequence[float]) -> bool:
    """Tell whether each of `values` is 1 or 0, right or wrong."""
    return all(value in (0.0, 1.0) for value in values)


def count_flips(before: Sequence[float], after: Sequence[float]) -> Flips:
    """Count the questions that are right (1) `before` and wrong (0) `after`, and the other way round."""
    pairs = list(zip(before, after, strict=True))
    return Flips(sum(a > b for a, b in pairs), sum(b > a for a, b in pairs))


def mcnemar_p(flips: Flips) -> float:
    """The two-sided p of McNemar's exact test; 1 without flips."""
    number = sum(flips)
    tail = sum(comb(number, count) for count in range(min(flips) + 1))
    return min(1.0, float(2 * tail / 2**number))


def recovery_interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float] | None:
    """The ends of the 95 % interval of mean(`after`) / mean(`before`), over paired questions.

    None where a quantile is no number, since `before` has so few answers right that a draw may have none.
    """
    questions = Bootstrap(np.arange(len(before)))
    low, high = questions.ratio(np.asarray(after, dtype=np.float64), np.asarray(before, dtype=np.float64))
    return (low, high) if isfinite(low) and isfinite(high) else None


def mean_of_seeds(values: Sequence[Sequence[float]]) -> list[float]:
    """The mean of each question over the seeds, `values` [seeds][questions]."""
    return [float(mean) for mean in np.mean(np.asarray(values, dtype=np.float64), axis=0)]
