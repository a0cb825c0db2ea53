"""From logits to the next tokens: OpenAI's penalties, temperature, nucleus, one uniform number a token.

Temperature 0 takes the best token and draws nothing. Every request draws from a generator of its own, so a seed gives
it the same numbers whatever it shares a batch with.

Penalties (OpenAI's API reference): logit[j] -= count[j] · frequency + (count[j] > 0) · presence, where count[j] is how
often the model has produced token j so far; the prompt does not count. Nucleus: Holtzman et al., "The Curious Case of
Neural Text Degeneration", section 3.1.

**One row** (`choose`) is the definition. **All rows of a step** (`choose_all`) get exactly those tokens in a fraction
of its time. A softmax over 128,256 logits in FP64, and a sort for the nucleus, take 2 to 4 ms a row: longer than an
engine's step. Yet what is drawn hardly ever depends on their last digits. So weights are summed in FP32, whose error
`SLACK` bounds; only the few tokens that may hold `top_p` are looked at, in FP64; and the token is taken if it is the
same for every sum within the bound. If not, the sum is made in FP64, and if that does not decide either, `token_at`
does all of it. So a seed gives one text, alone and among others, on any processor.

    a weight e^-d has d = (top - logit) / temperature rounded three times, and is rounded by exp: 3 · 2^-24 · d + 2^-22,
    where d beyond ln(vocabulary) < 13 weighs next to nothing; the sum of a block of 64: 63 · 2^-24; in all below 2^-17

On a GPU (`device_kernels`) a block is weighed from its own largest logit, with an inverse temperature and a factor for
powers of two besides: six roundings of d, and 2^-22 of `ex2.approx`. Over a sum of 1 and 63 weights e^-d, d · e^-d adds
up to 2.4 at most: 6 · 2.4 · 2^-24 + 2^-22 + 63 · 2^-24, again below 2^-17. Rows are shared among threads, which NumPy
lets run together.

**Logits on a device** (`choose_step`): 32 rows of 128,256 logits are 8 MB in BF16, which to download and to widen takes
longer than many a decode step. A device summarizes them instead, in blocks of 64 (`step_logits.Summary`): 24 kB a row.
The best token follows from the summary. A token that is drawn needs the logits of few blocks besides: that at which the
sum of all weights passes the drawn number, or, of a nucleus, those whose largest logit may belong to it. Their logits
are then asked for, of all rows together. Everything is decided within the bounds above; a row that they do not decide
has all its logits sent, and so has one with penalties or log-probabilities.

Copied as it is into Triton repositories: imports only NumPy and its neighbours in this folder.
"""

import os
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite, log

import numpy as np
from numpy.typing import NDArray

from .step_logits import StepLogits, Summaries, Summary

#: Weights of a block, which are summed first.
BLOCK = 64
#: Bounds of the relative error of sums of weights in FP32 (see above), and in FP64.
SLACK = 2.0**-17
FINE_SLACK = 2.0**-40
#: Temperatures, and magnitudes of the best logit, for which these bounds hold; other rows are chosen by themselves.
TEMPERATURES = (0.02, 50.0)
LARGEST_TOP = 1e30
#: The nucleus is looked for among tokens so probable that so many of them would hold 1 - top_p; at last among those of
#: which the whole vocabulary would.
NEAR = (1 << 10, 1 << 13, 1 << 16)
#: The same where each block is sent, in smaller steps.
NEAR_SENT = tuple(4**power for power in range(2, 9))
#: Logits of a row that are worth this, and of all rows that are worth a thread; the most threads.
ROW_WORTH = 1 << 12
THREAD_WORTH = 1 << 19
MOST_THREADS = 8
#: The choice of a row: it asks for the logits of blocks, and returns a token, or None if they do not decide.
Asking = Generator[NDArray[np.int64], NDArray[np.float32], int | None]


@dataclass(frozen=True)
class Sampling:
    """The options of choosing the next token from the logits."""

    temperature: float = 0.0
    top_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


def choose(
    logits: NDArray[np.float32], sampling: Sampling, counts: Mapping[int, int], random: np.random.Generator | None
) -> int:
    """The next token id.

    `logits` [vocabulary]; `counts` how often each token was produced so far; `random` may be None where the temperature
    is 0. Raises FloatingPointError when the best
    logit is NaN or infinite: the model is broken, and argmax would return a token all the same. `choose_all`
    does this for many rows.
    """
    uniform = 0.0
    if sampling.temperature:
        assert random is not None, "there is nothing to draw from"
        uniform = random.random()
    return token_at(penalized(logits, sampling, counts), sampling, uniform)


