"""The exact rows of a batch: every decoded token, and the last positions of each prompt; the others have one code.

vLLM computes a batch of rows, and `query_start_loc` [sequences + 1] says where those of each sequence begin. The last
`tail` rows of a sequence are exact. A sequence that decodes has one row, so it always is. A prompt that is read in
chunks has a tail in each of them.

Nothing here waits for the GPU: the number of exact rows must be known before it has counted them, so there is room for
a whole tail of each sequence, but for no more than one row of each and `PROMPTS` whole tails or an eighth of the rows,
whichever is more. Where more prompts than that come together in one batch their tails are shorter, by the same number
of positions each. A batch of few rows is exact throughout: it is bound by reading the weights, and its shape does not
depend on what is in it, as CUDA graphs ask.
"""

import logging
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

log = logging.getLogger("vllm.fp8q")

#: The whole tails that there is room for in a batch at least, and the share of its rows that they may be.
PROMPTS = 4
SHARE = 8
#: Batches of no more rows are exact throughout, where CUDA graphs do not ask for more: vLLM captures as many by itself.
FREE_ROWS = 512
#: The kinds of metadata in which this process found no sequences.
WARNED: list[str] = []


@dataclass(frozen=True)
class Rows:
    """Numbers of rows, int64 [n], each once, and which of them are exact, bool [n]; the others fill up."""

    numbers: torch.Tensor
    exact: torch.Tensor


def tail_rows(starts: torch.Tensor, rows: int, tail: int) -> Rows:
    """The exact rows of a batch of `rows`, of which sequence i has `starts[i]` to `starts[i + 1]`.

    `starts` int [sequences + 1], ascending from 0; rows from its last on are padding.
    """
    at = torch.arange(rows, device=starts.device, dtype=starts.dtype)
    ends = starts[1:]
    sequence = torch.searchsorted(ends, at, right=True).clamp_max(len(ends) - 1)
    distance = (ends[sequence] - 1 - at).long()
    inside = at < starts[-1]
    nearest = torch.where(inside, distance, rows).argsort(stable=True)
    room = min(rows, len(ends) * tail, len(ends) + max(PROMPTS * tail, rows // SHARE))
    numbers = nearest[:room]
    return Rows(numbers, (inside & (distance < tail))[numbers])


def rows_of_batch(rows: int, tail: int, free_rows: int) -> Rows | None:
    """The exact rows of the batch that vLLM is computing; None: all `rows`.

    They are found once for all layers of a batch. Where vLLM tells nothing of sequences, all rows are exact. So they
    are where there are fewer than the batch has tokens: a layer gets a part of them then, in an order of its own.
    Where there are more, the last are padding.
    """
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if rows <= free_rows or not is_forward_context_available():
        return None
    context = get_forward_context()
    known: dict[tuple[int, int], Rows] = context.additional_kwargs.setdefault("fp8q", {})
    if (rows, tail) not in known:
        starts, tokens = batch_of(context.attn_metadata)
        if starts is None and context.attn_metadata:
            _warn_once(context.attn_metadata)
        if starts is None or len(starts) < 2 or rows < tokens:
            return None
        known[rows, tail] = tail_rows(starts, rows, tail)
    return known[rows, tail]


def batch_of(metadata: Any) -> tuple[torch.Tensor | None, int]:
    """Where sequences begin, and the number of tokens in all, as the first layer's metadata have both; None where they
    do not say, or in microbatches.
    """
    for of_layer in metadata.values() if isinstance(metadata, dict) else ():
        starts = getattr(of_layer, "query_start_loc", None)
        tokens = tokens_of(of_layer)
        if isinstance(starts, torch.Tensor) and tokens is not None:
            return starts, tokens
    return None, 0


def tokens_of(of_layer: Any) -> int | None:
    """The tokens of a batch without padding, known to the host; None where a layer's metadata do not say."""
    if (tokens := getattr(of_layer, "num_actual_tokens", None)) is not None:
        return int(tokens)
    parts = [getattr(of_layer, name, None) for name in ("num_prefill_tokens", "num_decode_tokens")]
    counts = [int(part) for part in parts if part is not None]
    if len(counts) == len(parts):
        return sum(counts)
    return None


def keep_starts(builder: Any) -> None:
    """Let all metadata that builders derived from vLLM's class `builder` make say where sequences begin.

    FlashInfer's do not, though every builder is given it (`query_start_loc` of the metadata that backends share). A
    field of that name that a backend has is left as it is.
    """
    made = builder.__init__

    @wraps(made)
    def with_starts(self: Any, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        _keep_starts_in(type(self))

    builder.__init__ = with_starts


def _keep_starts_in(kind: Any) -> None:
    build = kind.build
    if getattr(build, "keeps_starts", False):
        return

    @wraps(build)
    def built(self: Any, common_prefix_len: int, common_attn_metadata: Any, *arguments: Any, **named: Any) -> Any:
        metadata = build(self, common_prefix_len, common_attn_metadata, *arguments, **named)
        if not hasattr(metadata, "query_start_loc"):
            with suppress(AttributeError):  # None, or a class that takes no further field: `_warn_once` says so
                metadata.query_start_loc = common_attn_metadata.query_start_loc
        return metadata

    built.keeps_starts = True  # type: ignore[attr-defined]
    kind.build = built


def _warn_once(metadata: Any) -> None:
    """Say that tails are not found in a batch, the first time."""
    if WARNED:
        return
    of_layers = metadata.values() if isinstance(metadata, dict) else ()
    WARNED.append(", ".join(sorted({type(layer_metadata).__name__ for layer_metadata in of_layers})) or "microbatches")
    log.warning(
        "attention says nothing of where sequences begin (%s), so all rows are exact, not the tails of prompts alone: "
        "prompts take the time of 16 bits",
        WARNED[0],
    )
