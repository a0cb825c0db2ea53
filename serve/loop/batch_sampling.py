"""The next tokens of all rows of a step, exactly those that `sampling.choose` takes, in a fraction of its time.

A softmax over 128,256 logits in FP64, and a sort for the nucleus, take 2 to 4 ms a row: longer than an engine's step.
Yet what is drawn hardly ever depends on their last digits. So weights are summed in FP32, whose error `SLACK` bounds;
only the few tokens that may hold `top_p` are looked at, in FP64; and the token is taken if it is the same for every
sum within the bound. If not, the sum is made in FP64, and if that does not decide either, `sampling.token_at` does all
of it. So a seed gives one text, alone and among others, on any processor.

    a weight e^-d has d = (top - logit) / temperature rounded three times, and is rounded by exp: 3 · 2^-24 · d + 2^-22,
    where d beyond ln(vocabulary) < 13 weighs next to nothing; the sum of a block of 64: 63 · 2^-24; in all below 2^-17

On a GPU (`device_kernels`) a block is weighed from its own largest logit, with an inverse temperature and a factor for
powers of two besides: six roundings of d, and 2^-22 of `ex2.approx`. Over a sum of 1 and 63 weights e^-d, d · e^-d adds
up to 2.4 at most: 6 · 2.4 · 2^-24 + 2^-22 + 63 · 2^-24, again below 2^-17.

Rows are shared among threads, which NumPy lets run together. Copied as it is into Triton repositories: imports only
NumPy and its neighbours in this folder.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from math import isfinite, log

import numpy as np
from numpy.typing import NDArray

from .sampling import Sampling, penalized, token_at

#: Weights of a block, which are summed first.
BLOCK = 64
#: Bounds of the relative error of sums of weights in FP32 (see above), and in FP64.
SLACK, FINE_SLACK = 2.0**-17, 2.0**-40
#: Temperatures, and magnitudes of the best logit, for which these bounds hold; other rows are chosen by themselves.
TEMPERATURES, LARGEST_TOP = (0.02, 50.0), 1e30
#: The nucleus is looked for among tokens so probable that so many of them would hold 1 - top_p; at last among those of
#: which the whole vocabulary would.
NEAR = (1 << 10, 1 << 13, 1 << 16)
#: Logits of a row that are worth this, and of all rows that are worth a thread; the most threads.
ROW_WORTH, THREAD_WORTH, MOST_THREADS = 1 << 12, 1 << 19, 8


@dataclass(frozen=True)
class RowChoice:
    """A row's logits [vocabulary], and all that its next token depends on; see `sampling.choose`. `logits` is None
    where the token may be chosen from a part of them (`step_sampling`).
    """

    logits: NDArray[np.float32] | None
    sampling: Sampling
    counts: Mapping[int, int]
    random: np.random.Generator | None


def choose_all(choices: Sequence[RowChoice]) -> list[int | Exception]:
    """Choose the next token of each row; return it, or the exception, as `sampling.choose` returns or raises."""
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
    return float(choice.random.random()) if choice.sampling.temperature and choice.random else 0.0


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
    """Choose the token that `sampling.token_at` would choose; None if that is not certain.

    `logits` [vocabulary], contiguous.
    """
    if not TEMPERATURES[0] <= sampling.temperature <= TEMPERATURES[1]:
        return None
    row = WeighedRow(logits, sampling.temperature)
    if not row.weighed:
        return None
    return row.token_by_id(uniform) if sampling.top_p >= 1.0 else row.likely_of_nucleus(sampling.top_p, uniform)


_rooms = threading.local()


def _room(size: int) -> NDArray[np.float32]:
    """A thread's memory for so many weights, whole blocks, zeros behind them."""
    room: NDArray[np.float32] | None = getattr(_rooms, "weights", None)
    if room is None or getattr(_rooms, "size", 0) != size:
        _rooms.size, room = size, np.zeros(-(-size // BLOCK) * BLOCK, np.float32)
        _rooms.weights = room
    return room


class WeighedBlocks:
    """The weights e^((logit - top) / temperature) of a row's tokens, of which the sums over blocks of neighbours are
    known, within `SLACK` of all weight. `top`: the best logit; `weighed`: whether the bounds hold for it, and all sums
    are numbers.
    """

    def __init__(self, maxima: NDArray[np.float32], sums: NDArray[np.float32], temperature: float):
        """Take the largest logit of each block, and the sums of weights relative to it, [blocks]."""
        self.top, self._temperature = float(maxima.max()), temperature
        self.weighed = abs(self.top) < LARGEST_TOP
        if self.weighed:
            relative = (maxima.astype(np.float64) - self.top) / temperature
            self._sum(sums.astype(np.float64) * np.exp(relative))

    def _sum(self, blocks: NDArray[np.float64]) -> None:
        self._blocks, self._total = blocks, float(blocks.sum())
        self.weighed = isfinite(self._total)

    def weights(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """The weights of some tokens in FP64, as `sampling` has them before they are divided by their sum."""
        weights: NDArray[np.float64] = np.exp((logits.astype(np.float64) - self.top) / self._temperature)
        return weights

    def _totals(self) -> Iterator[tuple[float, float]]:
        """The sum of all weights with the bound of its error; then again, closer, if that can be."""
        yield self._total, SLACK

    def block_at(self, uniform: float) -> int | None:
        """Go through the blocks until they hold `uniform` of all weight."""
        block = int(self._blocks.cumsum().searchsorted(uniform * self._total, side="right"))
        return block if block < len(self._blocks) else None

    def token_in(self, block: int, logits: NDArray[np.float32], uniform: float) -> int | None:
        """Go through the tokens of the block at `uniform`, whose `logits` these are, until they hold that."""
        target, error = uniform * self._total, 2 * SLACK * self._total
        begin = float(self._blocks[: block + 1].cumsum()[block] - self._blocks[block])
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
        share = min(1.0, (1.0 - top_p) * self._total / count)
        floor = self.top + self._temperature * log(share) if share else -np.inf
        return floor - 1e-5 * (1.0 + abs(floor))

    def may_hold(self, blocks: NDArray[np.int64], top_p: float) -> bool:
        """Tell whether some blocks hold more than `top_p` of all weight."""
        return bool(self._blocks[blocks].sum() > top_p * self._total)

    def holds(self, logits: NDArray[np.float32], top_p: float) -> bool:
        """Tell whether some tokens hold more than `top_p` of all weight."""
        return bool(self.weights(logits).sum() > top_p * self._total * (1.0 + SLACK))

    def token_of_nucleus(
        self, tokens: NDArray[np.int64], logits: NDArray[np.float32], top_p: float, uniform: float
    ) -> int | None:
        """Go through the fewest tokens that hold `top_p`, best first, until they hold `uniform` of their weight.

        `tokens`, by id: some that hold it, with their `logits`, and none that is worse than another is missing.
        """
        order = best_first(logits)
        tokens, logits = tokens[order], logits[order]
        weights = self.weights(logits)
        if ((logits[:-1] != logits[1:]) & (weights[:-1] - weights[1:] < FINE_SLACK * weights[:-1])).any():
            return None  # divided by their sum they may be equal, and then they are ordered by id
        cumulative = weights.cumsum()
        for total, slack in self._totals():
            last = cumulative.searchsorted([top_p * total * (1.0 - slack), top_p * total * (1.0 + slack)])
            if last[1] == len(cumulative):
                return None
            target = uniform * cumulative[last] * (1.0 - FINE_SLACK, 1.0 + FINE_SLACK)
            least, most = cumulative.searchsorted(target, side="right").tolist()
            if least == most <= last[0]:
                return int(tokens[least])
        return None


class WeighedRow(WeighedBlocks):
    """A row whose logits are all there: weights in FP32, summed by blocks."""

    def __init__(self, logits: NDArray[np.float32], temperature: float):
        """Weigh `logits` [vocabulary], if the bounds hold for the best of them, and it is a number."""
        self._logits, self._temperature = logits, temperature
        self.top = float(logits.max())
        self.weighed = abs(self.top) < LARGEST_TOP
        if not self.weighed:
            return
        room = _room(len(logits))
        weights = room[: len(logits)]
        with np.errstate(over="ignore"):  # what a model forbids may be the lowest number that there is
            np.subtract(logits, np.float32(self.top), out=weights)
            np.multiply(weights, np.float32(1.0 / temperature), out=weights)
        np.exp(weights, out=weights)
        self._sum(np.einsum("ij->i", room.reshape(-1, BLOCK)).astype(np.float64))

    def _totals(self) -> Iterator[tuple[float, float]]:
        """The sum in FP32, and in FP64."""
        yield from super()._totals()
        yield float(self.weights(self._logits).sum()), FINE_SLACK

    def token_by_id(self, uniform: float) -> int | None:
        """Go through the tokens by id until they hold `uniform` of all weight."""
        if (block := self.block_at(uniform)) is None:
            return None
        return self.token_in(block, self._logits[BLOCK * block : BLOCK * (block + 1)], uniform)

    def likely_of_nucleus(self, top_p: float, uniform: float) -> int | None:
        """Draw from the nucleus, which is looked for among ever more tokens."""
        for count in (*NEAR, len(self._logits)):
            tokens = np.flatnonzero(self._logits >= self.floor(top_p, count))
            if self.holds(self._logits[tokens], top_p):
                break
        return self.token_of_nucleus(tokens, self._logits[tokens], top_p, uniform)


def best_first(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """The stable order of `logits`, the largest first: each as a whole number, complemented, above its place, for NumPy
    sorts whole numbers by vector instructions, and nothing stably by them.
    """
    bits = (logits + np.float32(0.0)).view(np.int32)  # -0.0 is 0.0
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (~ascending).astype(np.int64) << 32 | np.arange(len(logits))
    keys.sort()
    return keys & 0xFFFFFFFF
