"""Perplexity with its protocol: which windows are cut from the tokens, and which of their tokens are scored.

Window i holds the tokens from i·stride on, `context` of them, and is run alone. Each token is scored once, in the first
window that holds it; the first token of the text has no past and is not scored; with stride = context neither has the
first of each window. A tail shorter than a window is left out. Smaller strides give each token more context and cost
more (Hugging Face, "Perplexity of fixed-length models").
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from .accuracy import Protocol


@dataclass(frozen=True)
class Evaluation:
    """`ids` int64 [windows, context], `scored` bool of the same shape: position t is scored by the logits at t - 1."""

    ids: npt.NDArray[np.int64]
    scored: npt.NDArray[np.bool_]
    protocol: Protocol


def cut(ids: npt.NDArray[np.int64], dataset: str, context: int, stride: int) -> Evaluation:
    """Cut tokens `ids` int64 [tokens] into windows.

    Raises InputError when the stride is not in [1, context] or the text is shorter than one window.
    """
    if not 1 <= stride <= context:
        raise InputError(f"--stride {stride}: must lie between 1 and the context, {context}")
    if context < 2:
        raise InputError(f"--context {context}: a window needs at least 2 tokens, one to read and one to score")
    if len(ids) < context:
        raise InputError(
            f"{dataset}: has {len(ids):,} tokens, less than one window of {context:,}; give more text or a smaller "
            "--context"
        )
    starts = np.arange(0, len(ids) - context + 1, stride)
    scored = np.zeros((len(starts), context), np.bool_)
    scored[0, 1:] = True
    scored[1:, max(context - stride, 1) :] = True
    protocol = Protocol(
        dataset=dataset,
        sha256=hashlib.sha256(np.ascontiguousarray(ids, dtype="<i8").tobytes()).hexdigest(),
        tokens=int(scored.sum()),
        context=context,
        stride=stride,
    )
    return Evaluation(ids[starts[:, None] + np.arange(context)], scored, protocol)