def token_at(logits: NDArray[np.float32], sampling: Sampling, uniform: float) -> int:
    """The token at `uniform`, from 0 to 1, of the nucleus; the best one at temperature 0.

    `logits` [vocabulary], less the penalties. Raises what `choose` raises.
    """
    best = int(logits.argmax())  # argmax returns the first NaN where there is one
    if not isfinite(logits[best]):
        raise FloatingPointError(
            f"the model's logit of token {best} is {logits[best]}; `fp8q inspect` shows its scales, `fp8q validate` "
            "where it goes wrong"
        )
    if sampling.temperature == 0.0:
        return best
    tokens, weights = nucleus(probabilities(logits, sampling.temperature), sampling.top_p)
    cumulative = weights.cumsum()
    drawn = cumulative.searchsorted(uniform * cumulative[-1], side="right")
    return int(tokens[min(int(drawn), len(tokens) - 1)])


def penalized(logits: NDArray[np.float32], sampling: Sampling, counts: Mapping[int, int]) -> NDArray[np.float32]:
    """`logits` [vocabulary] less the penalties; the same array where there are none."""
    if not counts or (sampling.frequency_penalty == 0.0 and sampling.presence_penalty == 0.0):
        return logits
    tokens = np.fromiter(counts.keys(), np.int64, len(counts))
    repeats = np.fromiter(counts.values(), np.float32, len(counts))
    logits = logits.copy()
    logits[tokens] -= repeats * np.float32(sampling.frequency_penalty) + np.float32(sampling.presence_penalty)
    return logits


