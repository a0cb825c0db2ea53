"""Choose the prompts that a server is sent: the beginnings of windows of the evaluation text, and nothing else.

Without a tail, what a model computes does not depend on the phase, and a window is one prompt whose every position
counts. With one the prompt's last T positions have second terms and those before them do not. The kept positions of
such a run follow a prompt of P tokens and were decoded one by one; a prompt that ends m tokens behind P has the same
form at all of these, and before them but for m positions of the cache, which lie T - m or more tokens back. With m = T
/ 2 half a tail of positions is compared in one request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...calibrate.text.evaluation import Protocol
from ...core.errors import InputError
from ..accuracy.top_logits import MOST_TOKENS, TopTokens

#: The remedy where the run has as many positions as it keeps at most.
NOTHING_MORE = (
    "the run keeps no more positions: validate with more runtimes, fp32 beside bf16 and an engine or ONNX Runtime"
)


@dataclass(frozen=True)
class Prompt:
    """The tokens `ids` of the window of that index, up to the last of `positions`, that one included.

    `positions` int64 [n] in `ids`, each scored by the logits before it; `rows` int64 [n]: their rows in `TopTokens`.
    """

    window: int
    ids: tuple[int, ...]
    positions: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]


def prompts_of(tops: TopTokens, tail: int | None, windows: int | None, longest: int | None) -> list[Prompt]:
    """The prompts for a run whose shortest tail is `tail` (None: it has none), of at most so many `windows`.

    `longest`: the most tokens of a prompt that the server takes (None: unknown). Raises InputError where no position
    lies within.
    """
    numbers = np.zeros(tops.positions.shape, np.int64)
    numbers[tops.positions] = np.arange(int(tops.positions.sum()))
    prompts: list[Prompt] = []
    least = tops.ids.shape[1]
    for window in evenly(range(len(tops.ids)), windows):
        positions = np.flatnonzero(tops.positions[window])
        least = min(least, int(positions[0]))
        if tail is not None:
            positions = positions[positions < positions[0] + max(1, tail // 2)]
        if longest is not None:
            positions = positions[positions < longest]
        if len(positions):
            ids = tuple(tops.ids[window, : positions[-1] + 1].tolist())
            prompts.append(Prompt(window, ids, positions, numbers[window, positions]))
    if not prompts:
        raise InputError(
            "",
            f"the server takes {longest:,} tokens of a prompt, and the run's positions begin behind {least:,}",
            "give the server a longer context, or validate with a shorter one: `fp8q validate RUN --context N`",
        )
    return prompts


def compared_positions(prompts: Sequence[Prompt], tail: int | None, answered: int) -> str:
    """Say which positions of the `prompts` of a run are compared, and why no others; `answered`: so many were."""
    most = max(len(prompt.positions) for prompt in prompts)
    positions = sum(len(prompt.positions) for prompt in prompts)
    which = "the last of each" if most == 1 else f"the last {most:,} of each"
    few = "" if answered >= positions else f"; {answered:,} of these {positions:,}, since each takes a request"
    if tail is None:
        return f"{which}, of which the run keeps the likeliest tokens{few}"
    return (
        f"{which}, half of the run's tail of {tail:,}: a server that reads a prompt computes those before in another "
        f"form than they were validated in{few}"
    )


def more_positions(protocol: Protocol, tops: TopTokens, tail: int | None, run: str) -> str:
    """The remedy where all positions of `tops` do not tell two models apart: the `fp8q validate` that keeps more of
    them for the `run`, as it is called in commands.
    """
    compared = int(tops.positions.sum(axis=1).max())
    if tail is not None and protocol.prompt is not None:
        compared = min(compared, max(1, tail // 2))
    scored = protocol.context - (protocol.prompt or 0)
    evaluated = protocol.tokens // scored
    windows = (protocol.of_tokens or protocol.tokens) // scored
    there = min(windows, MOST_TOKENS // compared)
    if there <= len(tops.ids):
        if there < MOST_TOKENS // compared:
            return "validate on a longer text, by --data TEXT"
        return NOTHING_MORE
    words = [] if compared == scored or protocol.prompt is None else [f"--as-served {protocol.context - compared}"]
    if words or evaluated < there:
        words.append(f"--max-tokens {there * (compared if words else scored)}")
    return f"`fp8q validate {run} {' '.join(words)}` keeps positions of {there:,} windows for {len(tops.ids):,}"


def evenly(items: "Sequence[int] | range", count: int | None) -> list[int]:
    """At most `count` of `items`, evenly spaced, in their order."""
    if count is None or count >= len(items):
        return list(items)
    return [items[index] for index in np.unique(np.linspace(0, len(items) - 1, count).astype(np.int64))]
