"""From logits to the next tokens: OpenAI's penalties, temperature, nucleus, one uniform number a token.

Temperature 0 takes the best token and draws nothing. Every request draws from a generator of its own, so a seed gives
it the same numbers whatever it shares a batch with.

Penalties (OpenAI's API reference): logit[j] -= count[j] · frequency + (count[j] > 0) · presence, where count[j] is how
often the model has produced token j so far; the prompt does not count. Nucleus: Holtzman et al., "The Curious Case of
Neural Text Degeneration", section 3.1.

**A row in FP64** (`token_at`) is the definition. **All rows of a step** (`choose_step`) get exactly those tokens,
decided together, in a fraction of its time. A softmax over 128,256 logits in FP64, and a sort for the nucleus, take 2
to 4 ms a row: longer than an engine's step. Yet what is drawn hardly ever depends on their last digits. So weights are
summed in FP32, whose error `SLACK` bounds (`WeighedRows`); only the few tokens that may hold `top_p` are looked at, in
FP64; and the token is taken if it is the same for every sum within the bound. If not, the sums are made in FP64, which
differ by less than `FINE_SLACK` by the order of 2^20 additions, and if these do not decide either, `token_at` does all
of it. So a seed gives one text, alone and among others, on any processor.

    a weight e^-d has d = (top - logit) / temperature rounded three times, and is rounded by exp: 3 · 2^-24 · d + 2^-22,
    where d beyond ln(vocabulary) < 13 weighs next to nothing; the sum of a block of 64: 63 · 2^-24; in all below 2^-17

On a GPU (`device_kernels`) a block is weighed from its own largest logit, with an inverse temperature and a factor for
powers of two besides: six roundings of d, and 2^-22 of `ex2.approx`. Over a sum of 1 and 63 weights e^-d, d · e^-d adds
up to 2.4 at most: 6 · 2.4 · 2^-24 + 2^-22 + 63 · 2^-24, again below 2^-17.

**Logits on the host** (`HostRows`) are weighed row by row, in a processor's cache, and rows are shared among threads,
which NumPy lets run together.

**Logits on a device** (`SummarizedRows`): 32 rows of 128,256 logits are 8 MB in BF16, which to download and to widen
takes longer than many a decode step. A device summarizes them instead, in blocks of 64 (`step_logits.Summary`): 24 kB
a row. The best token follows from the summary. A token that is drawn needs the logits of few blocks besides: that at
which the sum of all weights passes the drawn number, or, of a nucleus, those whose largest logit may belong to it.
Their logits are then asked for, of all rows together. Everything is decided within the bounds above; a row that they do
not decide has all its logits sent, and so has one with penalties or log-probabilities.

Copied as it is into Triton repositories: imports only NumPy and its neighbours in this folder.
"""

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from math import inf, isfinite
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .step_logits import Indices, Logits, StepLogits, Summaries, Summary, Weights

#: Weights of a block, which are summed first.
BLOCK = 64
#: Bounds of the relative error of sums of weights in FP32 (see above), and in FP64.
SLACK = 2.0**-17
FINE_SLACK = 2.0**-32
#: Temperatures, and magnitudes of the best logit, for which these bounds hold; other rows are chosen by `token_at`.
TEMPERATURES = (0.02, 50.0)
LARGEST_TOP = 1e30
#: The nucleus is looked for among tokens so probable that so many of them would hold 1 - top_p; at last among those of
#: which the whole vocabulary would.
COUNTS = (*(4.0**power for power in range(2, 9)), inf)
#: Logits of a row that are worth weights, and of all rows that are worth a thread; the most threads.
ROW_WORTH = 1 << 12
THREAD_WORTH = 1 << 19
MOST_THREADS = 8
#: Where a token is not certain.
UNDECIDED = -1
#: The tokens of a row that are likely, and their logits.
Likely = tuple[Indices, Logits]


@dataclass(frozen=True)
class Sampling:
    """The options of choosing the next token from the logits."""

    temperature: float = 0.0
    top_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