def probabilities(logits: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    """softmax(logits / temperature), float64 [vocabulary]."""
    weights = logits.astype(np.float64)
    weights -= weights.max()
    weights /= temperature
    np.exp(weights, out=weights)
    weights /= weights.sum()
    return weights


def nucleus(probability: NDArray[np.float64], top_p: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
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


def log_probabilities(
    logits: NDArray[np.float32], token: int, most: int
) -> tuple[float, tuple[tuple[int, float], ...]]:
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
    """A row's logits [vocabulary], and all that its next token depends on; see `choose`. `logits` is None
    where the token may be chosen from a part of them (`choose_step`).
    """

    logits: NDArray[np.float32] | None
    sampling: Sampling
    counts: Mapping[int, int]
    random: np.random.Generator | None


def choose_all(choices: Sequence[RowChoice]) -> list[int | Exception]:
    """Choose the next token of each row; return it, or the exception, as `choose` returns or raises."""
    return choose_drawn(choices, [draw_uniform(choice) for choice in choices])  # in order: generators are of one thread


def choose_drawn(choices: Sequence[RowChoice], uniforms: Sequence[float]) -> list[int | Exception]:
    """Choose the next token of each row with the number that `draw_uniform` drew for it."""
    pairs = list(zip(choices, uniforms, strict=True))
    logits = sum(choice.logits.size for choice in choices if choice.logits is not None)
    threads = min(_most_threads(), logits // THREAD_WORTH, len(choices))
    if threads < 2:
        return _chosen(pairs)
    chosen: list[int | Exception] = [0] * len(pairs)
    for index, tokens in enumerate(_pool().map(_chosen, [pairs[index::threads] for index in range(threads)])):
        chosen[index::threads] = tokens
    return chosen


@cache
def _most_threads() -> int:
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_THREADS, processors)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_most_threads(), "fp8q-sample")


def draw_uniform(choice: RowChoice) -> float:
    """Draw the uniform number for a token from its request's generator."""
    if choice.sampling.temperature and choice.random:
        return float(choice.random.random())
    return 0.0


def _chosen(pairs: Sequence[tuple[RowChoice, float]]) -> list[int | Exception]:
    chosen: list[int | Exception] = []
    for choice, uniform in pairs:
        try:
            assert choice.logits is not None, "they are read"
            logits = penalized(choice.logits, choice.sampling, choice.counts)
            token = likely_token(logits, choice.sampling, uniform) if logits.size >= ROW_WORTH else None
            chosen.append(token_at(logits, choice.sampling, uniform) if token is None else token)
        except Exception as error:  # noqa: BLE001  # a row's own misfortune, told where it belongs
            chosen.append(error)
    return chosen


def likely_token(logits: NDArray[np.float32], sampling: Sampling, uniform: float) -> int | None:
    """Choose the token that `token_at` would choose; None if that is not certain.

    `logits` [vocabulary], contiguous.
    """
    if not TEMPERATURES[0] <= sampling.temperature <= TEMPERATURES[1]:
        return None
    if (row := weigh_row(logits, sampling.temperature)) is None:
        return None
    if sampling.top_p >= 1.0:
        return _token_by_id(row, logits, uniform)
    return _token_of_nucleus(row, logits, sampling.top_p, uniform)


_rooms = threading.local()


def _room(size: int) -> NDArray[np.float32]:
    """A thread's memory for so many weights, whole blocks, zeros behind them."""
    room: NDArray[np.float32] | None = getattr(_rooms, "weights", None)
    if room is None or getattr(_rooms, "size", 0) != size:
        _rooms.size = size
        room = np.zeros(-(-size // BLOCK) * BLOCK, np.float32)
        _rooms.weights = room
    return room


@dataclass(frozen=True)
class WeighedRow:
    """The weights e^((logit - top) / temperature) of a row's tokens: `blocks` are their sums over neighbours, float64
    [blocks], and `total` that of all, within `SLACK`. `top`: the best logit; `logits` [vocabulary], if all are there.
    """

    top: float
    temperature: float
    blocks: NDArray[np.float64]
    total: float
    logits: NDArray[np.float32] | None = None

    def weights(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """The weights of some tokens in FP64, as `probabilities` has them before they are divided by their sum."""
        weights: NDArray[np.float64] = np.exp((logits.astype(np.float64) - self.top) / self.temperature)
        return weights

    def totals(self) -> Iterator[tuple[float, float]]:
        """The sum of all weights with the bound of its error; then again, closer, where all logits are there."""
        yield self.total, SLACK
        if self.logits is not None:
            yield float(self.weights(self.logits).sum()), FINE_SLACK

    def block_at(self, uniform: float) -> int | None:
        """Go through the blocks until they hold `uniform` of all weight."""
        block = int(self.blocks.cumsum().searchsorted(uniform * self.total, side="right"))
        return block if block < len(self.blocks) else None

    def token_in(self, block: int, logits: NDArray[np.float32], uniform: float) -> int | None:
        """Go through the tokens of the block at `uniform`, whose `logits` these are, until they hold that."""
        target = uniform * self.total
        error = 2 * SLACK * self.total
        begin = float(self.blocks[: block + 1].cumsum()[block] - self.blocks[block])
        inside = begin + self.weights(logits).cumsum()
        token = int(inside.searchsorted(target, side="right"))
        if (
            token == len(inside)
            or not (begin if token == 0 else inside[token - 1]) + error < target < inside[token] - error
        ):
            return None
        return BLOCK * block + token

    def floor(self, top_p: float, count: int) -> float:
        """A logit below which `count` tokens would hold less than is outside the nucleus."""
        share = min(1.0, (1.0 - top_p) * self.total / count)
        floor = self.top + self.temperature * log(share) if share else -np.inf
        return floor - 1e-5 * (1.0 + abs(floor))

    def may_hold(self, blocks: NDArray[np.int64], top_p: float) -> bool:
        """Tell whether some blocks hold more than `top_p` of all weight."""
        return bool(self.blocks[blocks].sum() > top_p * self.total)

    def holds(self, logits: NDArray[np.float32], top_p: float) -> bool:
        """Tell whether some tokens hold more than `top_p` of all weight."""
        return bool(self.weights(logits).sum() > top_p * self.total * (1.0 + SLACK))

    def token_of_nucleus(
        self, tokens: NDArray[np.int64], logits: NDArray[np.float32], top_p: float, uniform: float
    ) -> int | None:
        """Go through the fewest tokens that hold `top_p`, best first, until they hold `uniform` of their weight.

        `tokens`, by id: some that hold it, with their `logits`, and none that is worse than another is missing.
        """
        order = best_first(logits)
        tokens = tokens[order]
        logits = logits[order]
        weights = self.weights(logits)
        if ((logits[:-1] != logits[1:]) & (weights[:-1] - weights[1:] < FINE_SLACK * weights[:-1])).any():
            return None  # divided by their sum they may be equal, and then they are ordered by id
        cumulative = weights.cumsum()
        for total, slack in self.totals():
            last = cumulative.searchsorted([top_p * total * (1.0 - slack), top_p * total * (1.0 + slack)])
            if last[1] == len(cumulative):
                return None
            target = uniform * cumulative[last] * (1.0 - FINE_SLACK, 1.0 + FINE_SLACK)
            least, most = cumulative.searchsorted(target, side="right").tolist()
            if least == most <= last[0]:
                return int(tokens[least])
        return None


def weigh_blocks(maxima: NDArray[np.float32], sums: NDArray[np.float32], temperature: float) -> WeighedRow | None:
    """Weigh a row by the largest logit of each block, and its sum of weights relative to that, [blocks]; None where the
    bounds do not hold, or a logit is no number.
    """
    top = float(maxima.max())
    if not abs(top) < LARGEST_TOP:
        return None
    blocks = sums.astype(np.float64) * np.exp((maxima.astype(np.float64) - top) / temperature)
    total = float(blocks.sum())
    if isfinite(total):
        return WeighedRow(top, temperature, blocks, total)
    return None


def weigh_row(logits: NDArray[np.float32], temperature: float) -> WeighedRow | None:
    """Weigh `logits` [vocabulary] in FP32; None where the bounds do not hold, or the best logit is no number."""
    top = float(logits.max())
    if not abs(top) < LARGEST_TOP:
        return None
    room = _room(len(logits))
    weights = room[: len(logits)]
    with np.errstate(over="ignore"):  # what a model forbids may be the lowest number that there is
        np.subtract(logits, np.float32(top), out=weights)
        np.multiply(weights, np.float32(1.0 / temperature), out=weights)
    np.exp(weights, out=weights)
    blocks = np.einsum("ij->i", room.reshape(-1, BLOCK)).astype(np.float64)
    return WeighedRow(top, temperature, blocks, float(blocks.sum()), logits)


def _token_by_id(row: WeighedRow, logits: NDArray[np.float32], uniform: float) -> int | None:
    """Go through the tokens by id until they hold `uniform` of all weight."""
    if (block := row.block_at(uniform)) is None:
        return None
    return row.token_in(block, logits[BLOCK * block : BLOCK * (block + 1)], uniform)


def _token_of_nucleus(row: WeighedRow, logits: NDArray[np.float32], top_p: float, uniform: float) -> int | None:
    """Draw from the nucleus, which is looked for among ever more tokens."""
    for count in (*NEAR, len(logits)):
        tokens = np.flatnonzero(logits >= row.floor(top_p, count))
        if row.holds(logits[tokens], top_p):
            break
    return row.token_of_nucleus(tokens, logits[tokens], top_p, uniform)


def best_first(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """The stable order of `logits`, the largest first: each as a whole number, complemented, above its place, for NumPy
    sorts whole numbers by vector instructions, and nothing stably by them.
    """
    bits = (logits + np.float32(0.0)).view(np.int32)  # -0.0 is 0.0
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (~ascending).astype(np.int64) << 32 | np.arange(len(logits))
    keys.sort()
    return keys & 0xFFFFFFFF


def choose_step(choices: Sequence[RowChoice], rows: Sequence[int], logits: StepLogits) -> list[int | Exception]:
    """Choose the next token of each of the `rows` of a step, as `choose_all` does; a choice without
    logits takes as much of `logits` as it needs.
    """
    uniforms = [draw_uniform(choice) for choice in choices]
    chosen: list[int | Exception | None] = [None] * len(choices)
    if logits.summaries:
        partial = [index for index, choice in enumerate(choices) if choice.logits is None]
        wanted = [(rows[index], choices[index].sampling, uniforms[index]) for index in partial]
        for index, decided in zip(partial, _summarized(wanted, logits.summaries), strict=True):
            chosen[index] = decided
    left = [index for index, token in enumerate(chosen) if token is None]
    unread = [index for index in left if choices[index].logits is None]
    values = dict(zip(unread, logits.rows([rows[index] for index in unread]), strict=True))
    complete = [replace(choices[index], logits=values.get(index, choices[index].logits)) for index in left]
    for index, token in zip(left, choose_drawn(complete, [uniforms[index] for index in left]), strict=True):
        chosen[index] = token
    return [token for token in chosen if token is not None]


def best_tokens(logits: StepLogits, count: int) -> NDArray[np.int64]:
    """Return the best token of each of the first `count` rows of a step. Raises FloatingPointError as
    `choose`.
    """
    chosen = choose_step([RowChoice(None, Sampling(), {}, None)] * count, range(count), logits)
    for token in chosen:
        if isinstance(token, Exception):
            raise token
    return np.array(chosen)


def _summarized(wanted: Sequence[tuple[int, Sampling, float]], summaries: Summaries) -> list[int | None]:
    """Choose a token for each of the rows `wanted`, under its sampling and with its uniform number; None where the
    summaries do not decide.
    """
    if not any(summarizable(sampling) for _, sampling, _ in wanted):
        return [None] * len(wanted)
    count = summaries.count
    temperatures = np.ones(count, np.float32)
    for row, sampling, _ in wanted:
        if sampling.temperature and summarizable(sampling):
            temperatures[row] = sampling.temperature
    summary = summaries.summary(temperatures)
    chosen: list[int | None] = [None] * len(wanted)
    asking: dict[int, Asking] = {}
    for index, (row, sampling, uniform) in enumerate(wanted):
        blocks = Summary(*(values[row] for values in summary))
        if sampling.temperature == 0.0:
            chosen[index] = _best(blocks)
        elif summarizable(sampling):
            asking[index] = _drawn(blocks, sampling, uniform, summaries.most_blocks // count)
    answers: dict[int, NDArray[np.float32] | None] = dict.fromkeys(asking)
    while answers:
        asked: dict[int, NDArray[np.int64]] = {}
        for index, answer in answers.items():
            try:
                asked[index] = next(asking[index]) if answer is None else asking[index].send(answer)
            except StopIteration as end:
                chosen[index] = end.value
        answers = _asked([wanted[index][0] for index in asked], asked, summaries)
    return chosen


def summarizable(sampling: Sampling) -> bool:
    """Tell whether summaries may decide: for the best token, and at temperatures for which their bounds hold."""
    return sampling.temperature == 0.0 or TEMPERATURES[0] <= sampling.temperature <= TEMPERATURES[1]


def _asked(
    rows: Sequence[int], blocks: dict[int, NDArray[np.int64]], summaries: Summaries
) -> dict[int, NDArray[np.float32] | None]:
    """The logits of the blocks that each choice asks for, of its row."""
    if not blocks:
        return {}
    counts = [len(numbers) for numbers in blocks.values()]
    pairs = np.stack([np.repeat(rows, counts), np.concatenate([*blocks.values()])], 1).astype(np.int32)
    parts = np.split(summaries.blocks(pairs), np.cumsum(counts)[:-1])
    return dict(zip(blocks, parts, strict=True))


def _best(blocks: Summary) -> int | None:
    """The best token of a row, the first of equals; None where a logit is no number, or the best is infinite."""
    block = int(blocks.maxima.argmax())
    if not np.isfinite(blocks.maxima[block]) or np.isnan(blocks.sums).any():
        return None
    return BLOCK * block + int(blocks.places[block])


def _drawn(blocks: Summary, sampling: Sampling, uniform: float, most: int) -> Asking:
    """Draw the token of a row, from the logits of at most so many of its blocks at once."""
    if (row := weigh_blocks(blocks.maxima, blocks.sums, sampling.temperature)) is None:
        return None
    if sampling.top_p >= 1.0:
        if (block := row.block_at(uniform)) is None:
            return None
        logits = yield np.array([block])
        return row.token_in(block, logits[0], uniform)
    sent = np.zeros(0, np.int64)
    logits = np.zeros((0, BLOCK), np.float32)
    for count in (*NEAR_SENT, BLOCK * len(blocks.maxima)):
        floor = row.floor(sampling.top_p, count)
        near = np.flatnonzero(blocks.maxima >= floor)
        if count < BLOCK * len(blocks.maxima) and not row.may_hold(near, sampling.top_p):
            continue
        if len(near) > most:
            return None
        if len(unsent := np.setdiff1d(near, sent)):
            further = yield unsent
            order = np.concatenate([sent, unsent]).argsort()
            sent = near
            logits = np.concatenate([logits, further])[order]
        at, places = np.nonzero(logits >= floor)
        tokens = BLOCK * near[at] + places
        likely = logits[at, places]
        if row.holds(likely, sampling.top_p):
            return row.token_of_nucleus(tokens, likely, sampling.top_p, uniform)
    return None
