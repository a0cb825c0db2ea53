"""Make the cache that a model runs with: keys and values alone, or also the states of layers that keep others.

An ordinary decoder gets transformers' plain `DynamicCache`, whose layers come into being as they are written. A hybrid
(attention in some layers, a recurrence or a convolution in others, or both in one), and a model whose indexer caches
keys of its own, get the layers that transformers makes by their configuration.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import DynamicLayer

#: Layers that hold keys and values alone, and those that hold nothing (they share another's, or have no attention).
PLAIN = ("DynamicLayer", "DynamicSlidingWindowLayer")
NOTHING = "DummyLayer"
#: The methods of a cache layer in which attention writes keys and values, and asks how many there are.
OF_ATTENTION = ("update", "get_seq_length", "get_mask_sizes")


def configured_cache(config: "PreTrainedConfig") -> "DynamicCache | None":
    """Make an empty cache by a language model's configuration; None where every layer holds keys and values alone, or
    none at all (those that share another's, and those without attention).
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=config.get_text_config(decoder=True))
    plain = all(type(layer).__name__ in (*PLAIN, NOTHING) for layer in cache.layers)
    if plain and any(map(holds_keys, cache.layers)):
        return None
    return cache


def holds_keys(layer: object) -> "TypeGuard[DynamicLayer]":
    """Tell whether a layer of a cache holds keys and values."""
    from transformers.cache_utils import DynamicLayer

    return isinstance(layer, DynamicLayer)


def keeps_states(config: "PreTrainedConfig") -> bool:
    """Tell whether a layer keeps something else than keys and values: a recurrent state, or an indexer's keys."""
    return configured_cache(config) is not None


def attention_indices(config: "PreTrainedConfig") -> set[int] | None:
    """The numbers of the layers that cache keys and values, of a model that keeps other states too; None for others."""
    cache = configured_cache(config)
    if cache is None:
        return None
    return {n for n, layer in enumerate(cache.layers) if holds_keys(layer)}


def new_cache(model: "PreTrainedModel", layers: "Mapping[int, DynamicLayer] | None" = None) -> "DynamicCache":
    """Make an empty cache for `model`, in which `layers` hold the keys and values of the decoder layers of these
    numbers; without them transformers' own do.

    A layer that keeps a recurrent state beside keys and values goes on keeping it.
    """
    from transformers import DynamicCache

    cache = configured_cache(model.config)
    if cache is None:
        cache = DynamicCache()
        if layers is not None:
            cache.layers = [layers[number] for number in sorted(layers)]
        return cache
    for number, layer in (layers or {}).items():
        if type(cache.layers[number]).__name__ in PLAIN:
            cache.layers[number] = layer
        else:
            vars(cache.layers[number]).update({name: getattr(layer, name) for name in OF_ATTENTION})
    return cache
