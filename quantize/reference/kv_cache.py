"""The FP8 KV cache of the reference: keys and values are codes from the moment they are written.

Keys are quantized after the rotary embedding, where the cache is written, and attention sees code × scale: the new
step's too, since the next step will see nothing else. One scale each for a layer's keys and values. A part without a
scale stays as it is: values alone in FP8 cost next to nothing, keys may (docs/kv-cache.md).
"""

from collections.abc import Mapping

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ..codes.encoding import code_values


def round_to_codes(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x quantized to E4M3 under `scale` and dequantized in FP32, in x's type and shape."""
    factor = torch.tensor(scale, dtype=torch.float32, device=x.device)
    return code_values(x, factor).mul_(factor).to(x.dtype)


class FP8Layer(DynamicLayer):
    """One layer of the cache, holding dequantized codes."""

    def __init__(self, key_scale: float | None, value_scale: float | None):
        """Scales: real value = code × scale; None leaves that part as it is."""
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' own
        self.scales = (key_scale, value_scale)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [batch, heads, seq, head_size], rounded; return all there are."""
        new_keys, new_values = (
            x if scale is None else round_to_codes(x, scale)
            for x, scale in zip((key_states, value_states), self.scales, strict=True)
        )
        keys, values = super().update(new_keys, new_values, *args, **kwargs)
        return keys, values


class FP8Cache(DynamicCache):
    """A cache of `FP8Layer`s, one for each layer of the model."""

    def __init__(self, scales: Mapping[str, float], modules: Mapping[int, str]):
        """`scales` of `<module>.k` and `<module>.v`, where these are codes; `modules`: layer index -> module name."""
        super().__init__()
        self.layers = [FP8Layer(scales.get(f"{modules[i]}.k"), scales.get(f"{modules[i]}.v")) for i in sorted(modules)]
