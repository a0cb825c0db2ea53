"""Measure several models in turns, so that the machine's other load affects all alike.

All of them are in memory together. Before the rounds of a size each gives one untimed answer; then each round times one
answer of each, and the order rotates.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..loop.sessions import Session
from .meter import MemoryTaken
from .timing import BatchTiming, Clock, time_batch


@dataclass(frozen=True)
class Contender:
    """A model that is measured: its name, its session, and what it holds of memory."""

    name: str
    session: Session
    held: MemoryTaken


@dataclass
class Answers:
    """A contender's answers to one size, one a round; the memory that it held with them, and the energy that they took,
    None where there is no counter.
    """

    memory_bytes: int
    timings: list[BatchTiming] = field(default_factory=list)
    joules: float | None = 0.0


def time_contenders(
    contenders: Sequence[Contender],
    size: tuple[int, int, int],
    rounds: int,
    advance: Callable[[int], None] = lambda done: None,
    clock: Clock = time.perf_counter,
) -> list[Answers]:
    """Time the answers of each of `contenders`, models of one vocabulary, for `size`: rows, tokens of each prompt,
    tokens of each answer. `advance` is called with each number of answers given.
    """
    rows, length, tokens = size
    vocabulary = min(contender.session.vocabulary for contender in contenders)
    prompts = np.random.default_rng(0).integers(0, vocabulary, (rows, length))
    batches, answers_by_contender = [], []
    for contender in contenders:
        with contender.held.counting():
            batches.append(contender.session.open_batch(rows, length + tokens))
            time_batch(batches[-1], contender.session.pace, prompts, tokens, clock)
        answers_by_contender.append(Answers(contender.held.bytes))
        advance(1)
    for number in range(rounds):
        for turn in range(len(contenders)):
            index = (number + turn) % len(contenders)
            contender, answers = contenders[index], answers_by_contender[index]
            before = contender.held.meter.joules()
            answers.timings.append(time_batch(batches[index], contender.session.pace, prompts, tokens, clock))
            after = contender.held.meter.joules()
            spent = None if before is None or after is None else after - before
            answers.joules = None if answers.joules is None or spent is None else answers.joules + spent
            advance(1)
    for contender, batch in zip(contenders, batches, strict=True):
        with contender.held.counting():
            batch.clear()
    return answers_by_contender
