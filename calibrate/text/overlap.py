"""Whether two texts are the same text, whatever files and formats they came in.

Both are cut into units (words and single signs; white space and document boundaries do not count), and every run of
`RUN` consecutive units is hashed. The share of one text's *distinct* runs that the other holds too is the share of it
that was copied: ordinary corpora share next to none that long (measured: Python files of one project 0.3 %, WikiText's
and TinyStories' splits 0), a licence header that stands in every file counts once, and a copy is found wherever it
begins and however its lines are broken.
"""

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ...reporter import SILENT, Reporter

RUN = 64
#: From this share on a text counts as the other one.
SAME = 0.10
#: From this share on the user is told.
WORTH_A_NOTE = 0.01
_UNIT = re.compile(r"[A-Za-z0-9_]+|\S")
#: 2^64 divided by the golden ratio, odd.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

Hashes = npt.NDArray[np.uint64]


def run_within(window: int) -> int:
    """The length of runs to compare windows of so many tokens by: cut apart from each other, short windows share only
    short runs with the text they were cut from.
    """
    return max(min(RUN, window // 4), 1)


def check_disjoint(
    calibration: Sequence[str], evaluation: Sequence[str], data: str, eval_data: str, report: Reporter = SILENT
) -> None:
    """Raise InputError when a tenth of one text is in the other; note it when a hundredth is.

    `data` and `eval_data` are how the user calls them.
    """
    of_calibration, of_evaluation = shares(calibration, evaluation)
    share, what, where = max((of_evaluation, eval_data, data), (of_calibration, data, eval_data))
    if share >= SAME:
        raise InputError(
            f"--eval-data {eval_data}: is not apart from the calibration text: {share:.0%} of {what} is in {where}; "
            "evaluate on other text, or leave --eval-data out to hold out the last tenth of --data"
        )
    if share >= WORTH_A_NOTE:
        report.note(f"--eval-data {eval_data}: {share:.1%} of {what} is in {where}")


def shares(first: Sequence[str], second: Sequence[str], run: int = RUN) -> tuple[float, float]:
    """Share of the distinct runs of `run` units of the first text that the second holds, and the other way round.

    Texts of fewer units are compared in shorter runs.
    """
    units = _units(first), _units(second)
    length = min(run, *map(len, units))
    if not length:
        return 0.0, 0.0
    of_first, of_second = (np.unique(_runs(hashes, length)) for hashes in units)
    common = len(np.intersect1d(of_first, of_second, assume_unique=True))
    return common / len(of_first), common / len(of_second)


def _units(texts: Sequence[str]) -> Hashes:
    """A 64-bit hash of each unit, in order."""
    return np.fromiter((hash(unit.group()) for text in texts for unit in _UNIT.finditer(text)), np.int64).view(
        np.uint64
    )


def _runs(units: Hashes, length: int) -> Hashes:
    """A hash of every run of as many units as the largest power of two up to `length`: runs of 2, 4, 8 … are made of
    two of half their length.

    The shift between the levels keeps them from being one polynomial, in which the inner halves could change places.
    """
    runs, reach = units, 1
    while 2 * reach <= length:
        runs = runs[:-reach] * _MULTIPLIER + runs[reach:]
        runs ^= runs >> np.uint64(29)
        reach *= 2
    return runs
