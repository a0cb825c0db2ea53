"""Compute the loss by a token's frequency in the calibration text: does FP8 cost rare tokens more than common ones?

The calibration text counts, not the evaluation text, since scales depend on it: the first bucket has the tokens that it
does not contain. The others grow by powers of four, so that a few buckets reach from rare to common.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...core.columns import Column, Table, count, number_column
from ...core.run import Run
from ..accuracy.document import FrequencyBucket, load_accuracy
from ..accuracy.perplexity import Evaluation
from .rows import wrote

#: The step from one bucket to the next, in occurrences.
STEP = 4


@dataclass(frozen=True)
class FrequencyRow:
    """Tokens that occur `least` to `most` times in the calibration text: BF16's mean loss, and runtime -> how much more
    it is there.
    """

    least: int
    most: int
    tokens: int
    nll_nats: float
    increases: Mapping[str, float | None]


def buckets(counts: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """The least and the most occurrences of each bucket (0, 1 to 3, 4 to 15 …) up to the largest of `counts`."""
    least, most = 0, 0
    while least <= counts.max(initial=0):
        yield least, most
        least, most = most + 1, STEP * (most + 1) - 1


def by_frequency(
    evaluation: Evaluation,
    calibration: npt.NDArray[np.int64],
    nll: npt.NDArray[np.float32],
    base: npt.NDArray[np.float32] | None,
) -> list[FrequencyBucket]:
    """The mean of `nll` [windows, context] (nats, of every token scored) by each token's occurrences in `calibration`
    (token ids of any shape), and how much more it is than `base`, BF16's of the same tokens. Empty buckets are left
    out.
    """
    ids = evaluation.ids[evaluation.scored]
    seen = np.bincount(calibration.ravel(), minlength=int(ids.max()) + 1)
    counts, losses = seen[ids], nll[evaluation.scored].astype(np.float64)
    before = None if base is None else base[evaluation.scored].astype(np.float64)
    found = []
    for least, most in buckets(counts):
        inside = (least <= counts) & (counts <= most)
        if inside.any():
            mean = float(losses[inside].mean())
            more = None if before is None else mean - float(before[inside].mean())
            bucket = {"least": least, "most": most, "tokens": int(inside.sum()), "nll_nats": mean}
            found.append(FrequencyBucket.model_validate(bucket | {"nll_increase_nats": more}))
    return found


def frequency_rows(run: Run) -> list[FrequencyRow]:
    """The evaluation's tokens by how often they occur in the calibration text, for every runtime beside BF16."""
    if not wrote(run, run.accuracy, "validate"):
        return []
    found = load_accuracy(run).runtimes
    base = found["bf16"].by_frequency if "bf16" in found else None
    others = {
        name: {each.least: each for each in of.by_frequency or []} for name, of in found.items() if name != "bf16"
    }
    return [
        FrequencyRow(
            each.least,
            each.most,
            each.tokens,
            each.nll_nats,
            {name: of[each.least].nll_increase_nats for name, of in others.items() if each.least in of},
        )
        for each in base or []
    ]


def frequency_table(rows: Sequence[FrequencyRow]) -> Table[FrequencyRow]:
    """Tabulate the loss of each runtime on rare and on common tokens."""
    columns = (
        Column[FrequencyRow]("in the calibration text", occurrences, numeric=False),
        number_column("tokens", count),
        Column[FrequencyRow]("NLL of BF16, nats", lambda row: row.nll_nats, "{:.4f}".format),
        *(_increase_of(name) for name in dict.fromkeys(name for row in rows for name in row.increases)),
    )
    return Table("Loss by how often a token occurs", rows, columns, "Not evaluated yet: run `fp8q validate RUN`.")


def occurrences(row: FrequencyRow) -> str:
    """Describe how often the tokens of a bucket occur."""
    if row.most == 0:
        return "never"
    return f"{row.least:,} to {row.most:,} times"


def _increase_of(runtime: str) -> Column[FrequencyRow]:
    return Column(f"{runtime}: more", lambda row: row.increases.get(runtime), signed)


def signed(value: float) -> str:
    """A difference in nats with its sign."""
    return f"{value:+.4f}".replace("-", "−")
