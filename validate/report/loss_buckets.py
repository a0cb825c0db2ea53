"""Average the loss and the divergence of tokens in buckets: by position in the window, by distance from the prompt's
end, and by frequency in the calibration text.

Positions, up to the longest that was evaluated, are in buckets that double in length from 1 to 32 up: the error that a
cache of codes adds grows, if at all, with the tokens before a position, and a plot by equal steps shows a long window's
first thousand positions as one point.

The distance from the prompt's end matters for a form that depends on the phase, which reads a prompt otherwise than it
decodes: the effect on the answer is largest right behind the prompt, so that the mean over all decoded tokens does not
show it.

Frequency shows if FP8 costs rare tokens more than common ones. The calibration text counts, not the evaluation text,
since scales depend on it: the first bucket has the tokens that it does not contain. The others grow by powers of four,
so that a few buckets reach from rare to common.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...calibrate.text.evaluation import Evaluation
from ...core.columns import Column, Table, count, increase, nats, number_column
from ...core.run import Run
from ...options import FLOAT
from ..accuracy.document import Accuracy, FrequencyBucket, PositionBucket, load_accuracy
from ..accuracy.limits import BF16
from .rows import wrote

#: Positions of the first bucket; each further one reaches twice as far.
FIRST = 32
#: The step from one bucket to the next, in occurrences.
STEP = 4


@dataclass(frozen=True)
class PositionRow:
    """Tokens at positions `first` to `last`: BF16's perplexity, runtime -> its increase, runtime -> KL from BF16."""

    first: int
    last: int
    tokens: int
    perplexity: float
    increases: Mapping[str, float]
    divergences: Mapping[str, float]


def doubling_spans(context: int) -> Iterator[tuple[int, int]]:
    """The first and the last position of each bucket of a window of `context` tokens, counted from 1."""
    first = 1
    last = FIRST
    while first <= context:
        yield first, min(last, context)
        first = last + 1
        last = 2 * last


def by_position(
    nll: npt.NDArray[np.float32], base: npt.NDArray[np.float32] | None, kl: npt.NDArray[np.float32] | None
) -> list[PositionBucket]:
    """Mean of `nll` [windows, context] (nats; NaN: not scored) in each bucket, how much more it is than `base`, BF16's,
    and the mean of `kl`, from BF16. Buckets without a scored token are left out.
    """
    averages = []
    for first, last in doubling_spans(nll.shape[1]):
        inside = slice(first - 1, last)
        scored = ~np.isnan(nll[:, inside])
        if not scored.any():
            continue
        loss = nll[:, inside][scored].mean(dtype=np.float64)
        before = None if base is None else base[:, inside][scored].mean(dtype=np.float64)
        averages.append(
            PositionBucket(
                first=first,
                last=last,
                tokens=int(scored.sum()),
                nll_nats=float(loss),
                nll_increase_nats=None if before is None else float(loss - before),
                kl_mean_nats=None if kl is None else float(kl[:, inside][scored].mean(dtype=np.float64)),
            )
        )
    return averages


def position_rows(run: Run) -> list[PositionRow]:
    """The evaluation's tokens by their position; none where that is not known, or of one bucket alone."""
    if not wrote(run, run.accuracy, "validate"):
        return []
    runtimes = load_accuracy(run).runtimes
    of_base = runtimes[BF16].by_position if BF16 in runtimes else None
    rows = []
    for number, bucket in enumerate(of_base or []):
        others = {
            name: runtime.by_position[number]
            for name, runtime in runtimes.items()
            if runtime.by_position and name not in FLOAT
        }
        rows.append(
            PositionRow(
                bucket.first,
                bucket.last,
                bucket.tokens,
                float(np.exp(bucket.nll_nats)),
                {n: float(np.expm1(o.nll_increase_nats)) for n, o in others.items() if o.nll_increase_nats is not None},
                {name: other.kl_mean_nats for name, other in others.items() if other.kl_mean_nats is not None},
            )
        )
    return rows if len(rows) > 1 else []


def position_table(rows: Sequence[PositionRow], note: str = "") -> Table[PositionRow]:
    """Tabulate perplexity and KL by position; `note`: on the positions that were not evaluated."""

    def increase_of(name: str) -> Column[PositionRow]:
        return Column(name, lambda row: row.increases.get(name), increase)

    def divergence_of(name: str) -> Column[PositionRow]:
        return Column(f"KL of {name}, nats", lambda row: row.divergences.get(name), nats)

    columns = (
        Column[PositionRow]("position", lambda row: f"{row.first:,} to {row.last:,}"),
        number_column("tokens", count),
        Column[PositionRow]("BF16’s perplexity", lambda row: row.perplexity, "{:.4f}".format),
        *map(increase_of, dict.fromkeys(name for row in rows for name in row.increases)),
        *map(divergence_of, dict.fromkeys(name for row in rows for name in row.divergences)),
    )
    return Table("By position in the window", rows, columns, "Not evaluated yet: run `fp8q validate RUN`.", note)


