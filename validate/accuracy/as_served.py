"""Compute logits as a server does: a prompt in one call, then one token at a time over the runtime's own cache.

A forward pass over a whole window reads every token by the same kernels and forms. A server reads the prompt in one
call and each generated token in another, over its cache; with a form that depends on the phase this is another model.
The text is given, not generated: every decoded token is the text's own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from ...calibrate.model import caches
from ...calibrate.text.evaluation import Evaluation
from ...core.errors import BackendError
from ...core.memory import release_memory
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


@dataclass(frozen=True)
class LogitsPart:
    """Logits of some `windows` of a batch from position `first` on, float [windows, positions, vocabulary]."""

    logits: Any
    windows: slice
    first: int = 0


#: Computes the logits of a batch of windows int64 [windows, context], piece by piece. A piece may come twice.
PartForward = Callable[[npt.NDArray[np.int64]], Iterator[LogitsPart]]


def served(start: Start[Rows], prompt: int) -> PartForward:
    """Return the function that computes logits of windows, whose first `prompt` tokens are read in one call and the
    others one by one.

    A piece is those of one position: the prompt's last, then each behind it but the window's last, after which nothing
    is scored. So the logits of a step are in memory, and never those of whole windows.
    """

    def forward(ids: npt.NDArray[np.int64]) -> Iterator[LogitsPart]:
        windows, context = ids.shape
        step = start(windows, context)
        yield LogitsPart(step(ids[:, :prompt])[:, None], slice(0, windows), prompt - 1)
        for position in range(prompt, context - 1):
            yield LogitsPart(step(ids[:, position : position + 1])[:, None], slice(0, windows), position)

    return forward


def in_groups(forward: PartForward, most: int, no_room: type[Exception]) -> PartForward:
    """Run `forward` over at most so many windows at a time, and over half as many from where it raises `no_room`."""

    def grouped(ids: npt.NDArray[np.int64]) -> Iterator[LogitsPart]:
        size = min(most, len(ids))
        start = 0
        while start < len(ids):
            windows = slice(start, min(start + size, len(ids)))
            try:
                for piece in forward(ids[windows]):
                    yield LogitsPart(piece.logits, windows, piece.first)
            except no_room:
                if size == 1:
                    raise
                size = size // 2
            else:
                start = windows.stop
                continue
            release_memory()

    return grouped


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
            answer = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits: torch.Tensor = answer.logits
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
