"""The FP8 KV cache of the reference: keys and values are codes from the moment they are written.

Keys are quantized after the rotary embedding, where the cache is written, and attention sees code × scale: the new step's too, since the
next step will see nothing else. One scale each for a layer's keys and values.
"""

from collections.abc import Mapping

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from .linear import encode


def round_to_codes(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x quantized to E4M3 under `scale` and dequantized in FP32, in x's type and shape."""
    factor = torch.tensor(scale, dtype=torch.float32, device=x.device)
    return (encode(x, factor).float() * factor).to(x.dtype)


class FP8Layer(DynamicLayer):
    """One layer of the cache, holding dequantized codes."""

    def __init__(self, key_scale: float, value_scale: float):
        """Scales: real value = code × scale."""
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' own
        self.key_scale, self.value_scale = key_scale, value_scale

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [batch, heads, seq, head_size], rounded; return all there are."""
        keys, values = super().update(round_to_codes(key_states, self.key_scale), round_to_codes(value_states, self.value_scale), *args, **kwargs)
        return keys, values


class FP8Cache(DynamicCache):
    """A cache of `FP8Layer`s, one for each layer of the model."""

    def __init__(self, scales: Mapping[str, float], modules: Mapping[int, str]):
        """`scales` of `<module>.k` and `<module>.v`; `modules`: layer index -> module name."""
        super().__init__()
        self.layers = [FP8Layer(scales[f"{modules[i]}.k"], scales[f"{modules[i]}.v"]) for i in sorted(modules)]
