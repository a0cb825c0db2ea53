"""Cut tokens into windows and choose the scored tokens: the protocol of perplexity.

A window has `context` tokens and runs alone: first the prefix that the tokenizer puts in front of a text (mostly one
BOS), then tokens of the text; the next window's begin `stride` tokens further on. Each token of the text is scored
once, in the first window that contains it, the very first token too, whose past is the prefix. The prefix itself is not
scored, in front or at the begin of a document inside a window: nobody has to predict it. A rest that is shorter than a
window is left out. Smaller strides give each token more context and cost more.

Without a prefix this is the plain recipe (Hugging Face, "Perplexity of fixed-length models"): the first token of the
text has no past and is not scored; with stride = context the first token of each window is not either.
"""

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ...core.errors import InputError
from ...core.files import Strict
from ...options import LEAST_WINDOWS, Bos
from .packing import Packing


class Protocol(Strict):
    """The protocol of cutting and scoring: windows of `context` tokens that begin with those of `prefix` and advance by
    `stride` through the text; each token of the text is scored once.

    Without a prefix the first token has no past, and is not scored. The defaults are those of files older than `--bos`.
    """

    dataset: str
    sha256: str = Field(description="of the token ids, int64 little-endian")
    tokens: int = Field(description="tokens scored")
    of_tokens: int | None = Field(
        default=None, description="tokens that all windows would score, where --max-tokens left windows out"
    )
    of_windows: int | None = Field(default=None, description="all windows, where --max-tokens left some out")
    context: int
    stride: int
    bos: Bos = "never"
    prefix: list[int] = Field(default=[], description="ids of the tokens that each window begins with")
    prompt: int | None = Field(
        default=None, description="tokens of a window that are read in one call; the scored ones are decoded one by one"
    )
    overlap: float | None = Field(
        default=None,
        description="share of this text that was calibrated on, or of what was that is in it, where that was allowed",
    )

    @property
    def description(self) -> str:
        """The protocol in words."""
        begins = ", each begun as the tokenizer begins a text" if self.prefix else ""
        shared = f"; {self.overlap:.1%} shared with the calibration text" if self.overlap else ""
        spaced = "" if self.of_tokens is None else ", evenly spaced"
        return (
            f"{self.scored}, each scored once, in windows of {self.context:,} tokens every {self.stride:,}{spaced}"
            f"{begins}{shared}"
        )

    @property
    def scored(self) -> str:
        """The number of tokens that are scored, of how many, and which these are: of a text that is decoded behind
        prompts, those behind them.
        """
        tokens = f"{self.tokens:,}" if self.of_tokens is None else f"{self.tokens:,} of the {self.of_tokens:,}"
        behind = "" if self.prompt is None else f" that are decoded behind prompts of {self.prompt:,}"
        return f"{tokens} tokens of {self.dataset}{behind}"


@dataclass(frozen=True)
class Evaluation:
    """`ids` int64 [windows, context], `scored` bool of the same shape: position t is scored by the logits at t - 1."""

    ids: npt.NDArray[np.int64]
    scored: npt.NDArray[np.bool_]
    protocol: Protocol


