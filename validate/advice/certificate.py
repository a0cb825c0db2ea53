"""Assess whether the calibration text is enough, from the amax of its batches.

If batches are exchangeable, each of n + 1 is equally likely to have the largest amax: the next batch exceeds all n
before it with probability 1 / (n + 1), whatever the distribution (Rényi 1962, on records). The excess is estimated by
leaving one batch out: over all tensors, the share whose largest batch exceeds the others by more than x octaves,
divided by the number of batches, is an unbiased estimate of the probability that a batch exceeds n - 1 others by more
than x. For n others the share is used unchanged (it shrinks with n where large values are rare and stays for power
laws, so the error is on the side of more text). amax have 8 significant bits, so ties are common; a tie exceeds
nothing.

Values beyond the clip saturate: they become the clip. An excess of up to 1/16 costs no more than E4M3's own rounding,
which errs by up to 1/17 of a value. So two probabilities matter: that of an excess beyond this, and that of an excess
beyond an octave, which loses half of the value. Room above the amax (a margin, a power of two) is included. Nothing is
known where the clip is not a function of the batches' amax, as a percentile is not (`ClipMethod.by_batch_amax`).

Batches are not exchangeable where the text changes along the way: then there are more late records than 1/k a batch,
and the verdict says so.

Compensated rounding wants text too, by another rule (`quantize.scales.policy.wanted_tokens`), which `fp8q calibrate`
notes before it measures. Text that is enough for scales and too little for codes is not called enough.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite, log2
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ...calibrate.measure.statistics import Corpus, Statistics
from ...calibrate.text.mixture import interleave
from ...core.columns import Column, Table, count, magnitude, number_column, share, text_column
from ...options import METHODS
from ...quantize.scales.clip import measured
from ...quantize.scales.decisions import Scales, TensorScale
from ...quantize.scales.policy import WantedTokens, wanted_tokens
from .findings import chosen_scales

#: Batches that are too few to tell anything.
FEWEST = 4
#: Octaves beyond the clip that cost no more than rounding (1/17 of the value), and that cost half of the value.
HARMLESS = log2(17 / 16)
LARGE = 1.0
#: How often a tensor may be exceeded harmfully, and by an octave, by the next batch: `good` up to the first, `bad`
#: above the second. A harmful batch clips one value of some 10⁵ by more than rounding would, so that one in a hundred
#: is not seen in any average; one in ten says that the amax is not known yet.
HARMFUL_RATE = (0.01, 0.1)
LARGE_RATE = (0.001, 0.01)
#: Records in the last three quarters of the batches, over those expected. Tensors go together, so that of a few
#: hundred only some five are independent, and 1.4 records each are expected: twice that is 3 standard deviations.
MOST_DRIFT = 2.0
Verdict = Literal["good", "watch", "bad", "unknown"]
#: The words that the sentence of a verdict begins with.
BEGIN: Mapping[Verdict, str] = {"good": "Enough text", "watch": "More text would help", "bad": "Too little text"}
#: The roundings of weights that second moments of inputs compensate.
COMPENSATED = ("gptq", "sequential")
#: Tensors that a table has.
LISTED = 8


@dataclass(frozen=True)
class Record:
    """One tensor: its amax, the octaves by which it exceeds the amax of every other batch (0: a tie; None: there is one
    batch), the octaves up to its clip, and its source: text, batch, first and last window of that batch.
    """

    tensor: str
    amax: float
    octaves: float | None
    room_octaves: float
    text: str
    batch: int
    windows: tuple[int, int]


@dataclass(frozen=True)
class SetBy:
    """A text, its number of windows, and the number of tensors whose amax it set; in a batch of several texts the
    source is unknown.
    """

    text: str
    windows: int
    tensors: int


@dataclass(frozen=True)
class Certificate:
    """The evidence that the calibration text is enough. Probabilities are those of the next batch and one tensor: to
    exceed its amax, to exceed its clip by more than rounding costs (`harmful`), and by more than an octave (`large`).

    `exceeded` counts the tensors in which one batch exceeded the amax of all others, by `median_octaves` in the median;
    `more_windows`: the windows that would bring both probabilities below the limits of `good`, and give compensated
    rounding the tokens that it wants; 0 where they are, None where this is unknown.
    """

    verdict: Verdict
    sentence: str
    windows: int
    batches: int
    tensors: int = 0
    exceeded: int | None = None
    exceeds: float | None = None
    harmful: float | None = None
    large: float | None = None
    median_octaves: float | None = None
    drift: float | None = None
    more_windows: int | None = None
    texts: tuple[SetBy, ...] = ()
    records: tuple[Record, ...] = ()


def octaves_beyond(amax_batches: npt.NDArray[np.float32]) -> float:
    """log2 of the largest amax over the second largest: 0 for a tie, infinity where all others are zero."""
    amax = np.sort(measured(amax_batches).astype(np.float64))
    if len(amax) < 2 or amax[-1] == amax[-2]:
        return 0.0
    if amax[-2] > 0:
        return log2(amax[-1] / amax[-2])
    return float("inf")


def next_exceeds(octaves: npt.NDArray[np.float64], batches: int, beyond: float) -> float:
    """The probability that the next batch exceeds a tensor's amax by more than `beyond` octaves, from `octaves_beyond`
    of tensors [tensors], after so many `batches`.
    """
    return float((octaves > beyond).mean()) / (batches + 1)


def records(amax_batches: npt.NDArray[np.float32]) -> tuple[int, float]:
    """Count how often an amax exceeded all before it in the last three quarters of the batches, and how often it would
    in exchangeable ones without ties.
    """
    amax = measured(amax_batches)
    first = len(amax) // 4
    before = np.maximum.accumulate(amax)
    later = range(max(first, 1), len(amax))
    return sum(bool(amax[k] > before[k - 1]) for k in later), sum(1 / (k + 1) for k in later)


def batch_texts(corpus: Corpus) -> list[tuple[str, int, tuple[int, int]]]:
    """Of each batch of the corpus: its text, its index there, and its first and last window there. A text that is a
    mixture says which of its sources the windows are of. A row with images is a batch of one.
    """
    texts = []
    for text, batch in corpus.numbered():
        first = batch * text.batch_size
        last = min(first + text.batch_size, text.windows) - 1
        row = batch - (text.batches - (text.images or 0))
        if row >= 0:
            texts.append((f"images of {text.name}", batch, (row, row)))
        else:
            texts.append((_named(text, first, last), batch, (first, last)))
    return texts


def _named(text: Corpus, first: int, last: int) -> str:
    sources = text.sources or []
    if len(sources) < 2:
        return text.name
    order = interleave([np.full((source.windows, 1), index) for index, source in enumerate(sources)])[:, 0]
    return " or ".join(sources[index].name for index in sorted(set(order[first : last + 1].tolist())))


def certificate(statistics: Statistics, scales: Scales) -> Certificate:
    """Assess, from the statistics, the text that the run was calibrated on, for the scales and codes that were
    chosen of what text reaches.
    """
    scales = scales.of_text
    of_scales = _for_scales(statistics, scales)
    corpus = statistics.record.corpus
    wanted = _wanted(statistics, scales)
    few = wanted and wanted.few(corpus.windows, corpus.seq_len)
    if wanted is None or few is None:
        return of_scales
    more = wanted.windows(corpus.seq_len) - corpus.windows
    known = 0 if of_scales.verdict == "unknown" else of_scales.more_windows
    verdict: Verdict = "bad" if of_scales.verdict == "bad" else "watch"
    return replace(
        of_scales,
        verdict=verdict,
        sentence=f"{BEGIN[verdict]}: {few}. For scales: {of_scales.sentence[0].lower()}{of_scales.sentence[1:]}",
        more_windows=None if known is None else max(more, known),
    )


def _wanted(statistics: Statistics, scales: Scales) -> WantedTokens | None:
    """The tokens that the compensated rounding of these weights wants; None where none is compensated."""
    first_of = {module: name for name, group in statistics.record.groups.items() for module in group}
    widths = {}
    for module, weight in scales.weights.items():
        measured_input = statistics.tensors.get(f"{first_of.get(module, module)}.input")
        if weight.rounding in COMPENSATED and measured_input is not None:
            widths[module] = measured_input.amax_channels.size
    return wanted_tokens(widths)


def _for_scales(statistics: Statistics, scales: Scales) -> Certificate:
    """Assess the text for the scales of activations."""
    chosen = {
        name: scale
        for name, scale in chosen_scales(scales, statistics.record.groups).items()
        if name in statistics.tensors
    }
    batches = len(statistics.batches_measured)
    windows = statistics.record.corpus.windows
    # an expert that saw too little has another's amax, by a method of its own name
    by_amax = {name: scale for name, scale in chosen.items() if _by_batch_amax(scale.method)}
    if why := _untold(chosen, by_amax, batches):
        return Certificate("unknown", f"Cannot be told: {why}.", windows, batches)
    tensor_records = _records(statistics, by_amax)
    octaves = np.array([float("inf") if record.octaves is None else record.octaves for record in tensor_records])
    harmful, large = (_rate(statistics, tensor_records, octaves, batches, beyond) for beyond in (HARMLESS, LARGE))
    seen = [records(statistics.tensors[record.tensor].amax_batches) for record in tensor_records]
    drift = sum(one for one, _ in seen) / sum(expected for _, expected in seen)
    corpus = statistics.record.corpus
    exceeds = next_exceeds(octaves, batches, 0.0)
    median = _finite(float(np.median(octaves)))
    verdict = _verdict(harmful, large, drift)
    more = None if drift > MOST_DRIFT else _more(harmful, large, batches) * corpus.batch_size
    return Certificate(
        verdict=verdict,
        sentence=_sentence(verdict, (harmful, large, drift), more, corpus.batch_size),
        windows=windows,
        batches=batches,
        tensors=len(tensor_records),
        exceeded=int((octaves > 0).sum()),
        exceeds=exceeds,
        harmful=harmful,
        large=large,
        median_octaves=median,
        drift=drift,
        more_windows=more,
        texts=_set_by(corpus, tensor_records),
        records=tuple(
            sorted(tensor_records, key=lambda record: -(float("inf") if record.octaves is None else record.octaves))
        ),
    )


def _by_batch_amax(method: str) -> bool:
    """Tell whether the amax of batches decide the clips of `method`; not of one that another quantizer chose by."""
    return method in METHODS and METHODS[method].by_batch_amax


def _untold(chosen: Mapping[str, TensorScale], by_amax: Mapping[str, TensorScale], batches: int) -> str | None:
    """Why nothing can be said; None where it can."""
    if not chosen:
        return "no tensor has a scale"
    if not by_amax:
        method = next(iter(chosen.values())).method
        return f"a clip by {method} is not the amax of batches, and of each batch that alone is kept"
    if batches < FEWEST:
        return f"the text was measured in {batches} {'batch' if batches == 1 else 'batches'}, and {FEWEST} are needed"
    return None


def _records(statistics: Statistics, scales: Mapping[str, TensorScale]) -> list[Record]:
    places = batch_texts(statistics.record.corpus)
    tensor_records = []
    for name, scale in scales.items():
        amax_batches = statistics.tensors[name].amax_batches
        amax = float(np.nanmax(amax_batches))
        text, batch, windows = places[int(np.nanargmax(amax_batches))]
        room = log2(scale.scale * scale.grid.max / amax)
        tensor_records.append(Record(name, amax, _finite(octaves_beyond(amax_batches)), room, text, batch, windows))
    return tensor_records


def _rate(
    statistics: Statistics,
    tensor_records: Sequence[Record],
    octaves: npt.NDArray[np.float64],
    batches: int,
    beyond: float,
) -> float:
    """The mean over tensors of the probability that the next batch exceeds the clip by more than `beyond` octaves: of a
    clip that batches exceeded already, the share of those that did.
    """
    rates = []
    for record in tensor_records:
        if (past := record.room_octaves + beyond) >= 0:
            rates.append(next_exceeds(octaves, batches, past))
        else:
            amax = measured(statistics.tensors[record.tensor].amax_batches)
            rates.append(float((amax > record.amax * 2**past).mean()))
    return float(np.mean(rates))


def _verdict(harmful: float, large: float, drift: float) -> Verdict:
    if harmful > HARMFUL_RATE[1] or large > LARGE_RATE[1]:
        return "bad"
    if harmful <= HARMFUL_RATE[0] and large <= LARGE_RATE[0] and drift <= MOST_DRIFT:
        return "good"
    return "watch"


def _more(harmful: float, large: float, batches: int) -> int:
    """Batches that would bring both rates under their limits, since each falls as 1 / (batches + 1)."""
    needed = max(rate / limit[0] for rate, limit in ((harmful, HARMFUL_RATE), (large, LARGE_RATE)))
    return max(ceil((batches + 1) * needed) - (batches + 1), 0)


def _sentence(verdict: Verdict, rates: tuple[float, float, float], more: int | None, batch_size: int) -> str:
    """The verdict in words, with the two rates and limits that it is by. How often an amax is exceeded at all says
    nothing: less than rounding costs harms nothing.
    """
    harmful, large, drift = rates
    what = (
        f"the next {'window' if batch_size == 1 else f'batch of {batch_size} windows'} exceeds a tensor's clip by more "
        f"than rounding costs with a probability of {share(harmful)} (limit {_limit(HARMFUL_RATE)}), and by more than "
        f"an octave with {share(large)} (limit {_limit(LARGE_RATE)})"
    )
    if drift > MOST_DRIFT:
        return (
            f"{BEGIN[verdict]}: amax grew late {drift:.1f} times as often as in text that is alike throughout; {what}, "
            "or more."
        )
    settle = f"; {more:,} more windows would bring it under" if more else ""
    return f"{BEGIN[verdict]}: {what}{settle}."


def _limit(rates: tuple[float, float]) -> str:
    """Format the limit of `good`: 0.01 -> `1 %`."""
    return f"{100 * rates[0]:g} %"


def _set_by(corpus: Corpus, tensor_records: Sequence[Record]) -> tuple[SetBy, ...]:
    """Each text, or the several of a batch, that set an amax or gave windows."""
    windows: Counter[str] = Counter()
    for text in corpus.parts:
        for source in text.sources if text.sources and len(text.sources) > 1 else [text]:
            windows[source.name] += source.windows
    tensors = Counter(record.text for record in tensor_records)
    names = dict.fromkeys([*windows, *tensors])
    return tuple(SetBy(name, windows[name], tensors[name]) for name in names)


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def record_table(shown: Certificate) -> Table[Record]:
    """The tensors whose amax leapt farthest beyond all other batches, and what set it."""
    columns = (
        text_column("tensor"),
        number_column("amax", magnitude),
        Column[Any]("beyond all others", lambda row: row.octaves, "{:.2f} octaves".format),
        Column[Any]("room to the clip", lambda row: row.room_octaves, "{:.2f} octaves".format),
        Column[Any](
            "set by", lambda row: f"{row.text}, windows {row.windows[0]:,} to {row.windows[1]:,}", numeric=False
        ),
    )
    title = f"What set the amax (the first {LISTED} of {shown.tensors})"
    return Table(title, shown.records[:LISTED], columns, shown.sentence)


def text_table(shown: Certificate) -> Table[SetBy]:
    """The texts, and of how many tensors each set the amax."""
    columns = (
        text_column("text"),
        Column[Any]("windows", lambda row: row.windows or None, count),
        number_column("tensors whose amax it set", count, "tensors"),
    )
    return Table("Which text set the amax", shown.texts if len(shown.texts) > 1 else (), columns, shown.sentence)
