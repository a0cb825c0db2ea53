"""Compute logits of windows by an engine on a GPU.

An engine takes as many rows as its profiles allow, and a prompt in chunks over its cache, as it is served; so a window
is read so too: `Pace.chunk` tokens a call through the profile of prompts, each call over the keys and values that those
before it left. The logits of every position come back.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from ...core.errors import BackendError
from ...serve.loop.engine_session import EngineSession
from .as_served import served, session_start
from .compare import Forward


def engine_logits(session: EngineSession, prompt: int | None = None) -> Forward:
    """Return the function that computes logits by an engine; `prompt`: the tokens that are read in one call before the
    others are read one by one (None: whole windows, in chunks).

    It raises BackendError for windows that are longer than the engine has slots, which are whole steps of memory.
    """
    forward = whole_windows(session) if prompt is None else served(session_start(session), prompt)

    def within(ids: npt.NDArray[np.int64]) -> torch.Tensor:
        if session.most_positions is not None and ids.shape[1] > session.most_positions:
            raise BackendError(
                f"a window of {ids.shape[1]} tokens is longer than the engine's {session.most_positions} slots; give "
                f"--context {session.most_positions}"
            )
        return forward(ids)

    return in_groups(within, session.most_rows)


def whole_windows(session: EngineSession) -> Forward:
    """Logits of all positions of windows, float tensor [windows, context, vocabulary]."""

    def forward(ids: npt.NDArray[np.int64]) -> torch.Tensor:
        windows, context = ids.shape
        batch, filled, found = session.open_batch(windows, context), np.zeros(windows, np.int64), []
        try:
            batch.reserve(context, context, windows)
            for start in range(0, context, session.pace.chunk):
                tokens = np.ascontiguousarray(ids[:, start : start + session.pace.chunk])
                found.append(torch.from_numpy(batch.prefill_all(tokens, filled)))
                filled += tokens.shape[1]
        finally:
            batch.clear()
        return torch.cat(found, dim=1)

    return forward


def in_groups(forward: Callable[[npt.NDArray[np.int64]], torch.Tensor], most: int | None) -> Forward:
    """Run `forward` over at most so many windows at a time."""

    def grouped(ids: npt.NDArray[np.int64]) -> torch.Tensor:
        size = most or len(ids)
        return torch.cat([forward(ids[start : start + size]) for start in range(0, len(ids), size)])

    return grouped
