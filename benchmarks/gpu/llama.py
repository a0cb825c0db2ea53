"""A decoder of Llama 3's shape with random weights, written out: products of any kind, a cache in BF16 or FP8, static
shapes, so that a decode step is one CUDA graph.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from fp8q.quantize.codes.encoding import CODE
from fp8q.quantize.reference.linear import FP8Linear

#: Makes a product of `outputs` by `inputs`, on a device.
Kind = Callable[[int, int, str], nn.Module]


@dataclass(frozen=True)
class Shape:
    """Of a decoder; by default Llama 3 8B's."""

    layers: int = 32
    width: int = 4096
    inner: int = 14_336
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    vocabulary: int = 128_256


TINY = Shape(layers=2, width=64, inner=96, heads=4, kv_heads=2, head_size=16, vocabulary=128)


def wide(outputs: int, inputs: int, device: str) -> nn.Module:
    """A product in BF16."""
    made = nn.Linear(inputs, outputs, bias=False, device=device, dtype=torch.bfloat16)
    return made.requires_grad_(False)


def coded(terms: int) -> Kind:
    """Products on codes, each activation in so many terms."""

    def make(outputs: int, inputs: int, device: str) -> nn.Module:
        codes = (torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) * 60).clamp(-448, 448).to(CODE)
        scales = torch.full((outputs,), inputs**-0.5 / 60, device=device)
        return FP8Linear(codes, scales, torch.tensor(2.0**-6, device=device), None, "fast", terms)

    return make


#: Name -> what makes the products.
KINDS: dict[str, Kind] = {"bf16": wide, "fp8": coded(1), "fp8, two terms": coded(2)}


class Layer(nn.Module):
    """One decoder layer and its cache [2, batch, kv_heads, capacity, head_size]."""

    cache: torch.Tensor

    def __init__(self, shape: Shape, kind: Kind, device: str):
        super().__init__()
        self.shape = shape
        self.qkv = kind((shape.heads + 2 * shape.kv_heads) * shape.head_size, shape.width, device)
        self.o = kind(shape.width, shape.heads * shape.head_size, device)
        self.gate_up = kind(2 * shape.inner, shape.width, device)
        self.down = kind(shape.width, shape.inner, device)

    def forward(self, x: torch.Tensor, turns: torch.Tensor, at: torch.Tensor, filled: int | None) -> torch.Tensor:
        """`x` [batch, seq, width] at the positions `at` [seq], whose rotations are `turns` [seq, head_size / 2]; so
        many positions of the cache as `filled` are read, None where there is nothing but `x`.
        """
        x = x + self.o(self._attend(self.qkv(rms_norm(x, x.shape[-1:])), turns, at, filled))
        gate, up = self.gate_up(rms_norm(x, x.shape[-1:])).chunk(2, -1)
        made: torch.Tensor = x + self.down(silu(gate) * up)
        return made

    def _attend(self, qkv: torch.Tensor, turns: torch.Tensor, at: torch.Tensor, filled: int | None) -> torch.Tensor:
        shape, (batch, seq, _) = self.shape, qkv.shape
        heads = qkv.view(batch, seq, -1, shape.head_size).transpose(1, 2)
        query, key, value = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
        query, key = rotated(query, turns), rotated(key, turns)
        self._store(0, at, key)
        self._store(1, at, value)
        if filled is None:
            out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).reshape(batch, seq, -1)
        # one token: the queries that share a key are its rows, so that no key is repeated
        key, value = (self.cache[part, :, :, :filled].to(query.dtype) for part in (0, 1))
        rows = query.view(batch, shape.kv_heads, -1, shape.head_size)
        return scaled_dot_product_attention(rows, key, value).view(batch, seq, -1)

    def _store(self, part: int, at: torch.Tensor, x: torch.Tensor) -> None:
        """Codes are copied as bytes: not every operation knows their type."""
        target, x = self.cache[part], x.to(self.cache.dtype)
        if x.dtype == CODE:
            target, x = target.view(torch.uint8), x.view(torch.uint8)
        target.index_copy_(2, at, x)


def rotated(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """`x` [batch, heads, seq, head_size] turned by angles `turns` [seq, head_size / 2]."""
    left, right = x.float().chunk(2, -1)
    cos, sin = turns.cos(), turns.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)


class Decoder(nn.Module):
    """All layers, the embedding and the head, which stay in BF16."""

    def __init__(self, shape: Shape, kind: Kind, device: str):
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(Layer(shape, kind, device) for _ in range(shape.layers))
        self.table = torch.randn(shape.vocabulary, shape.width, device=device, dtype=torch.bfloat16)
        self.head = torch.randn(shape.vocabulary, shape.width, device=device, dtype=torch.bfloat16) * shape.width**-0.5
        half = shape.head_size // 2
        self.frequencies = 500_000.0 ** -(torch.arange(half, device=device) / half)

    def make_room(self, batch: int, capacity: int, codes: bool) -> None:
        """An empty cache, in FP8 or in BF16."""
        shape, device = self.shape, self.table.device
        size = (2, batch, shape.kv_heads, capacity, shape.head_size)
        for layer in self.layers:
            empty = torch.zeros(size, device=device, dtype=torch.uint8 if codes else torch.bfloat16)
            vars(layer)["cache"] = empty.view(CODE) if codes else empty

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """Bytes of the products' weights with their scales, and of all weights."""
        held = [tensor for layer in self.layers for tensor in (*layer.parameters(), *layer.buffers())]
        products = sum(
            tensor.nbytes for tensor in held if 1 << 16 not in tensor.shape
        )  # less the CPU's tables of codes
        return products, products + self.table.nbytes + self.head.nbytes

    def forward(self, ids: torch.Tensor, at: torch.Tensor, filled: int | None) -> torch.Tensor:
        """The best next token of each row, int64 [batch], of `ids` [batch, seq] at the positions `at` [seq]."""
        x, turns = embedding(ids, self.table), at[:, None].float() * self.frequencies
        for layer in self.layers:
            x = layer(x, turns, at, filled)
        return linear(rms_norm(x[:, -1], x.shape[-1:]), self.head).argmax(-1)
