"""The KV cache of the graph: a past of fixed capacity is an input, and only the new keys and values are outputs, as
values or codes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ...quantize.codes.encoding import CODE
from . import operators
from .layer_kinds import OwnIndex

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
