"""Mix several weighted texts in one corpus: the number of windows of each, and their order.

Shares are allocated by the largest remainder (Hamilton's method), so that they sum to the whole and each is off by less
than one. Windows are interleaved by their place in their own source, so that every prefix, every batch and every rank's
part has the mixture of the whole.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from ...core.errors import InputError
from ..input.untrusted import local_path

_WEIGHT = re.compile(r"(.+)=([+-]?\d+(?:\.\d+)?|[+-]?\.\d+)", re.DOTALL)


@dataclass(frozen=True)
class WeightedText:
    """One text of a corpus: its name (a file, a directory, a hub data set) and its weight."""

    spec: str
    weight: Fraction = Fraction(1)


def parse(data: str | Sequence[str]) -> list[WeightedText]:
    """The parts that --data names: each `TEXT` or `TEXT=WEIGHT`.

    What exists under the whole name, equals sign and all, is a text without a weight.

    Raises InputError for no text, a weight that is not above 0, and a text given twice.
    """
    parts = [_part(spec) for spec in ([data] if isinstance(data, str) else data)]
    if not parts:
        raise InputError("--data: names no text; give at least one")
    specs = [part.spec for part in parts]
    twice = next((spec for spec in specs if specs.count(spec) > 1), None)
    if twice is not None:
        raise InputError(f"--data {twice}: is given more than once; give it once, and its weight as {twice}=2")
    return parts


def _part(text: str) -> WeightedText:
    found = None if local_path(text).exists() else _WEIGHT.fullmatch(text)
    if found is None:
        return WeightedText(text)
    spec, weight = found[1], Fraction(found[2])
    if weight <= 0:
        raise InputError(f"--data {text}: its weight is {found[2]}; give one above 0, or leave the text out")
    return WeightedText(spec, weight)


def apportion(total: int, weights: Sequence[Fraction]) -> list[int]:
    """`total` given out in proportion to `weights`, by the largest remainder; of equal ones the earlier comes first."""
    quotas = [total * weight / sum(weights) for weight in weights]
    given = [int(quota) for quota in quotas]
    order = sorted(range(len(quotas)), key=lambda part: given[part] - quotas[part])
    for part in order[: total - sum(given)]:
        given[part] += 1
    return given


def largest_total(available: Sequence[int], weights: Sequence[Fraction], below: int | None = None) -> int:
    """The most, less than `below`, that can be given out by `shares` so that no part gets more than is `available` of
    it.

    A smaller total may not fit all the same: by the largest remainder a part's share can shrink as the whole grows (the
    Alabama paradox).
    """
    whole = sum(weights)
    bound = min(int((count + 1) * whole / weight) for count, weight in zip(available, weights, strict=True))
    floor = min(int(count * whole / weight) for count, weight in zip(available, weights, strict=True))
    # By the quota rule a share is its quota rounded up or down, so that only totals between these two need be tried.
    if below is not None:
        bound = min(bound, below - 1)
        floor = min(floor, bound)
    fits = (
        total
        for total in range(bound, floor, -1)
        if all(share <= count for share, count in zip(apportion(total, weights), available, strict=True))
    )
    return next(fits, floor)


def interleave(parts: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """The rows of all `parts`, int64 [rows, width] each, in one array: row j of n stands at (2j + 1) / 2n of the whole;
    of equal places the earlier part's first.
    """
    places = np.concatenate([(2 * np.arange(len(part)) + 1) / (2 * len(part)) for part in parts])
    return np.concatenate(parts)[np.argsort(places, kind="stable")]
