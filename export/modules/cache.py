"""The KV cache of the graph: a past of fixed capacity is an input, and only the new keys and values are outputs, as
values or codes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from ...quantize.codes.encoding import CODE
from . import operators
from .layer_kinds import OwnIndex


class QuantizedCache(nn.Module):
    """Keys (or values) of one layer as codes: the past is dequantized; new values are quantized once and are outputs as
    codes.
    """

    def __init__(self, dtype: torch.dtype):
        """Dequantize to `dtype`."""
        super().__init__()
        self.dtype = dtype
        self.register_buffer("scale", torch.empty((), dtype=torch.float32, device="meta"))

    scale: torch.Tensor

    def forward(self, past: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all values and the new codes, from `past` codes [batch, heads, capacity, size] and `new` values
        [batch, heads, seq, size].
        """
        codes = operators.quantize(new, self.scale, CODE)
        values = [operators.dequantize(part, self.scale, self.dtype) for part in (past, codes)]
        return torch.cat(values, dim=-2), codes


def cache_shapes(text: PreTrainedConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """Heads and head size of the cached keys, and of the values, in every layer; by the first layer's configuration
    where layers have their own.

    Latent attention caches the keys and values of every head, not the latent vector that they are computed from
    (`latent`).
    """
    text = (getattr(text, "per_layer_config", None) or [text])[0]
    heads: int = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if getattr(text, "kv_lora_rank", None):
        return (
            (text.num_attention_heads, text.qk_nope_head_dim + text.qk_rope_head_dim),
            (text.num_attention_heads, text.v_head_dim),
        )
    if text.model_type == "falcon":  # each key head once (`replaced_attention`)
        heads = text.num_kv_heads if text.new_decoder_architecture or not text.multi_query else 1
    size: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return (heads, size), (heads, size)


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