def token_at(logits: Logits, temperature: float, top_p: float, uniform: float) -> int:
    """The token at `uniform`, from 0 to 1, of the nucleus; the best one at temperature 0.

    `logits` [vocabulary], less the penalties. Raises FloatingPointError when the best logit is NaN or
    infinite: the model is broken, and argmax would return a token all the same.
    """
    best = int(logits.argmax())  # argmax returns the first NaN where there is one
    if not isfinite(logits[best]):
        raise FloatingPointError(
            f"the model's logit of token {best} is {logits[best]}; `fp8q inspect` shows its scales, `fp8q validate` "
            "where it goes wrong"
        )
    if temperature == 0.0:
        return best
    tokens, weights = nucleus(probabilities(logits, temperature), top_p)
    cumulative = weights.cumsum()
    drawn = cumulative.searchsorted(uniform * cumulative[-1], side="right")
    return int(tokens[min(int(drawn), len(tokens) - 1)])


def penalized(logits: Logits, sampling: Sampling, counts: Mapping[int, int]) -> Logits:
    """`logits` [vocabulary] less the penalties; the same array where there are none."""
    if not counts or (sampling.frequency_penalty == 0.0 and sampling.presence_penalty == 0.0):
        return logits
    tokens = np.fromiter(counts.keys(), np.int64, len(counts))
    repeats = np.fromiter(counts.values(), np.float32, len(counts))
    logits = logits.copy()
    logits[tokens] -= repeats * np.float32(sampling.frequency_penalty) + np.float32(sampling.presence_penalty)
    return logits


def probabilities(logits: Logits, temperature: float) -> Weights:
    """softmax(logits / temperature), float64 [vocabulary]."""
    weights = logits.astype(np.float64)
    weights -= weights.max()
    weights /= temperature
    np.exp(weights, out=weights)
    weights /= weights.sum()
    return weights


def nucleus(probability: Weights, top_p: float) -> tuple[Indices, Weights]:
    """The fewest tokens that hold `top_p` of the probability, and their probabilities, best first (all of them, by id,
    for 1).

    Sorting a whole vocabulary would cost more than the rest of the step. The tokens below (1 - top_p) / vocabulary hold
    less than 1 - top_p together, so none of them is in the nucleus: only the others are sorted.
    """
    if top_p >= 1.0:
        return np.arange(len(probability)), probability
    candidates = np.flatnonzero(probability >= (1.0 - top_p) / len(probability))
    candidates = candidates[np.argsort(-probability[candidates], kind="stable")]
    size = int(probability[candidates].cumsum().searchsorted(top_p)) + 1
    return candidates[:size], probability[candidates[:size]]


