"""`top_logits.npz`: the likeliest tokens of each runtime at some positions of the evaluation text, by log-probability.

A server, or an engine on a host without torch, is compared with these: NumPy alone reads them, and the file has the
tokens of the text too. At each position a runtime has its `TOP` likeliest tokens, their
log-probabilities, and the logarithm of the probability that all other tokens have together. A token of a small
probability is left out, but its mass is not: a KL over these tokens and one rest is a sum over a coarser partition, and
so never more than the KL over the whole vocabulary.

Kept are at most `MOST_TOKENS` scored tokens: up to `MOST_OF_WINDOW` of a window, of windows that are evenly spaced.
In a whole window these are the last, which have the longest context; in one that is decoded behind a prompt the first,
since a server that is sent a prompt which ends there computes the same. A runtime takes 1 MB of the file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...calibrate.measure.scoring import log_softmax
from ...core.arrays import check_array, check_range, read_arrays
from ...core.files import reading, replacing
from ...core.run import Run
from ...quantize.reading.run_checkpoint import vocabulary_size
from .document import load_accuracy, load_token_losses, of_adapter
from .log_probabilities import ROUNDING, check_logprobs

if TYPE_CHECKING:
    import torch

    from ...calibrate.text.evaluation import Evaluation

#: Tokens of a position, and positions of all windows and of one.
TOP = 32
MOST_TOKENS = 4096
MOST_OF_WINDOW = 256
#: The arrays of the text in the file; those of a runtime are called `<runtime>.<field>`.
TEXT = ("windows", "ids", "kept")
FIELDS = ("tokens", "logprobs", "rest")
AGAIN = "restore it, or run `fp8q validate` again"
#: The remedy for a file of a call that goes on.
UNFINISHED = "remove its directory, and run the same command again"
#: The largest id of a token in the files, whose ids are int32.
MOST_ID = 2**31 - 1


@dataclass(frozen=True)
class TopLogits:
    """The likeliest tokens at some positions: `tokens` int32 [positions, top], the likeliest first, `logprobs` float32
    of the same shape, in nats, and `rest` float32 [positions], the log of the probability of all others.
    """

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    rest: npt.NDArray[np.float32]

    def at(self, rows: "npt.NDArray[np.int64] | slice") -> "TopLogits":
        """Select the likeliest tokens at some of the positions."""
        return TopLogits(self.tokens[rows], self.logprobs[rows], self.rest[rows])


@dataclass(frozen=True)
class TopTokens:
    """The contents of `top_logits.npz`: `windows` int64 [n] of the evaluation, their `ids` int64 [n, context], and the
    `positions` bool [n, context], each scored by the logits before it. `runtimes`: a row for each of these, in
    the order of windows; `nll` float32 [positions], the loss of the token itself in nats. `vocabulary`: the tokens that
    the model has.
    """

    windows: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.bool_]
    runtimes: Mapping[str, TopLogits]
    nll: Mapping[str, npt.NDArray[np.float32]]
    vocabulary: int = MOST_ID + 1


def positions_to_keep(evaluation: "Evaluation") -> npt.NDArray[np.bool_]:
    """Choose the positions of `evaluation` whose likeliest tokens are stored: bool [windows, context]."""
    scored = evaluation.scored
    count = max(1, min(len(scored), MOST_TOKENS // max(1, min(MOST_OF_WINDOW, int(scored.sum(axis=1).max())))))
    mask = np.zeros_like(scored)
    for window in np.unique(np.linspace(0, len(scored) - 1, count).astype(np.int64)):
        positions = np.flatnonzero(scored[window])
        in_one_call = evaluation.protocol.prompt is None
        mask[window, positions[-MOST_OF_WINDOW:] if in_one_call else positions[:MOST_OF_WINDOW]] = True
    return mask


def top_of(logits: "torch.Tensor") -> TopLogits:
    """The likeliest tokens of `logits` [positions, vocabulary]."""
    import torch

    count = min(TOP, logits.shape[-1])
    logprobs = log_softmax(logits)
    best, tokens = logprobs.topk(count)
    rest = logprobs.scatter(1, tokens, -torch.inf).logsumexp(dim=-1)
    return TopLogits(tokens.int().cpu().numpy(), best.cpu().numpy(), rest.cpu().numpy())


def top_of_array(log_q: npt.NDArray[np.float32]) -> TopLogits:
    """The likeliest tokens of log-probabilities `log_q` float32 [positions, vocabulary], with NumPy alone."""
    count = min(TOP, log_q.shape[1])
    tokens = np.argpartition(-log_q, count - 1, axis=1)[:, :count]
    order = np.argsort(-np.take_along_axis(log_q, tokens, axis=1), axis=1, kind="stable")
    tokens = np.take_along_axis(tokens, order, axis=1)
    others = np.exp(log_q, dtype=np.float64)
    np.put_along_axis(others, tokens, 0.0, axis=1)
    with np.errstate(divide="ignore"):  # where all tokens are kept
        rest = np.log(others.sum(axis=1))
    return TopLogits(tokens.astype(np.int32), np.take_along_axis(log_q, tokens, axis=1), rest.astype(np.float32))


def joined_top(parts: "list[TopLogits]") -> TopLogits:
    """Concatenate the positions of all `parts`."""
    return TopLogits(*(np.concatenate([getattr(part, field) for part in parts]) for field in FIELDS))


def write_top(path: Path, top: TopLogits) -> None:
    """Write one runtime's likeliest tokens to a file, for a call that goes on."""
    with replacing(path) as partial, open(partial, "wb") as handle:
        np.savez(handle, allow_pickle=False, **{field: getattr(top, field) for field in FIELDS})


