"""Latent attention that caches the keys and values of its heads in every version of transformers.

DeepSeek-V2 (arXiv:2405.04434, section 2.1) makes the keys and values of all heads from one latent vector. transformers
caches heads up to 5.14; 5.23 caches the latent and the rotated part of the keys, and `expand_kv` makes the heads of the
whole cache again at each step. Measurements and graphs use heads: then `kv_b_proj` multiplies this step's tokens alone,
and statistics do not depend on the version. An indexer's keys go into the other cache as they are.
"""

from types import MethodType
from typing import Any

import torch
from torch import nn


def cache_heads(model: nn.Module) -> None:
    """Make each attention of `model` that would write latents to its cache write keys and values instead, in place."""
    for module in model.modules():
        if hasattr(type(module), "expand_kv"):
            vars(module)["forward"] = MethodType(_forward, module)
            vars(module)["expand_kv"] = _as_they_are


class _Expanding:
    """A cache that takes latents from an attention and stores heads in another cache, if there is one."""

    def __init__(self, attention: nn.Module, cache: Any):
        self.attention = attention
        self.cache = cache

    def update(
        self, latent: torch.Tensor, rotated: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store latents [batch, 1, seq, kv_lora_rank] and the rotated part of keys [batch, 1, seq, qk_rope_head_dim];
        return the keys and values [batch, heads, length, size] of the whole cache.
        """
        keys, values = _expanded(self.attention, latent, rotated)
        if self.cache is None:
            return keys, values
        cached: tuple[torch.Tensor, torch.Tensor] = self.cache.update(keys, values, *args, **kwargs)
        return cached

    def update_indexer(self, keys: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Store an indexer's `keys`, and return those of all positions."""
        if self.cache is None:
            return keys
        return self.cache.update_indexer(keys, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


def _forward(self: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, past_key_values=_Expanding(self, past_key_values), **kwargs)


def _as_they_are(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace `expand_kv` behind a cache that returns keys and values already."""
    return keys, values


def _expanded(attention: Any, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `expand_kv` without writing into parts of a tensor, which would be scatters in a graph."""
    sizes = [attention.qk_nope_head_dim, attention.v_head_dim]
    heads = attention.kv_b_proj(latent.squeeze(1)).unflatten(-1, (-1, sum(sizes))).transpose(1, 2)
    keys, values = torch.split(heads, sizes, dim=-1)
    return torch.cat([keys, rotated.expand(-1, keys.shape[1], -1, -1)], dim=-1), values
