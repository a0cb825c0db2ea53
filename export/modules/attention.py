"""Attention and KV cache of the graph.

Attention makes its mask from the positions of queries and of cache slots. It is ONNX's Attention operator where
TensorRT-RTX has a kernel for it, and otherwise two matmuls and a softmax.

The cache's past, of fixed capacity, is an input of the graph, and only the new keys and values are outputs, as values
or codes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ...quantize.codes.encoding import CODE
from . import operators
from .layer_kinds import OwnIndex

_MATRIX = 2
_mask: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]] = []


@contextmanager
def attending(
    queries: torch.Tensor, keys: torch.Tensor, filled: torch.Tensor, bias: torch.Tensor | None = None
) -> Iterator[None]:
    """Set the inputs of `attention` in this block: positions of queries [batch, seq] and of keys [batch, capacity +
    seq], the filled keys, and a bias of the scores, float32 [batch, heads, 1, capacity + seq].
    """
    _mask.append((queries[:, None, :, None], keys[:, None, None, :], filled[:, None, None, :] != 0, bias))
    try:
        yield
    finally:
        _mask.pop()


def as_sequences(x: torch.Tensor) -> torch.Tensor:
    """Make `x` [tokens, width] the sequences [batch, seq, width] of the call; a tensor of these stays as it is."""
    queries = _mask[-1][0]
    return x.unflatten(0, (queries.shape[0], queries.shape[2])) if x.dim() == _MATRIX else x


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Grouped-query attention over [batch, heads, length, size] as ONNX's Attention operator; causal by position, not
    by slot.

    It is plain products and a softmax in FP32 where TensorRT has no fused kernel or finds none
    (`graph_model.MIXED_LAYERS`), for capped logits, whose `softcap` it does not parse, for scores with a bias, and for
    values of another size than the keys.
    """
    scaling, window, softcap = (options.get(name) for name in ("scaling", "sliding_window", "softcap"))
    queries, keys, filled, bias = _mask[-1]
    allowed = (keys <= queries) & filled
    if window is not None:
        allowed = allowed & (queries - keys < window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if (quantized := getattr(module, "fp8q_attention", None)) is not None:
        assert bias is None, "queries of an attention with ALiBi are not measured"
        output = quantized(query, key, value, allowed, scale, softcap)
    elif (
        softcap is not None
        or bias is not None
        or key.shape[-1] != value.shape[-1]
        or getattr(module, "fp8q_plain", False)
        or not has_fused_kernel(*query.shape[1::2])
    ):
        output = plain_attention(query, key, value, Scoring(allowed, scale, softcap, bias))
    else:
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    return output.transpose(1, 2).contiguous(), None


def has_fused_kernel(heads: int, size: int) -> bool:
    """Tell whether TensorRT-RTX 1.7 has an attention kernel for this number and size of query heads, for prompts and
    for single tokens (found by building).
    """
    return heads >= 4 and 16 <= size <= 256 and size % 8 == 0


@dataclass(frozen=True)
class Scoring:
    """The way from products of queries and keys to scores: multiply by `scale`, add `bias`, cap, mask by `allowed`."""

    allowed: torch.Tensor
    scale: float
    softcap: float | None = None
    bias: torch.Tensor | None = None


def plain_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Attention [batch, heads, length, size] as two products and a softmax in FP32."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (key, value))
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * scoring.scale
    scores = scores if scoring.bias is None else scores + scoring.bias
    return torch.matmul(weights_of(scores, scoring.allowed, scoring.softcap).to(value.dtype), value)


def weights_of(scores: torch.Tensor, allowed: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """The softmax of `scores` float32 [..., seq, length]. They are capped before they are masked: a capped mask would
    let hidden keys through.
    """
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    return scores.masked_fill(~allowed, torch.finfo(torch.float32).min).softmax(-1)


#: The axis of the heads in keys and values.
HEADS = 1


class QuantizedCache(nn.Module):
    """Keys (or values) of one layer as codes: the past is dequantized; new values are quantized once and are outputs as
    codes.
    """

    def __init__(self, dtype: torch.dtype, heads: int | None = None):
        """Dequantize to `dtype`, by one scale, or by one for each of so many `heads`."""
        super().__init__()
        self.dtype = dtype
        self.axis, shape = (0, ()) if heads is None else (HEADS, (heads,))
        self.register_buffer("scale", torch.empty(shape, dtype=torch.float32, device="meta"))

    scale: torch.Tensor

    def forward(self, past: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all values and the new codes, from `past` codes [batch, heads, capacity, size] and `new` values
        [batch, heads, seq, size].
        """
        codes = operators.quantize(new, self.scale, CODE, self.axis)
        values = [operators.dequantize(part, self.scale, self.dtype, self.axis) for part in (past, codes)]
        return torch.cat(values, dim=-2), codes


class PlainCache(nn.Module):
    """Keys (or values) of one layer in the compute type."""

    def forward(self, past: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all values, and the new ones."""
        return torch.cat([past, new], dim=-2), new


class GraphLayer(DynamicLayer):
    """One layer of the cache during tracing; `new` holds the keys and values of this step."""

    def __init__(self, attention: nn.Module, past: tuple[torch.Tensor, torch.Tensor]):
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' own
        self.parts = tuple(attention.get_submodule(name) for name in ("fp8q_k", "fp8q_v"))
        self.past = past
        self.new: tuple[torch.Tensor, ...] = ()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [batch, heads, seq, size] to the past; return both together."""
        pairs = [
            part(past, new) for part, past, new in zip(self.parts, self.past, (key_states, value_states), strict=True)
        ]
        self.new = tuple(stored for _, stored in pairs)
        return pairs[0][0], pairs[1][0]


class GraphCache(DynamicCache):
    """The cache during tracing, by layer index."""

    def __init__(self, layers: Mapping[int, GraphLayer]):
        super().__init__()
        self.layers = [*layers.values()]
        self.of = dict(layers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int | OwnIndex, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values of a layer to its past; return both together."""
        index = layer_idx.number if isinstance(layer_idx, OwnIndex) else layer_idx
        return self.of[index].update(key_states, value_states, *args, **kwargs)