def read_top(path: Path) -> TopLogits:
    """Read what `write_top` wrote."""
    arrays = read_arrays(path, "likeliest tokens", UNFINISHED)
    with reading(path, "likeliest tokens", UNFINISHED):
        return TopLogits(*(arrays[field] for field in FIELDS))


def save_top_logits(run: Run, evaluation: "Evaluation", tops: Mapping[str, TopLogits]) -> Path:
    """Write `top_logits.npz` of the runtimes `tops`, whose positions are `positions_to_keep(evaluation)`."""
    mask = positions_to_keep(evaluation)
    windows = np.flatnonzero(mask.any(axis=1))
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "windows": windows, "ids": evaluation.ids[windows].astype(np.int32), "kept": mask[windows],
    }  # fmt: skip
    with replacing(run.top_logits) as partial, open(partial, "wb") as handle:
        np.savez(handle, allow_pickle=False, **arrays, **arrays_of(tops))
    return run.top_logits


def arrays_of(tops: Mapping[str, TopLogits]) -> dict[str, npt.NDArray[Any]]:
    """The arrays of runtimes in `top_logits.npz`."""
    return {f"{name}.{field}": getattr(top, field) for name, top in tops.items() for field in FIELDS}


def load_top_arrays(run: Run) -> dict[str, npt.NDArray[Any]]:
    """Read all arrays of `top_logits.npz`, by their names in the file; raises InputError as `load_top_logits` does."""
    return read_arrays(run.require(run.top_logits, "validate"), "likeliest tokens", AGAIN)


def load_top_logits(run: Run, adapter: str | None = None) -> TopTokens:
    """Read `top_logits.npz`, and the losses of its tokens from `tokens.npz`; those with that adapter on.

    A runtime whose losses `accuracy.json` calls not finite is left out: nothing has a distance from it. Raises
    InputError where the files are missing, as in runs of older versions, malformed, or hold what no model can give.
    """
    arrays = load_top_arrays(run)
    path = run.top_logits
    names = of_adapter([name.removesuffix(".tokens") for name in arrays if name.endswith(".tokens")], adapter)
    losses = load_token_losses(run, adapter)
    broken = load_accuracy(run).not_finite(adapter)
    names = {name: stored for name, stored in names.items() if name not in broken}
    vocabulary = vocabulary_size(run) or MOST_ID + 1
    with reading(path, "likeliest tokens", AGAIN):
        if not names:
            raise ValueError("it has no runtime whose losses are finite")
        windows, ids, mask = (arrays[name] for name in TEXT)
        shape = next(iter(losses.values())).shape
        _check_text((windows, ids, mask), shape, vocabulary)
        count = int(mask.sum())
        nll = {name: losses[name][windows][mask] for name in names}
        runtimes = {}
        for name, stored in names.items():
            runtimes[name] = TopLogits(*(arrays[f"{stored}.{field}"] for field in FIELDS))
            _check_top(stored, runtimes[name], count, vocabulary)
            if not np.isfinite(nll[name]).all():
                raise ValueError(f"{run.tokens.name} has no loss of {stored} at some of its positions")
    return TopTokens(windows.astype(np.int64), ids.astype(np.int64), mask, runtimes, nll, vocabulary)


def _check_text(text: Sequence[npt.NDArray[Any]], shape: tuple[int, ...], vocabulary: int) -> None:
    """Raise ValueError unless the `TEXT` of a file is of windows of losses of this `shape` [windows, context]."""
    windows, ids, mask = text
    check_array("windows", windows, "int64", (None,))
    check_range("windows", windows, 0, shape[0] - 1)
    if (np.diff(windows) <= 0).any():
        raise ValueError("windows are not in order")
    check_array("ids", ids, "int32", (len(windows), shape[1]))
    check_range("ids", ids, 0, vocabulary - 1)
    check_array("kept", mask, "bool", ids.shape)
    if not mask.any() or mask[:, 0].any():
        raise ValueError("kept has no position, or one with nothing before it")


def _check_top(name: str, top: TopLogits, count: int, vocabulary: int) -> None:
    """Raise ValueError for likeliest tokens that no model of `vocabulary` tokens has at `count` positions."""
    check_array(f"{name}.tokens", top.tokens, "int32", (count, None))
    check_array(f"{name}.logprobs", top.logprobs, "float32", top.tokens.shape)
    check_array(f"{name}.rest", top.rest, "float32", (count,))
    check_range(f"{name}.tokens", top.tokens, 0, vocabulary - 1)
    if not top.tokens.shape[1] or (np.diff(np.sort(top.tokens, axis=1), axis=1) == 0).any():
        raise ValueError(f"{name}.tokens has none at a position, or one twice")
    try:
        check_logprobs(top.logprobs, vocabulary, top.rest)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if (top.logprobs[:, 1:] > top.logprobs[:, :-1] + ROUNDING).any():
        raise ValueError(f"{name}.logprobs are not in order, the likeliest first")
