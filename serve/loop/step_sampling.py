"""The next tokens of a step whose logits may be on a device: those that `sampling.choose` takes, from a part of them.

32 rows of 128,256 logits are 8 MB in BF16, which to download and to widen takes longer than many a decode step. A
device summarizes them instead, in blocks of 64 (`step_logits.Summary`): 24 kB a row. The best token follows from the
summary. A token that is drawn needs the logits of few blocks besides: that at which the sum of all weights passes the
drawn number, or, of a nucleus, those whose largest logit may belong to it. Their logits are then asked for, of all rows
together. Everything is decided within the bounds of `batch_sampling`; a row that they do not decide has all its logits
sent, and so has one with penalties or log-probabilities.

Copied as it is into Triton repositories: imports only NumPy and its neighbours in this folder.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from .batch_sampling import BLOCK, TEMPERATURES, RowChoice, choose_drawn, draw_uniform, weigh_blocks
from .sampling import Sampling
from .step_logits import StepLogits, Summaries, Summary

#: The nucleus is looked for as in `batch_sampling.NEAR`, but in smaller steps: each block is sent.
NEAR = tuple(4**power for power in range(2, 9))
#: The choice of a row: it asks for the logits of blocks, and returns a token, or None if they do not decide.
Asking = Generator[NDArray[np.int64], NDArray[np.float32], int | None]


def choose_step(choices: Sequence[RowChoice], rows: Sequence[int], logits: StepLogits) -> list[int | Exception]:
    """Choose the next token of each of the `rows` of a step, as `batch_sampling.choose_all` does; a choice without
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
    `sampling.choose`.
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
    sent, logits = np.zeros(0, np.int64), np.zeros((0, BLOCK), np.float32)
    for count in (*NEAR, BLOCK * len(blocks.maxima)):
        floor = row.floor(sampling.top_p, count)
        near = np.flatnonzero(blocks.maxima >= floor)
        if count < BLOCK * len(blocks.maxima) and not row.may_hold(near, sampling.top_p):
            continue
        if len(near) > most:
            return None
        if len(unsent := np.setdiff1d(near, sent)):
            further = yield unsent
            order = np.concatenate([sent, unsent]).argsort()
            sent, logits = near, np.concatenate([logits, further])[order]
        at, places = np.nonzero(logits >= floor)
        tokens, likely = BLOCK * near[at] + places, logits[at, places]
        if row.holds(likely, sampling.top_p):
            return row.token_of_nucleus(tokens, likely, sampling.top_p, uniform)
    return None
