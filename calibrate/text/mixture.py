"""Mix several weighted texts in one corpus: the number of windows of each, and their order.

Shares are allocated by the largest remainder (Hamilton's method), so that they sum to the whole and each is off by less
than one. Windows are interleaved by their place in their own source, so that every prefix, every batch and every rank's
part has the mixture of the whole.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
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
    """Parse the values of --data, each `TEXT` or `TEXT=WEIGHT`.

    If a file exists under the whole value, equals sign included, it is a text without a weight. Raises InputError for
    no text, a weight that is not above 0, and a text that is given twice.
    """
    parts = [_part(spec) for spec in ([data] if isinstance(data, str) else data)]
    if not parts:
        raise InputError("--data", "names no text", "give at least one")
    specs = [part.spec for part in parts]
    twice = next((spec for spec in specs if specs.count(spec) > 1), None)
    if twice is not None:
        raise InputError(f"--data {twice}", "is given more than once", f"give it once, and its weight as {twice}=2")
    return parts


def _part(text: str) -> WeightedText:
    part = _part_of(text)
    if part.weight <= 0:
        weight = text.removeprefix(f"{part.spec}=")
        raise InputError(f"--data {text}", f"its weight is {weight}", "give one above 0, or leave the text out")
    return part


def _part_of(text: str) -> WeightedText:
    match = None if local_path(text).exists() else _WEIGHT.fullmatch(text)
    if match is None:
        return WeightedText(text)
    return WeightedText(match[1], Fraction(match[2]))


def written(spec: str, weight: float) -> str:
    """Write a text with its weight as `parse` reads it: `TEXT` alone where the weight is 1."""
    if weight == 1 and _part_of(spec) == WeightedText(spec):
        return spec
    return f"{spec}={int(weight) if weight == int(weight) else format(Decimal(repr(weight)), 'f')}"


def apportion(total: int, weights: Sequence[Fraction]) -> list[int]:
    """Divide `total` in proportion to `weights`, by the largest remainder; ties go to the earlier part."""
    quotas = [total * weight / sum(weights) for weight in weights]
    counts = [int(quota) for quota in quotas]
    order = sorted(range(len(quotas)), key=lambda part: counts[part] - quotas[part])
    for part in order[: total - sum(counts)]:
        counts[part] += 1
    return counts


def largest_total(available: Sequence[int], weights: Sequence[Fraction], below: int | None = None) -> int:
    """The largest total, below `below`, that `apportion` divides so that each part gets at most its number `available`.

    A smaller total may not fit all the same: by the largest remainder a part's number can fall when the total grows
    (the Alabama paradox).
    """
    total_weight = sum(weights)
    bound = min(int((count + 1) * total_weight / weight) for count, weight in zip(available, weights, strict=True))
    floor = min(int(count * total_weight / weight) for count, weight in zip(available, weights, strict=True))
    # By the quota rule a part gets its quota rounded up or down, so only totals between these two need a test.
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
    """Join the rows of all `parts`, int64 [rows, width] each, in the order of their relative positions.

    Row j of n has the position (2j + 1) / 2n; at equal positions the earlier part comes first.
    """
    places = np.concatenate([(2 * np.arange(len(part)) + 1) / (2 * len(part)) for part in parts])
    return np.concatenate(parts)[np.argsort(places, kind="stable")]