def log_probabilities(logits: Logits, token: int, most: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The natural logarithm of the probability that the model itself gives `token`, before penalties and temperature;
    and those of its `most` best tokens, best first.

    `logits` [vocabulary].
    """
    shifted = logits.astype(np.float64) - float(logits.max())
    shifted -= np.log(np.exp(shifted).sum())
    most = min(most, len(shifted))
    best = np.argpartition(-shifted, most - 1)[:most] if most else np.empty(0, np.int64)
    ranked = best[np.argsort(-shifted[best], kind="stable")].tolist()
    return float(shifted[token]), tuple((best_token, float(shifted[best_token])) for best_token in ranked)


@dataclass(frozen=True)
class RowChoice:
    """A row's logits [vocabulary], and all that its next token depends on; see `token_at`. `logits` is None
    where the token may be chosen from a part of them.
    """

    logits: Logits | None
    sampling: Sampling
    counts: Mapping[int, int]
    random: np.random.Generator | None

    def draw_uniform(self) -> float:
        """Draw the uniform number for a token from its request's generator; temperature 0 draws nothing."""
        if self.sampling.temperature and self.random:
            return float(self.random.random())
        return 0.0


class Draws(NamedTuple):
    """The tokens to choose: temperatures, shares of the nucleus and uniform numbers, float64 [rows] each."""

    temperatures: Weights
    top_p: Weights
    uniforms: Weights

    def at(self, rows: Indices | slice) -> "Draws":
        """Return those of some rows."""
        return Draws(*(values[rows] for values in self))

    @property
    def bounded(self) -> NDArray[np.bool_]:
        """Tell for which rows the temperature is one that the bounds hold for."""
        bounded: NDArray[np.bool_] = (self.temperatures >= TEMPERATURES[0]) & (self.temperatures <= TEMPERATURES[1])
        return bounded


def choose_step(choices: Sequence[RowChoice], rows: Sequence[int], logits: StepLogits) -> list[int | Exception]:
    """Choose the next token of each of the `rows` of a step; return it, or the exception that `token_at` raises. A
    choice without logits takes as much of `logits` as it needs.
    """
    draws = Draws(
        np.array([choice.sampling.temperature for choice in choices]),
        np.array([choice.sampling.top_p for choice in choices]),
        np.array([choice.draw_uniform() for choice in choices]),  # in order: generators are of one thread
    )
    tokens = np.full(len(choices), UNDECIDED)
    if logits.summaries:
        partial = np.flatnonzero([choice.logits is None for choice in choices])
        tokens[partial] = _of_summaries(np.array(rows)[partial], draws.at(partial), logits.summaries)
    left = np.flatnonzero(tokens == UNDECIDED)
    unread = [index for index in left.tolist() if choices[index].logits is None]
    values = dict(zip(unread, logits.rows([rows[index] for index in unread]), strict=True))
    complete = []
    for index in left.tolist():
        choice = choices[index]
        row = values[index] if choice.logits is None else choice.logits
        complete.append(penalized(row, choice.sampling, choice.counts))
    chosen: list[int | Exception] = tokens.tolist()
    for index, token in zip(left.tolist(), _of_complete(complete, draws.at(left)), strict=True):
        chosen[index] = token
    return chosen


def best_tokens(logits: StepLogits, count: int) -> Indices:
    """Return the best token of each of the first `count` rows of a step. Raises FloatingPointError as `token_at`."""
    chosen = choose_step([RowChoice(None, Sampling(), {}, None)] * count, range(count), logits)
    for token in chosen:
        if isinstance(token, Exception):
            raise token
    return np.array(chosen)


class WeighedRows(ABC):
    """The weights e^((logit - top) / temperature) of the tokens of rows: `blocks` [rows, blocks] are their sums over
    neighbours, within `slack`. `tops` [rows]: the best logits.
    """

    def __init__(self, draws: Draws, tops: Weights, blocks: Weights, slack: float):
        """Sum up the weights of each row."""
        self.draws = draws
        self.tops = tops
        self.blocks = blocks
        self.totals: Weights = blocks.sum(1)
        self.slack = slack

    @abstractmethod
    def read(self, rows: Indices, numbers: Indices) -> Logits:
        """Return the logits [rows, BLOCK] of a block of each row, -inf behind the last logit."""

    @abstractmethod
    def likely(self, rows: Indices, floors: Logits) -> Iterable[Likely | None]:
        """Return the tokens, by id, whose logits reach each row's floor, and these; None where they are too many."""

    @abstractmethod
    def first_steps(self, rows: Indices) -> Indices:
        """Return for each row the first of the `COUNTS` that it is worth to look for a nucleus with."""

    def weights(self, rows: Any, logits: Logits) -> Weights:
        """The weights of some tokens in FP64, as `probabilities` has them before they are divided by their sum."""
        shifted = logits.astype(np.float64) - self.tops[rows]
        weights: Weights = np.exp(shifted / self.draws.temperatures[rows])
        return weights

    def drawn(self) -> Indices:
        """Choose the token of each row that `token_at` chooses; UNDECIDED where that is not certain."""
        tokens = np.full(len(self.tops), UNDECIDED)
        sound = (np.abs(self.tops) < LARGEST_TOP) & np.isfinite(self.totals)
        by_id = np.flatnonzero(sound & (self.draws.top_p >= 1.0))
        if by_id.size:
            tokens[by_id] = self._by_id(by_id)
        nucleus = np.flatnonzero(sound & (self.draws.top_p < 1.0))
        if nucleus.size:
            self._of_nucleus(nucleus, tokens)
        return tokens

    def _by_id(self, rows: Indices) -> Indices:
        """Go through the tokens by id until they hold the uniform number of all weight."""
        totals = self.totals[rows, None]
        targets = self.draws.uniforms[rows, None] * totals
        ends = self.blocks[rows].cumsum(1)
        number = np.minimum((ends <= targets).sum(1, keepdims=True), ends.shape[1] - 1)
        begins = np.take_along_axis(ends, number, 1) - self.blocks[rows[:, None], number]
        logits = self.read(rows, number[:, 0])
        inside = begins + self.weights(rows[:, None], logits).cumsum(1)
        token = np.minimum((inside <= targets).sum(1, keepdims=True), BLOCK - 1)
        before = np.take_along_axis(np.concatenate([begins, inside], 1), token, 1)
        error = 2 * self.slack * totals
        certain = (before + error < targets) & (targets < np.take_along_axis(inside, token, 1) - error)
        return np.where(certain, BLOCK * number + token, UNDECIDED)[:, 0]

    def _of_nucleus(self, rows: Indices, tokens: Indices) -> None:
        """Draw `tokens` of the nuclei of `rows`, each looked for among ever more tokens until these hold it."""
        steps = self.first_steps(rows)
        while rows.size:
            floors = self._floors(rows, steps)
            further = np.zeros(len(rows), np.bool_)
            for index, likely in enumerate(self.likely(rows, floors)):
                token = UNDECIDED if likely is None else self._token_among(int(rows[index]), *likely)
                if token is None:
                    further[index] = steps[index] + 1 < len(COUNTS)
                else:
                    tokens[rows[index]] = token
            rows = rows[further]
            steps = steps[further] + 1

    def _floors(self, rows: Indices, steps: Indices | int) -> Logits:
        """Logits below which as many tokens as a step counts would hold less than is outside the nucleus."""
        counts = np.minimum(COUNTS, BLOCK * self.blocks.shape[1])[steps]
        shares = np.minimum(1.0, (1.0 - self.draws.top_p[rows]) * self.totals[rows] / counts)
        floors: Weights = self.tops[rows] + self.draws.temperatures[rows] * np.log(shares)
        return (floors - 1e-5 * (1.0 + np.abs(floors))).astype(np.float32)

    def _token_among(self, row: int, tokens: Indices, logits: Logits) -> int | None:
        """Go through the fewest tokens that hold `top_p`, best first, until they hold the uniform number of their
        weight; None where `tokens`, which are by id, do not hold `top_p`. None that is worse than another is missing.
        """
        weights = self.weights(row, logits)
        held = self.draws.top_p[row] * self.totals[row]
        if weights.sum() <= held * (1.0 + self.slack):
            return None
        order = best_first(logits)
        weights = weights[order]
        logits = logits[order]
        if ((logits[:-1] != logits[1:]) & (weights[:-1] - weights[1:] < FINE_SLACK * weights[:-1])).any():
            return UNDECIDED  # divided by their sum they may be equal, and then they are ordered by id
        cumulative = weights.cumsum()
        last = cumulative.searchsorted([held * (1.0 - self.slack), held * (1.0 + self.slack)])
        if last[1] == len(cumulative):
            return UNDECIDED
        target = self.draws.uniforms[row] * cumulative[last] * (1.0 - FINE_SLACK, 1.0 + FINE_SLACK)
        least, most = cumulative.searchsorted(target, side="right").tolist()
        return int(tokens[order[least]]) if least == most <= last[0] else UNDECIDED


def best_first(logits: Logits) -> Indices:
    """The stable order of `logits`, the largest first: each as a whole number, complemented, above its place, for NumPy
    sorts whole numbers by vector instructions, and nothing stably by them.
    """
    bits = (logits + np.float32(0.0)).view(np.int32)  # -0.0 is 0.0
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (~ascending).astype(np.int64) << 32 | np.arange(len(logits))
    keys.sort()
    return keys & 0xFFFFFFFF


_rooms = threading.local()


def _room(size: int, kind: type[np.floating[Any]]) -> NDArray[Any]:
    """Return a thread's memory for so many weights: to take it anew would cost as much as they do."""
    if not hasattr(_rooms, "memory") or _rooms.memory.size < size:
        _rooms.memory = np.zeros(size)
    memory: Weights = _rooms.memory
    return memory.view(kind)[:size]


class HostRows(WeighedRows):
    """Rows whose logits [vocabulary] are all there, weighed in FP32, or in FP64 where these are `fine`."""

    def __init__(self, rows: Sequence[Logits], draws: Draws, fine: bool = False):
        """Weigh the rows one by one, in memory that stays in a processor's cache."""
        self._rows = rows
        kind: type[np.floating[Any]] = np.float64 if fine else np.float32
        tops = np.array([row.max() for row in rows], np.float64)
        size = len(rows[0])
        room = _room(-(-size // BLOCK) * BLOCK, kind)
        room[size:] = 0.0
        weights = room[:size]
        blocks = np.zeros((len(rows), len(room) // BLOCK))
        for index in np.flatnonzero(np.abs(tops) < LARGEST_TOP).tolist():
            with np.errstate(over="ignore"):  # what a model forbids may be the lowest number that there is
                np.subtract(rows[index], kind(tops[index]), out=weights, dtype=kind)
                np.multiply(weights, kind(1.0 / draws.temperatures[index]), out=weights)
            np.exp(weights, out=weights)
            blocks[index] = np.einsum("ij->i", room.reshape(-1, BLOCK))
        super().__init__(draws, tops, blocks, FINE_SLACK if fine else SLACK)

    def read(self, rows: Indices, numbers: Indices) -> Logits:
        """Copy blocks: `WeighedRows.read`."""
        logits = np.full((len(rows), BLOCK), -np.inf, np.float32)
        for values, row, number in zip(logits, rows.tolist(), numbers.tolist(), strict=True):
            part = self._rows[row][BLOCK * number : BLOCK * (number + 1)]
            values[: len(part)] = part
        return logits

    def first_steps(self, rows: Indices) -> Indices:
        """Begin with 1,024 tokens: `WeighedRows.first_steps`."""
        return np.full(len(rows), COUNTS.index(1 << 10))

    def likely(self, rows: Indices, floors: Logits) -> Iterator[Likely]:
        """Look at all logits: `WeighedRows.likely`."""
        for row, floor in zip(rows.tolist(), floors, strict=True):
            tokens = np.flatnonzero(self._rows[row] >= floor)
            yield tokens, self._rows[row][tokens]


class SummarizedRows(WeighedRows):
    """The `rows` of a step on a device, weighed by the largest logit of each block, and its sum of weights relative to
    that.
    """

    def __init__(self, rows: Indices, draws: Draws, summary: Summary, summaries: Summaries):
        """Ask for no block yet."""
        self._rows = rows
        self._summaries = summaries
        maxima = summary.maxima[rows].astype(np.float64)
        tops = maxima.max(1)
        with np.errstate(invalid="ignore"):  # of rows whose best logit is none
            self._peaks = np.exp((maxima - tops[:, None]) / draws.temperatures[:, None])
            super().__init__(draws, tops, summary.sums[rows] * self._peaks, SLACK)
        self._most = summaries.most_blocks // summaries.count
        self._sent = np.zeros(maxima.shape, np.bool_)
        self._logits = [np.zeros((0, BLOCK), np.float32)] * len(rows)

    def read(self, rows: Indices, numbers: Indices) -> Logits:
        """Ask for blocks of all rows together: `WeighedRows.read`."""
        return self._summaries.blocks(np.stack([self._rows[rows], numbers], 1).astype(np.int32))

    def _near(self, rows: Indices, floors: Logits) -> NDArray[np.bool_]:
        """Tell which blocks [rows, blocks] have logits that reach the floors."""
        near: NDArray[np.bool_] = self._peaks[rows] >= (1.0 - SLACK) * self.weights(rows, floors)[:, None]
        return near

    def first_steps(self, rows: Indices) -> Indices:
        """Begin where the blocks with likely tokens may hold the nucleus: `WeighedRows.first_steps`."""
        steps = np.zeros(len(self.tops), np.int64)
        left = rows
        for step in range(len(COUNTS) - 1):
            held = (self.blocks[left] * self._near(left, self._floors(left, step))).sum(1)
            left = left[held <= self.draws.top_p[left] * self.totals[left]]
            steps[left] += 1
            if not left.size:
                break
        return steps[rows]

    def likely(self, rows: Indices, floors: Logits) -> Iterator[Likely | None]:
        """Ask for the blocks that were not sent yet: `WeighedRows.likely`."""
        near = self._near(rows, floors)
        few = near.sum(1) <= self._most
        unsent = near & few[:, None] & ~self._sent[rows]
        at, numbers = np.nonzero(unsent)
        further = self.read(rows[at], numbers) if at.size else self._logits[0][:0]
        parts = np.split(further, unsent.sum(1).cumsum()[:-1])
        for index, row in enumerate(rows.tolist()):
            if not few[index]:
                yield None
                continue
            blocks = np.flatnonzero(near[index])
            sent = self._sent[row][blocks]
            logits = np.empty((len(blocks), BLOCK), np.float32)
            logits[sent] = self._logits[row]
            logits[~sent] = parts[index]
            self._sent[row] = near[index]
            self._logits[row] = logits
            reached = np.flatnonzero(logits >= floors[index])
            yield BLOCK * blocks[reached // BLOCK] + reached % BLOCK, logits.reshape(-1)[reached]


def _of_summaries(rows: Indices, draws: Draws, summaries: Summaries) -> Indices:
    """Choose a token for each of the `rows` of a step from their summaries, where these may decide: the best token, and
    at temperatures for which the bounds hold; UNDECIDED elsewhere.
    """
    tokens = np.full(len(rows), UNDECIDED)
    greedy = np.flatnonzero(draws.temperatures == 0.0)
    drawn = np.flatnonzero(draws.bounded)
    if greedy.size or drawn.size:
        temperatures = np.ones(summaries.count, np.float32)
        temperatures[rows[drawn]] = draws.temperatures[drawn]
        summary = summaries.summary(temperatures)
        tokens[greedy] = _best(summary, rows[greedy])
        if drawn.size:
            tokens[drawn] = SummarizedRows(rows[drawn], draws.at(drawn), summary, summaries).drawn()
    return tokens


def _best(summary: Summary, rows: Indices) -> Indices:
    """The best token of each row, the first of equals; UNDECIDED where a logit is no number, or the best infinite."""
    maxima = summary.maxima[rows]
    block = maxima.argmax(1)
    sound = np.isfinite(maxima.max(1)) & ~np.isnan(summary.sums[rows]).any(1)
    return np.where(sound, BLOCK * block + summary.places[rows, block], UNDECIDED)


def _of_complete(rows: Sequence[Logits], draws: Draws) -> list[int | Exception]:
    """Choose a token for rows whose logits [vocabulary], less the penalties, are all there."""
    threads = min(_most_threads(), sum(row.size for row in rows) // THREAD_WORTH, len(rows))
    if threads < 2:
        return _of_part(rows, draws)
    chosen: list[int | Exception] = [UNDECIDED] * len(rows)
    parts = [slice(first, None, threads) for first in range(threads)]
    chosen_parts = _pool().map(_of_part, [rows[part] for part in parts], [draws.at(part) for part in parts])
    for part, tokens in zip(parts, chosen_parts, strict=True):
        chosen[part] = tokens
    return chosen


@cache
def _most_threads() -> int:
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_THREADS, processors)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_most_threads(), "fp8q-sample")


def _of_part(rows: Sequence[Logits], draws: Draws) -> list[int | Exception]:
    """Choose by weights in FP32, then in FP64, and by `token_at` where neither decides."""
    tokens = np.full(len(rows), UNDECIDED)
    worth = draws.bounded & np.array([row.size >= ROW_WORTH for row in rows], np.bool_)
    for fine in (False, True):
        left = np.flatnonzero(worth & (tokens == UNDECIDED))
        if left.size:
            tokens[left] = HostRows([rows[index] for index in left.tolist()], draws.at(left), fine).drawn()
    chosen: list[int | Exception] = tokens.tolist()
    for index in np.flatnonzero(tokens == UNDECIDED).tolist():
        temperature, top_p, uniform = (float(values[index]) for values in draws)
        try:
            chosen[index] = token_at(rows[index], temperature, top_p, uniform)
        except Exception as error:  # noqa: BLE001  # a row's own misfortune, told where it belongs
            chosen[index] = error
    return chosen
