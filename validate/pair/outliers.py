"""Judge which of many errors stand out: of modules, of experts, of rows of a table.

A rounding has an error that the format sets, and all that were rounded alike have about the same. The median of peers
is no measure of that, since where half of them are wrong it is wrong too. Their lower quartile is, and an error of half
of the value itself is no rounding, whatever the peers have: E4M3 has 3 %, INT4 in groups some 10 %, three bits 20 %.
"""

from collections.abc import Iterable

import numpy as np

#: An error stands out where it is both so many times the lower quartile, and so large: where values were rounded.
TIMES_USUAL = 4.0
LARGE = 0.1
#: So large where they were stored as they are: twice what casts between BF16 and FP16 and sums in another order leave.
LARGE_UNROUNDED = 0.02
#: No rounding has such an error.
NO_ROUNDING = 0.5


def usual_error(errors: Iterable[float | None]) -> float:
    """The lower quartile of the errors that are finite; 0 where there are none."""
    finite = [error for error in errors if error is not None]
    if finite:
        return float(np.quantile(finite, 0.25, method="lower"))
    return 0.0


def outlier_limit(errors: Iterable[float | None], large: float = LARGE) -> float:
    """The error above which one of `errors` stands out."""
    return min(max(TIMES_USUAL * usual_error(errors), large), NO_ROUNDING)
