"""The log-probabilities that a server or checkpoint answered, by their rows in `top_logits.npz`."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.arrays import check_array, read_arrays
from ...core.files import reading, replacing

#: The id of an unknown token. Several at one position have this number and those below it.
NO_TOKEN = -1


@dataclass(frozen=True)
class LikelyTokens:
    """Likeliest tokens at `rows` int64 [n]: `tokens` int64 [n, k], the likeliest first, `NO_TOKEN` or less where there
    are fewer or a text is no token that the run knows there; `logprobs` float64 [n, k] in nats, NaN where unknown;
    `nll` float64 [n], the loss of the text's own token, NaN where that is not among the answers.

    `sent` and `counted`: tokens of all prompts, as they were sent and as the server counts them (0: it does not).
    """

    rows: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float64]
    nll: npt.NDArray[np.float64]
    sent: int
    counted: int

    @property
    def with_logprobs(self) -> bool:
        """Tell whether there are log-probabilities, and not likeliest tokens alone."""
        return bool(np.isfinite(self.logprobs).any())


@dataclass(frozen=True)
class Position:
    """One position's likeliest tokens with their log-probabilities, and the loss of the text's own token."""

    row: int
    best: Sequence[tuple[int, float]]
    nll: float


def answers_of(positions: Sequence[Position], sent: int, counted: int) -> LikelyTokens:
    """Collect `positions` into arrays."""
    width = max((len(position.best) for position in positions), default=1)
    tokens = np.full((len(positions), width), NO_TOKEN, np.int64)
    logprobs = np.full((len(positions), width), np.nan)
    for index, position in enumerate(positions):
        best = sorted(position.best, key=lambda pair: -pair[1])
        tokens[index, : len(best)] = [token for token, _ in best]
        logprobs[index, : len(best)] = [logprob for _, logprob in best]
    rows = np.array([position.row for position in positions], np.int64)
    nll = np.array([position.nll for position in positions])
    return LikelyTokens(rows, tokens, logprobs, nll, sent, counted)


def joined_answers(parts: Sequence[LikelyTokens]) -> LikelyTokens:
    """All rows of `parts`, in order."""
    width = max(part.tokens.shape[1] for part in parts)

    def padded(table: npt.NDArray[np.generic], fill: float) -> npt.NDArray[np.generic]:
        return np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=fill)

    return LikelyTokens(
        np.concatenate([part.rows for part in parts]),
        np.concatenate([padded(part.tokens, NO_TOKEN) for part in parts]).astype(np.int64),
        np.concatenate([padded(part.logprobs, np.nan) for part in parts]).astype(np.float64),
        np.concatenate([part.nll for part in parts]),
        sum(part.sent for part in parts),
        sum(part.counted for part in parts),
    )


def save_answers(path: Path, answers: LikelyTokens) -> None:
    """Write answers to a file, for a call that goes on."""
    with replacing(path) as partial, open(partial, "wb") as handle:
        np.savez(
            handle, allow_pickle=False, **{column.name: getattr(answers, column.name) for column in fields(answers)}
        )


def load_answers(path: Path) -> LikelyTokens:
    """Read what `save_answers` wrote."""
    with reading(path, "answers", remedy := "remove it, and ask again"):
        arrays = read_arrays(path, "answers", remedy)
        count = len(arrays["rows"])
        check_array("tokens", arrays["tokens"], "int64", (count, None))
        for name, dtype, shape in (
            ("rows", "int64", (count,)), ("logprobs", "float64", arrays["tokens"].shape), ("nll", "float64", (count,)),
            ("sent", "int64", ()), ("counted", "int64", ()),
        ):  # fmt: skip
            check_array(name, arrays[name], dtype, shape)
    numbers: dict[str, Any] = {name: int(arrays[name]) for name in ("sent", "counted")}
    return LikelyTokens(**arrays | numbers)