def not_covered(accuracy: Accuracy) -> str:
    """Name the model's positions that no window reached, and the command that does; empty where there are none."""
    context = accuracy.protocol.context
    positions = accuracy.positions
    if positions is None or context >= positions:
        return ""
    return (
        f"Positions {context + 1:,} to {positions:,} of the model were not evaluated, since windows have {context:,} "
        f"tokens: `fp8q validate RUN --context {positions}` reaches them, on a text of that length."
    )


def is_flat(rows: Sequence[PositionRow]) -> bool:
    """Tell whether no runtime's KL rises along the window: in no bucket beyond the first is it more than a quarter
    above that of all tokens.
    """
    for name in {name for row in rows for name in row.divergences}:
        known = [(row.divergences[name], row.tokens) for row in rows if name in row.divergences]
        mean = sum(kl * tokens for kl, tokens in known) / sum(tokens for _, tokens in known)
        if any(kl > 1.25 * mean for kl, _ in known[1:]):
            return False
    return True


@dataclass(frozen=True)
class DistanceRow:
    """The decoded tokens `first` to `last` behind a prompt, counted from 1: runtime -> mean KL from BF16, in nats."""

    first: int
    last: int
    tokens: int
    divergences: Mapping[str, float]


def distance_rows(run: Run) -> list[DistanceRow]:
    """The evaluation's decoded tokens by their distance from the prompt's end; none where whole windows were run."""
    if not wrote(run, run.accuracy, "validate"):
        return []
    parts: dict[tuple[int, int, int], dict[str, float]] = {}
    for name, runtime in load_accuracy(run).runtimes.items():
        for bucket in runtime.by_distance or []:
            divergences = parts.setdefault((bucket.first, bucket.last, bucket.tokens), {})
            if bucket.kl_mean_nats is not None:
                divergences[name] = bucket.kl_mean_nats
    return [DistanceRow(*part, divergences) for part, divergences in parts.items()]


def distance_table(rows: Sequence[DistanceRow]) -> Table[DistanceRow]:
    """Tabulate the KL from BF16 of each runtime, near the prompt and far from it."""
    columns = (
        Column[DistanceRow]("behind the prompt", lambda row: f"{row.first:,} to {row.last:,}", numeric=False),
        number_column("tokens", count),
        *(_divergence_of(name) for name in dict.fromkeys(name for row in rows for name in row.divergences)),
    )
    missing = "Whole windows were run: `fp8q validate RUN --as-served PROMPT` decodes them behind a prompt."
    return Table("KL from BF16 by the distance from the prompt, nats", rows, columns, missing)


def _divergence_of(runtime: str) -> Column[DistanceRow]:
    return Column(runtime, lambda row: row.divergences.get(runtime), nats)


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
    least = 0
    most = 0
    while least <= counts.max(initial=0):
        yield least, most
        least = most + 1
        most = STEP * (most + 1) - 1


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
    counts = seen[ids]
    losses = nll[evaluation.scored].astype(np.float64)
    before = None if base is None else base[evaluation.scored].astype(np.float64)
    averages = []
    for least, most in buckets(counts):
        inside = (least <= counts) & (counts <= most)
        if inside.any():
            mean = float(losses[inside].mean())
            more = None if before is None else mean - float(before[inside].mean())
            bucket = {"least": least, "most": most, "tokens": int(inside.sum()), "nll_nats": mean}
            averages.append(FrequencyBucket.model_validate(bucket | {"nll_increase_nats": more}))
    return averages


def frequency_rows(run: Run) -> list[FrequencyRow]:
    """Return the evaluation's tokens by how often they occur in the calibration text, for every runtime but BF16."""
    if not wrote(run, run.accuracy, "validate"):
        return []
    runtimes = load_accuracy(run).runtimes
    base = runtimes["bf16"].by_frequency if "bf16" in runtimes else None
    others = {
        name: {bucket.least: bucket for bucket in runtime.by_frequency or []}
        for name, runtime in runtimes.items()
        if name != "bf16"
    }
    return [
        FrequencyRow(
            bucket.least,
            bucket.most,
            bucket.tokens,
            bucket.nll_nats,
            {
                name: by_least[bucket.least].nll_increase_nats
                for name, by_least in others.items()
                if bucket.least in by_least
            },
        )
        for bucket in base or []
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
