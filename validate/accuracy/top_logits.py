"""`top_logits.npz`: the likeliest tokens of each runtime at some positions of the evaluation text, by log-probability.

Whoever runs the model elsewhere (a server, an engine on a host without torch) is held against these: NumPy alone reads
them, and the tokens that were read are there too. At each position a runtime has its `TOP` likeliest tokens, their
log-probabilities, and the logarithm of the probability that all other tokens have together. A token of a small
probability is left out, but its mass is not: a KL over these tokens and one rest is a sum over a coarser partition, and
so never more than the KL over the whole vocabulary.

Kept are at most `MOST_TOKENS` scored tokens: up to `MOST_OF_WINDOW` of a window, of windows that are evenly spaced.
Of a whole window these are the last, which have most behind them; of one that is decoded behind a prompt the first,
since a server that is sent a prompt which ends there computes the same. A runtime takes 1 MB of the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...core.errors import InputError
from ...core.files import reading, replacing
from ...core.run import Run
from .document import load_token_losses, of_adapter

if TYPE_CHECKING:
    import torch

    from .perplexity import Evaluation

#: Tokens of a position, and positions of all windows and of one.
TOP, MOST_TOKENS, MOST_OF_WINDOW = 32, 4096, 256
#: The arrays of the text in the file; those of a runtime are called `<runtime>.<field>`.
TEXT = ("windows", "ids", "kept")
FIELDS = ("tokens", "logprobs", "rest")
AGAIN = "restore it, or run `fp8q validate` again"


@dataclass(frozen=True)
class TopLogits:
    """The likeliest tokens at some positions: `tokens` int32 [positions, top], the likeliest first, `logprobs` float32
    of the same shape, in nats, and `rest` float32 [positions], the log of the probability of all others.
    """

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    rest: npt.NDArray[np.float32]

    def at(self, rows: "npt.NDArray[np.int64] | slice") -> "TopLogits":
        """Those at some of the positions."""
        return TopLogits(self.tokens[rows], self.logprobs[rows], self.rest[rows])


@dataclass(frozen=True)
class KeptTokens:
    """The contents of `top_logits.npz`: `windows` int64 [n] of the evaluation, their `ids` int64 [n, context], and the
    positions `kept` bool [n, context], each scored by the logits before it. `runtimes`: a row for each of these, in
    the order of windows; `nll` float32 [positions], the loss of the token itself in nats.
    """

    windows: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    kept: npt.NDArray[np.bool_]
    runtimes: Mapping[str, TopLogits]
    nll: Mapping[str, npt.NDArray[np.float32]]


def positions_to_keep(evaluation: "Evaluation") -> npt.NDArray[np.bool_]:
    """The positions of `evaluation` whose likeliest tokens are kept: bool [windows, context]."""
    scored = evaluation.scored
    count = max(1, min(len(scored), MOST_TOKENS // max(1, min(MOST_OF_WINDOW, int(scored.sum(axis=1).max())))))
    kept = np.zeros_like(scored)
    for window in np.unique(np.linspace(0, len(scored) - 1, count).astype(np.int64)):
        positions = np.flatnonzero(scored[window])
        whole = evaluation.protocol.prompt is None
        kept[window, positions[-MOST_OF_WINDOW:] if whole else positions[:MOST_OF_WINDOW]] = True
    return kept


def top_of(logits: "torch.Tensor") -> TopLogits:
    """The likeliest tokens of `logits` [positions, vocabulary]."""
    import torch

    count = min(TOP, logits.shape[-1])
    logprobs = torch.log_softmax(logits.float(), dim=-1)
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
    """The positions of all `parts`."""
    return TopLogits(*(np.concatenate([getattr(part, field) for part in parts]) for field in FIELDS))


def write_top(path: Path, top: TopLogits) -> None:
    """Write one runtime's likeliest tokens to a file of their own, for a call that goes on."""
    with replacing(path) as partial, open(partial, "wb") as handle:
        np.savez(handle, allow_pickle=False, **{field: getattr(top, field) for field in FIELDS})


def read_top(path: Path) -> TopLogits:
    """Read what `write_top` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        return TopLogits(*(arrays[field] for field in FIELDS))


def save_top_logits(run: Run, evaluation: "Evaluation", found: Mapping[str, TopLogits]) -> Path:
    """Write `top_logits.npz` of the runtimes `found`, whose positions are `positions_to_keep(evaluation)`."""
    kept = positions_to_keep(evaluation)
    windows = np.flatnonzero(kept.any(axis=1))
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "windows": windows, "ids": evaluation.ids[windows].astype(np.int32), "kept": kept[windows],
    }  # fmt: skip
    with replacing(run.top_logits) as partial, open(partial, "wb") as handle:
        np.savez(handle, allow_pickle=False, **arrays, **arrays_of(found))
    return run.top_logits


def arrays_of(found: Mapping[str, TopLogits]) -> dict[str, npt.NDArray[Any]]:
    """The arrays of runtimes in `top_logits.npz`."""
    return {f"{name}.{field}": getattr(top, field) for name, top in found.items() for field in FIELDS}


def load_top_arrays(run: Run) -> dict[str, npt.NDArray[Any]]:
    """Read all arrays of `top_logits.npz`, by their names in the file; raises InputError as `load_top_logits` does."""
    path = run.require(run.top_logits, "validate")
    with (
        reading(path, "likeliest tokens", AGAIN),
        open(path, "rb") as handle,
        np.load(handle, allow_pickle=False) as arrays,
    ):
        return {name: arrays[name] for name in arrays.files}


def load_top_logits(run: Run, adapter: str | None = None) -> KeptTokens:
    """Read `top_logits.npz`, and the losses of its tokens from `tokens.npz`; those with that adapter on.

    Raises InputError where they are missing, as in runs of older versions, or malformed.
    """
    held, path = load_top_arrays(run), run.top_logits
    names = of_adapter([name.removesuffix(".tokens") for name in held if name.endswith(".tokens")], adapter)
    losses = load_token_losses(run, adapter)
    try:
        windows, ids, kept = (held[name] for name in TEXT)
        runtimes = {name: TopLogits(*(held[f"{own}.{field}"] for field in FIELDS)) for name, own in names.items()}
        nll = {name: losses[name][windows][kept] for name in names}
        sizes = {len(each.rest) for each in runtimes.values()}
    except (KeyError, IndexError, ValueError) as error:
        raise InputError(f"{path}: lacks a part ({type(error).__name__}: {error}); {AGAIN}") from None
    if not names or sizes != {int(kept.sum())}:
        raise InputError(f"{path}: has {sizes or 'no'} rows of likeliest tokens for {int(kept.sum())}; {AGAIN}")
    return KeptTokens(windows.astype(np.int64), ids.astype(np.int64), kept, runtimes, nll)
