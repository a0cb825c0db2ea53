"""Measure how much of one text is in another, whatever files and formats they came in.

Both are cut into units (words and single signs; white space and document boundaries do not count), and every run of
`RUN` consecutive units is hashed. The overlap is the share of one text's *distinct* runs that the other contains too.
Ordinary corpora share almost no runs of that length (measured: Python files of one project 0.3 %, WikiText's and
TinyStories' splits 0). A licence header in every file counts once, and a copy is found wherever it begins and however
its lines are broken.

In a short evaluation text headers soon make up a tenth, so texts are refused only from a tenth on. But one window in a
hundred that was calibrated on is no header, and is refused too. It is found by runs of `PASSAGE` units, of which
ordinary corpora share none: the longest common passage of the Python files above has 223, one file in two sets has
1,007.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...core.errors import InputError
from ...core.reporter import SILENT, Reporter

RUN = 64
#: Longer than licences and other boilerplate that many texts share.
PASSAGE = 256
#: From this share on, two texts count as the same.
SAME = 0.10
#: From this share on a note is given; a share of passages is then refused.
WORTH_A_NOTE = 0.01
_UNIT = re.compile(r"[A-Za-z0-9_]+|\S")
#: 2^64 divided by the golden ratio, odd.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Overlap:
    """The share of each text's distinct runs that the other contains, and the larger share of passages."""

    of_first: float = 0.0
    of_second: float = 0.0
    passages: float = 0.0

    @property
    def share(self) -> float:
        """The larger share."""
        return max(self.of_first, self.of_second)

    @property
    def too_much(self) -> bool:
        """Tell whether evaluating on one text is meaningless after calibrating on the other."""
        return self.share >= SAME or self.passages >= WORTH_A_NOTE

    @property
    def worth_a_note(self) -> bool:
        """Tell whether to note the overlap."""
        return self.too_much or self.share >= WORTH_A_NOTE

    @property
    def shown(self) -> str:
        """Format the larger share in percent."""
        if self.share >= SAME:
            return f"{self.share:.0%}"
        return f"{self.share:.1%}"


def check_disjoint(
    calibration: Sequence[str],
    evaluation: Sequence[str],
    data: str,
    eval_data: str,
    report: Reporter = SILENT,
    allowed: bool = False,
) -> Overlap:
    """Measure the overlap of both texts; raise InputError when it is too much, unless it is `allowed`.

    From a hundredth on it is noted. `data` and `eval_data`: the user's names for the texts.
    """
    overlap = measure_overlap(calibration, evaluation)
    what, where = (eval_data, data) if overlap.of_second >= overlap.of_first else (data, eval_data)
    if overlap.too_much and not allowed:
        raise InputError(
            f"--eval-data {eval_data}",
            f"is not apart from the calibration text: {overlap.shown} of {what} is in {where}",
            "evaluate on other text, leave --eval-data out to hold out the last tenth of --data, or give "
            "--allow-overlap",
        )
    if overlap.worth_a_note:
        report.note(f"--eval-data {eval_data}: {overlap.shown} of {what} is in {where}")
    return overlap


def measure_overlap(first: Sequence[str], second: Sequence[str], window: int | None = None) -> Overlap:
    """Measure the overlap of two texts, in shorter runs for texts of fewer units.

    `window`: the size in tokens where one text consists of windows: these share only short runs with their source.
    """
    units = _units(first), _units(second)
    run = RUN
    passage = PASSAGE
    if window is not None:
        run = max(min(RUN, window // 4), 1)
        passage = max(min(PASSAGE, window // 2), 1)
    return Overlap(*_shares(*units, run), max(_shares(*units, passage) if min(map(len, units)) >= passage else (0.0,)))


def repeated(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]) -> float:
    """The share of the distinct runs of `RUN` tokens in `second` that are also in `first`; both int64 [tokens] of one
    text.
    """
    return _shares(first.view(np.uint64), second.view(np.uint64), RUN)[1]


def _shares(first: Hashes, second: Hashes, run: int) -> tuple[float, float]:
    length = min(run, len(first), len(second))
    if not length:
        return 0.0, 0.0
    of_first, of_second = (np.unique(_runs(hashes, length)) for hashes in (first, second))
    common = len(np.intersect1d(of_first, of_second, assume_unique=True))
    return common / len(of_first), common / len(of_second)


def _units(texts: Sequence[str]) -> Hashes:
    """Hash each unit to 64 bits, in order."""
    return np.fromiter((hash(unit.group()) for text in texts for unit in _UNIT.finditer(text)), np.int64).view(
        np.uint64
    )


def _runs(units: Hashes, length: int) -> Hashes:
    """Hash every run of as many units as the largest power of two up to `length`: runs of 2, 4, 8 … consist of two of
    half their length.

    The shift between the levels prevents a single polynomial, in which the inner halves could change places.
    """
    runs = units
    reach = 1
    while 2 * reach <= length:
        runs = runs[:-reach] * _MULTIPLIER + runs[reach:]
        runs ^= runs >> np.uint64(29)
        reach *= 2
    return runs
