"""Attention and KV cache of the graph.

Attention makes its mask from the positions of queries and of cache slots. It is ONNX's Attention operator where
TensorRT-RTX has a kernel for it, and otherwise two matmuls and a softmax.

The cache's past, of fixed capacity, is an input of the graph, and only the new keys and values are outputs, as values
or codes.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ...quantize.codes.encoding import CODE
from . import operators
from .cached_attention import StepForm, StepTensors, attend, heads_of_blocks, of_prompt
from .layer_kinds import LayerIndex

_MATRIX = 2
_calls: list["GraphCall"] = []


@dataclass(frozen=True)
class Keys:
    """Keys that queries may see: their `positions` [batch, length], whether they are `filled` [batch, length], and the
    `bias` of their scores, float32 [batch, heads, 1, length].
    """

    positions: torch.Tensor
    filled: torch.Tensor
    bias: torch.Tensor | None = None

    def allowed(self, queries: torch.Tensor, window: int | None) -> torch.Tensor:
        """The keys that each of `queries` [batch, seq] sees, bool [batch, seq, length]: no later one, and none of a
        window and more before it.
        """
        keys = self.positions[:, None, :]
        positions = queries[:, :, None]
        allowed = (keys <= positions) & (self.filled != 0)[:, None, :]
        if window is None:
            return allowed
        return allowed & (positions - keys < window)


@dataclass(frozen=True)
class GraphCall:
    """A call of the graph: the positions of its tokens, int64 [batch, seq], and its mask [batch, capacity + seq].

    `past`: the slots; `bias`: that of the scores of slots and new keys; `prompt`: slots and new keys of a call of
    several tokens, and of one token itself alone. `layers`: the caches of the attention modules.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    past: Keys
    bias: torch.Tensor | None
    prompt: Keys
    layers: Collection["GraphLayer"]


@contextmanager
def attending(call: GraphCall) -> Iterator[None]:
    """Make `attention` compute for this call in this block; attention modules find their cache as `fp8q_cache`."""
    _calls.append(call)
    for layer in call.layers:
        vars(layer.attention)["fp8q_cache"] = layer
    try:
        yield
    finally:
        _calls.pop()
        for layer in call.layers:
            del vars(layer.attention)["fp8q_cache"]


def as_sequences(x: torch.Tensor) -> torch.Tensor:
    """Make `x` [tokens, width] the sequences [batch, seq, width] of the call; a tensor of these stays as it is."""
    return x.unflatten(0, tuple(_calls[-1].tokens.shape)) if x.dim() == _MATRIX else x


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Grouped-query attention over [batch, heads, length, size] as ONNX's Attention operator; causal by position, not
    by slot.

    It is plain GEMMs and a softmax in FP32 where TensorRT has no fused kernel or finds none
    (`graph_model.MIXED_LAYERS`), for capped logits, whose `softcap` it does not parse, for scores with a bias, and for
    values of another size than the keys.
    """
    scaling, window, softcap = (options.get(name) for name in ("scaling", "sliding_window", "softcap"))
    call = _calls[-1]
    cache: GraphLayer = module.fp8q_cache
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    quantized = getattr(module, "fp8q_attention", None)
    seen = call.prompt
    keys, values = cache.with_new((key, value), call)
    allowed = seen.allowed(call.tokens, window)[:, None]
    if quantized is not None:
        assert seen.bias is None, "queries of an attention with ALiBi are not measured"
        output = quantized(query, keys, values, allowed, scale, softcap)
    elif (
        softcap is not None
        or seen.bias is not None
        or key.shape[-1] != value.shape[-1]
        or getattr(module, "fp8q_plain", False)
        or not has_fused_kernel(*query.shape[1::2])
    ):
        output = plain_attention(query, keys, values, Scoring(allowed, scale, softcap, seen.bias))
    else:
        output = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=allowed, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    of_step = Scoring(call.past.allowed(call.tokens[:, :1], window)[:, 0], scale, softcap, call.bias)
    output = module.fp8q_step(output, query, (key, value), cache, call, of_step)
    return output.transpose(1, 2).contiguous(), None


def has_fused_kernel(heads: int, size: int) -> bool:
    """Tell whether TensorRT-RTX 1.7 has an attention kernel for this number and size of query heads (found by
    building).
    """
    return heads >= 4 and 16 <= size <= 256 and size % 8 == 0


@dataclass(frozen=True)
class Scoring:
    """The way from GEMMs of queries and keys to scores: multiply by `scale`, add `bias`, cap, mask by `allowed`."""

    allowed: torch.Tensor
    scale: float
    softcap: float | None = None
    bias: torch.Tensor | None = None


def plain_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Attention [batch, heads, length, size] as two GEMMs and a softmax in FP32."""
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


