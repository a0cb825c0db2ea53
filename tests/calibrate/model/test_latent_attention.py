"""Latent attention that writes latents to its cache, as transformers' does from 5.2x on, is made to write heads."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from fp8q.calibrate.model.latent_attention import cache_heads

HEADS, LATENT, ROTATED, SIZE, VALUE = 3, 8, 2, 4, 5


class LatentAttention(nn.Module):
    """As transformers 5.23 has it, without rotation, norms and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.qk_nope_head_dim, self.v_head_dim = SIZE, VALUE
        self.kv_a = nn.Linear(6, LATENT + ROTATED, bias=False)
        self.kv_b_proj = nn.Linear(LATENT, HEADS * (SIZE + VALUE), bias=False)

    def expand_kv(self, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, _, seq, _ = latent.shape
        heads = self.kv_b_proj(latent).view(batch, seq, -1, SIZE + VALUE).transpose(1, 2)
        keys = heads.new_empty(batch, HEADS, seq, SIZE + ROTATED)
        keys[..., :SIZE] = heads[..., :SIZE]
        keys[..., SIZE:] = rotated
        return keys, heads[..., SIZE:]

    def forward(self, hidden: torch.Tensor, past_key_values: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        latent, rotated = self.kv_a(hidden)[:, None].split([LATENT, ROTATED], dim=-1)
        if past_key_values is not None:
            latent, rotated = past_key_values.update(latent, rotated, 0)
        return self.expand_kv(latent, rotated)


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(0))


def layer_of(cache: DynamicCache) -> Any:
    return cache.layers[0]


def test_it_computes_what_it_computed_with_a_cache_and_without(hidden: torch.Tensor) -> None:
    torch.manual_seed(0)
    attention = LatentAttention()
    before, at_once = DynamicCache(), attention(hidden)
    steps = [attention(part, past_key_values=before) for part in hidden.split([4, 3], dim=1)]
    cache_heads(attention)
    after = DynamicCache()
    for part, expected in zip(hidden.split([4, 3], dim=1), steps, strict=True):
        for found, wanted in zip(attention(part, past_key_values=after), expected, strict=True):
            torch.testing.assert_close(found, wanted)
    for found, wanted in zip(attention(hidden), at_once, strict=True):
        torch.testing.assert_close(found, wanted)


def test_what_it_caches_are_the_keys_and_values_of_its_heads(hidden: torch.Tensor) -> None:
    attention, cache = LatentAttention(), DynamicCache()
    attention(hidden, past_key_values=cache)
    assert tuple(layer_of(cache).keys.shape) == (2, 1, 7, LATENT)
    cache_heads(attention)
    cache = DynamicCache()
    keys, values = attention(hidden, past_key_values=cache)
    assert tuple(keys.shape) == (2, HEADS, 7, SIZE + ROTATED)
    assert torch.equal(layer_of(cache).keys, keys)
    assert torch.equal(layer_of(cache).values, values)


def test_what_writes_no_latents_is_let_be() -> None:
    linear = nn.Linear(2, 2)
    cache_heads(linear)
    assert "forward" not in vars(linear)