def prompt_of(positions: int) -> int:
    """The tokens of a window of so many `positions` that are read as a prompt: half of it. The others are scored, as
    tokens that a server decodes.
    """
    return max(1, positions // 2)


def cut(
    ids: npt.NDArray[np.int64], dataset: str, context: int, stride: int, prefix: tuple[int, ...] = (),
    prompt: int | None = None,
) -> Evaluation:  # fmt: skip
    """Cut tokens `ids` int64 [tokens] into windows that begin with `prefix`; tokens of a `prompt` are not scored.

    Raises InputError when a window has nothing to read, or nothing to score, when the stride is not within its text,
    or when the text is shorter than one window.
    """
    packing = Packing(context, prefix)
    if context < 2:
        raise InputError(f"--context {context}", "a window needs at least 2 tokens, one to read and one to score")
    packing.check("--context")
    if not 1 <= stride <= packing.text:
        most = (
            f"the context, {context}"
            if not prefix
            else (f"{packing.text}, the context {context} less the {len(prefix)} that each window begins with")
        )
        raise InputError(f"--stride {stride}", f"must lie between 1 and {most}")
    if prompt is not None and not prompt < context:
        raise InputError(
            f"--as-served {prompt}",
            f"leaves no token of a window of {context} to decode",
            "give less, or a larger --context",
        )
    starts = packing.starts(ids, stride)
    if not len(starts):
        raise InputError(
            dataset,
            f"has {len(ids):,} tokens, less than one window of {context:,}",
            "give more text or a smaller --context",
        )
    scored = _scored(packing, ids, starts)
    scored[:, : prompt or 0] = False
    protocol = Protocol(
        dataset=dataset,
        sha256=sha256_of(ids),
        tokens=int(scored.sum()),
        context=context,
        stride=stride,
        bos="auto" if prefix else "never",
        prefix=list(prefix),
        prompt=prompt,
    )
    return Evaluation(packing.windows(ids, starts), scored, protocol)


def sha256_of(ids: npt.NDArray[np.int64]) -> str:
    """SHA-256 of token ids, int64 little-endian."""
    return hashlib.sha256(np.ascontiguousarray(ids, dtype="<i8").tobytes()).hexdigest()


def evenly_spaced(evaluation: Evaluation, most: int) -> Evaluation:
    """Return evenly spaced windows of `evaluation` that score at most `most` tokens together, one window at least; all
    of them where they score no more.
    """
    counts = evaluation.scored.sum(axis=1)
    total = int(counts.sum())
    windows = len(counts)
    if total <= most:
        return evaluation
    number = max(1, windows * most // total)
    while counts[chosen := np.linspace(0, windows - 1, number).astype(np.int64)].sum() > most and number > 1:
        number -= 1
    scored = evaluation.scored[chosen]
    left_out = {"tokens": int(scored.sum()), "of_tokens": total, "of_windows": windows}
    protocol = evaluation.protocol.model_copy(update=left_out)
    return replace(evaluation, ids=evaluation.ids[chosen], scored=scored, protocol=protocol)


def most_tokens(protocol: Protocol, windows: int) -> int:
    """The least `most` by which `evenly_spaced` chooses so many `windows` again. Where windows score less than the
    average, as those in which documents begin, their tokens alone would choose fewer.
    """
    if protocol.of_tokens is None or protocol.of_windows is None:
        return protocol.tokens
    return max(protocol.tokens, -(-windows * protocol.of_tokens // protocol.of_windows))


def enough_tokens(protocol: Protocol, windows: int) -> int | None:
    """The `most` by which `evenly_spaced` chooses the windows that an interval needs, where `windows` are fewer and the
    text has them; None where it has not.
    """
    if protocol.of_tokens is None or protocol.of_tokens * windows < LEAST_WINDOWS * protocol.tokens:
        return None
    return -(-LEAST_WINDOWS * protocol.tokens // windows)


def _scored(packing: Packing, ids: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Mark the tokens of the windows whose text begins at `starts` are scored: bool [windows, context]."""
    of_prefix = np.zeros(len(ids), np.bool_)
    begins = np.flatnonzero(packing.beginnings(ids))
    for place in range(len(packing.prefix)):
        of_prefix[begins + place] = True
    places = starts[:, None] + np.arange(packing.text)
    seen = np.concatenate([[0], starts[:-1] + packing.text])
    scored = np.zeros((len(starts), packing.size), np.bool_)
    scored[:, len(packing.prefix) :] = (places >= seen[:, None]) & ~of_prefix[places]
    scored[:, 0] = False  # it has no past
    return scored


def first_not_finite(nll: npt.NDArray[np.float32], scored: npt.NDArray[np.bool_]) -> tuple[int, int] | None:
    """The first window, and the position in it, whose logits give no finite loss in `nll` though it was `scored`, both
    [windows, context]: the position before the token.
    """
    where = np.argwhere(scored & ~np.isfinite(nll))
    if len(where):
        return (int(where[0, 0]), int(where[0, 1]) - 1)
    return None
