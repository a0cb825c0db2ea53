"""The FP8 KV cache of the reference: keys and values are quantized when they are written.

Keys are quantized after the rotary embedding, where the cache is written. Attention reads code × scale, for the tokens
of the present step too, since later steps read nothing else. Keys and values of a layer have one scale each, [1], or
one for each head, [heads, 1, 1]. A part without a scale is not quantized: FP8 values alone cost next to nothing, FP8
keys may cost more (docs/kv-cache.md).
"""

from collections.abc import Mapping

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ..codes.encoding import code_values


def round_to_codes(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Quantize x to E4M3 under `scale` and dequantize it in FP32, to x's type and shape.

    `x` [batch, heads, seq, head_size]; `scale` float32 [1] or [heads, 1, 1], on x's device.
    """
    return code_values(x, scale).mul_(scale).to(x.dtype)


class FP8Layer(DynamicLayer):
    """One layer of the cache, holding dequantized codes."""

    def __init__(self, key_scale: torch.Tensor | None, value_scale: torch.Tensor | None):
        """Take the scales of keys and values (real value = code × scale); None leaves that part unquantized."""
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' own
        self.scales = (key_scale, value_scale)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize and append keys and values [batch, heads, seq, head_size]; return the whole cache."""
        new_keys, new_values = (
            x if scale is None else round_to_codes(x, scale)
            for x, scale in zip((key_states, value_states), self.scales, strict=True)
        )
        keys, values = super().update(new_keys, new_values, *args, **kwargs)
        return keys, values


class FP8Cache(DynamicCache):
    """A cache of `FP8Layer`s, one for each layer of the model."""

    def __init__(self, scales: Mapping[str, torch.Tensor], modules: Mapping[int, str]):
        """Take the `scales` of `<module>.k` and `<module>.v`, and `modules`: layer index -> module name."""
        super().__init__()
        self.layers = [FP8Layer(scales.get(f"{modules[i]}.k"), scales.get(f"{modules[i]}.v")) for i in sorted(modules)]