class Dequantize(nn.Module):
    """The values of a layer's past keys (or values), as a module, so that its node gets a name."""

    def __init__(self, dtype: torch.dtype, axis: int = 0):
        super().__init__()
        self.dtype = dtype
        self.axis = axis

    def forward(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Dequantize `codes`, with the scales of heads along `axis`."""
        values: torch.Tensor = operators.dequantize(codes, scale, self.dtype, self.axis)
        return values


class QuantizedCache(nn.Module):
    """Keys (or values) of one layer as codes: the past is dequantized; new values are quantized once and are outputs as
    codes.
    """

    def __init__(self, dtype: torch.dtype, heads: int | None = None, step_dtype: torch.dtype | None = None):
        """Dequantize to `dtype`, by one scale, or by one for each of so many `heads`; for a step's GEMM to
        `step_dtype` (None: to `dtype`).
        """
        super().__init__()
        self.dtype = dtype
        self.axis, shape = (0, ()) if heads is None else (HEADS, (heads,))
        self.register_buffer("scale", torch.empty(shape, dtype=torch.float32, device="meta"))
        self.past = Dequantize(dtype, self.axis)
        # no second name for one module, by which torch's exporter would call it
        self.step = Dequantize(step_dtype) if step_dtype not in (None, dtype) and heads is None else None

    scale: torch.Tensor

    def forward(self, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new values [batch, heads, seq, size] as attention sees them, and as they are stored."""
        codes = operators.quantize(new, self.scale, CODE, self.axis)
        return operators.dequantize(codes, self.scale, self.dtype, self.axis), codes

    def slots(self, past: torch.Tensor, heads: int, call: GraphCall) -> torch.Tensor:
        """The past values [batch, heads, capacity, size], of `past` codes [batch · heads · blocks, 64, size]."""
        sizes = [heads, past.shape[-1]]
        if self.axis:
            by_head: torch.Tensor = self.past(heads_of_blocks(past, call.mask, call.tokens, sizes), self.scale)
            return by_head
        values: torch.Tensor = heads_of_blocks(self.past(past, self.scale), call.mask, call.tokens, sizes)
        return values

    def of_step(self, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The past as a step's GEMM reads it, and the scales of its heads that are still to be applied."""
        if self.axis:
            return past, self.scale
        return (self.past if self.step is None else self.step)(past, self.scale), None


class PlainCache(nn.Module):
    """Keys (or values) of one layer in the compute type."""

    def forward(self, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new values twice: as attention sees them, and as they are stored."""
        return new, new

    def slots(self, past: torch.Tensor, heads: int, call: GraphCall) -> torch.Tensor:
        """The past values [batch, heads, capacity, size]."""
        values: torch.Tensor = heads_of_blocks(past, call.mask, call.tokens, [heads, past.shape[-1]])
        return values

    def of_step(self, past: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The past as it is."""
        return past, None


class StepAttention(nn.Module):
    """The attention of a call of one token a row, beside that of several (`cached_attention`)."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def forward(
        self,
        prompt: torch.Tensor,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        cache: "GraphLayer",
        call: GraphCall,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Return `prompt`, the attention of several tokens, or that of one; `new`: its key and value. `scoring.allowed`
        [batch, capacity]: the slots that it sees.
        """
        key, value = new
        (past_key, key_scale), (past_value, value_scale) = (
            part.of_step(past) for part, past in zip(cache.parts, cache.past, strict=True)
        )
        form = StepForm(
            query.shape[1], key.shape[1], key.shape[-1], value.shape[-1], scoring.scale, scoring.softcap, self.dtype
        )
        step = StepTensors(
            query, key, value, past_key, past_value, scoring.allowed, call.mask, call.tokens, scoring.bias, key_scale,
            value_scale,
        )  # fmt: skip
        return attend(prompt, step, form)


class GraphLayer(DynamicLayer):
    """One layer of the cache during tracing; `new` holds the keys and values of this step."""

    def __init__(self, attention: nn.Module, past: tuple[torch.Tensor, torch.Tensor]):
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' own
        self.attention = attention
        self.parts: tuple[Any, ...] = tuple(attention.get_submodule(name) for name in ("fp8q_k", "fp8q_v"))
        self.past = past
        self.new: tuple[torch.Tensor, ...] = ()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep keys and values [batch, heads, seq, size]; return them as attention sees them, without the past."""
        pairs = [part(new) for part, new in zip(self.parts, (key_states, value_states), strict=True)]
        self.new = tuple(stored for _, stored in pairs)
        return pairs[0][0], pairs[1][0]

    def with_new(self, new: tuple[torch.Tensor, torch.Tensor], call: GraphCall) -> list[torch.Tensor]:
        """Keys, and values, of the past and the `new` ones behind each other [batch, heads, length, size]; without the
        past in a call of one token.
        """
        both = []
        for part, past, states in zip(self.parts, self.past, new, strict=True):
            slots = part.slots(past, states.shape[HEADS], call)
            slots = of_prompt(slots, call.tokens, 2)
            both.append(torch.cat([slots, states], dim=2))
        return both


class GraphCache(DynamicCache):
    """The cache during tracing, by layer index."""

    def __init__(self, layers: Mapping[int, GraphLayer]):
        super().__init__()
        self.layers = [*layers.values()]
        self.of = dict(layers)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int | LayerIndex,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the new keys and values of a layer; return them as attention sees them."""
        index = layer_idx.number if isinstance(layer_idx, LayerIndex) else layer_idx
        return self.of[index].update(key_states, value_states, *args, **kwargs)
