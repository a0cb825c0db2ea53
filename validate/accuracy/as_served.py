"""Compute logits as a server does: a prompt in one call, then one token at a time over the runtime's own cache.

A forward pass over a whole window reads every token by the same kernels and forms. A server reads the prompt in one
call and each generated token in another, over its cache; with a form that depends on the phase this is another model.
The text is given, not generated: every decoded token is the text's own.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from ...calibrate.model import caches
from ...calibrate.text.evaluation import Evaluation
from ...core.errors import BackendError
from ...serve.loop.sessions import Session
from .document import DistanceBucket

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedModel

#: Logits of a torch model, or of a session, which needs no torch.
Rows = TypeVar("Rows", npt.NDArray[np.float32], "torch.Tensor")
#: The number of parts that decoded tokens are summarized in.
QUARTERS = 4
#: Reads the next tokens int64 [windows, seq] of each window; returns the logits behind the last one, float [windows,
#: vocabulary].
Step = Callable[[npt.NDArray[np.int64]], Rows]
#: Begins windows with an empty cache: number of windows, tokens of each -> step.
Start = Callable[[int, int], Step[Rows]]


def served(start: Start[Rows], prompt: int) -> Callable[[npt.NDArray[np.int64]], Rows]:
    """Return the function that computes logits of windows, whose first `prompt` tokens are read in one call and the
    others one by one.

    They are those of the prompt's last position and of all behind it but the window's last, after which nothing is
    scored: float [windows, context - prompt, vocabulary].
    """

    def forward(ids: npt.NDArray[np.int64]) -> Rows:
        windows, context = ids.shape
        step = start(windows, context)
        first = step(ids[:, :prompt])
        logits = zeros(first, (windows, context - prompt, first.shape[-1]))
        logits[:, 0] = first
        for position in range(prompt, context - 1):
            logits[:, position - prompt + 1] = step(ids[:, position : position + 1])
        return logits

    return forward


def zeros(like: Rows, shape: tuple[int, ...]) -> Rows:
    """Zeros of a shape, of the kind and type of other logits."""
    if isinstance(like, np.ndarray):
        return np.zeros(shape, like.dtype)
    return like.new_zeros(shape)


def by_distance(
    evaluation: Evaluation, nll: npt.NDArray[np.float32], kl: npt.NDArray[np.float32] | None
) -> list[DistanceBucket] | None:
    """Average the loss, and KL from the baseline, over each quarter of the tokens after the prompt; None for whole
    windows.

    `nll` and `kl` float32 [windows, context], in nats; NaN where not scored.
    """
    prompt = evaluation.protocol.prompt
    if prompt is None:
        return None
    buckets = []
    for part in np.array_split(np.arange(prompt, evaluation.ids.shape[1]), QUARTERS):
        if not part.size or not (scored := evaluation.scored[:, part]).any():
            continue
        loss = nll[:, part][scored]
        divergence = None if kl is None else kl[:, part][scored]
        buckets.append(
            DistanceBucket(
                first=int(part[0]) - prompt + 1,
                last=int(part[-1]) - prompt + 1,
                tokens=int(scored.sum()),
                nll_nats=float(np.mean(loss, dtype=np.float64)),
                kl_mean_nats=None if divergence is None else float(np.mean(divergence, dtype=np.float64)),
            )
        )
    return buckets


def torch_start(
    model: "PreTrainedModel", new_cache: "Callable[[], DynamicCache] | None" = None
) -> "Start[torch.Tensor]":
    """Begin windows on a torch model, with an empty cache of the type that it is served with (None: its own)."""
    import torch

    def start(windows: int, context: int) -> Step[torch.Tensor]:
        cache = new_cache() if new_cache else caches.new_cache(model)

        def step(ids: npt.NDArray[np.int64]) -> torch.Tensor:
            tokens = torch.from_numpy(np.ascontiguousarray(ids)).to(model.device)
            logits: torch.Tensor = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
            return logits[:, -1]

        return step

    return start


def session_start(session: Session) -> Start[npt.NDArray[np.float32]]:
    """Begin windows on a graph's or an engine's session, in a batch of its own, which gives its memory back when all
    but a window's last token are read, or a step fails.

    A step raises BackendError where the runtime fails.
    """

    def start(windows: int, context: int) -> Step[npt.NDArray[np.float32]]:
        batch = session.open_batch(windows, context)
        batch.reserve(context, context, windows)
        filled = np.zeros(windows, np.int64)

        def step(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
            tokens = np.ascontiguousarray(ids)
            try:
                if filled.any():
                    last_logits = np.stack(batch.decode(tokens[:, 0], filled).rows(range(windows)))
                else:
                    last_logits = batch.prefill(0, tokens, filled, np.full(windows, tokens.shape[1])).copy()
            except Exception as error:  # its exceptions have no common class of their own
                batch.clear()
                raise BackendError("", f"{type(error).__name__}: {error}") from error
            filled[:] += tokens.shape[1]
            if filled[0] == context - 1:
                batch.clear()
            return last_logits

        return step

    return start
