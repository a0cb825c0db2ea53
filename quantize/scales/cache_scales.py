"""Choose the scales of the KV cache, and the layers whose cache stays in the compute type (`--kv-skip`).

A layer that stays in BF16 has scales all the same: vLLM is told of such layers on its command line alone, and
transformers not at all, and without a scale in the checkpoint they would store this layer's cache under 1.0, or under a
number that nobody wrote.

Heads with scales of their own (`--kv-scale head`) need no further statistics: the amax of a head is that of its
channels. A clip of the whole tensor, which the other methods choose from a histogram that does not tell heads apart,
bounds those of its heads: a head's clip is the smaller of the two.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import numpy as np

from ...calibrate.measure.statistics import Statistics, TensorStatistics
from ...core.errors import InputError
from ...options import Clipping
from ..codes.formats import E4M3
from .activation_scales import described, scale_with_margin, tensor_scale, unfit
from .clip import SMALLEST_SCALE, scale_of
from .decisions import TensorScale

#: The pattern of the layers whose attention has a window, as `--kv-cache-dtype-skip-layers` of vLLM names them.
SLIDING = "sliding_window"


def _with_window(attentions: Iterable[str], config: Mapping[str, Any]) -> set[str]:
    """The modules among `attentions` of layers with a sliding window, by the model's `config`."""
    kinds = config.get("layer_types")
    if not kinds:
        return set(attentions) if config.get(SLIDING) else set()
    sliding = {number for number, kind in enumerate(kinds) if kind == "sliding_attention"}
    return {name for name in attentions if sliding.intersection(map(int, re.findall(r"\.(\d+)\.", name)[:1]))}


def bf16_attentions(patterns: Sequence[str], attentions: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """The modules among `attentions`, those that write the cache, which a pattern of `--kv-skip` matches: `SLIDING`
    those of layers with a window, by the model's `config`.

    Raises InputError for a pattern that matches none of them, and when all of them match.
    """
    names = list(dict.fromkeys(attentions))
    matched = set[str]()
    for pattern in patterns:
        sliding = _with_window(names, config) if pattern == SLIDING else set()
        matching = sliding | {name for name in names if fnmatchcase(name, pattern)}
        matched |= matching
        if not matching:
            raise InputError(
                f"--kv-skip {pattern}",
                "matches no attention module",
                f"names are like {', '.join(names[:2]) or 'none'}",
            )
    in_bf16 = [name for name in names if name in matched]
    if names and len(in_bf16) == len(names):
        raise InputError(
            f"--kv-skip {' '.join(patterns)}",
            f"matches the cache of all {len(names)} layers",
            "give --kv-cache off, or skip fewer",
        )
    return in_bf16


def attentions_of(statistics: Statistics) -> list[str]:
    """The attention modules whose keys and values were measured."""
    return [name.removesuffix(".k") for name in statistics.tensors if name.endswith(".k")]


def kv_cache_scales(
    statistics: Statistics,
    clipping: Clipping,
    parts: str = "kv",
    in_bf16: Collection[str] = (),
    heads: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, TensorScale]:
    """Choose the scales of all caches of keys (`k` in `parts`) and of values (`v`); no scales for no parts.

    `in_bf16`: the attention modules whose cache stays in the compute type. `heads`: the heads of keys (`k`) and of
    values (`v`), each of which gets a scale; empty: one scale for each tensor. Raises InputError naming the first
    tensor of another module that has no scale, and a tensor that is not of so many heads.
    """
    scales: dict[str, TensorScale] = {}
    if not parts:
        return scales
    for name, tensor in statistics.tensors.items():
        if not name.endswith(tuple(f".{part}" for part in parts)):
            continue
        module = name.rpartition(".")[0]
        if (reason := unfit(tensor.histogram)) is None:
            scales[name] = scaled_by_head(name, tensor, clipping, heads.get(name[-1]))
        elif module not in in_bf16:
            raise InputError(
                name, reason.reason, f"an FP8 cache has no scale for it, use --kv-skip '{module}' or --kv-cache off"
            )
    if not scales:
        raise InputError("", "no key or value was written to a cache while calibrating", "use --kv-cache off")
    return scales


def scaled_by_head(name: str, tensor: TensorStatistics, clipping: Clipping, heads: int | None) -> TensorScale:
    """Choose the scale of the cache tensor `name`, and of each of its `heads`; None: the tensor's alone.

    A head without any value that a scale can be made of takes the largest of its tensor. Raises InputError for a tensor
    whose channels are not as many heads.
    """
    per_tensor = tensor_scale(tensor.histogram, clipping, amax_batches=tensor.amax_batches)
    if heads is None:
        return per_tensor
    channels = tensor.amax_channels
    if len(channels) % heads:
        raise InputError(
            "--kv-scale head", f"{name} has {len(channels)} channels, and config.json {heads} heads", "leave it out"
        )
    clip = per_tensor.clip / 2.0**clipping.margin
    clips = np.minimum(channels.reshape(heads, -1).max(1), np.float32(clip))
    scales = scale_with_margin(clips, clipping)
    scales[scale_of(clips, E4M3) < SMALLEST_SCALE] = scales.max()
    largest = float(scales.max())
    if largest != per_tensor.scale:  # its clip was above its amax
        per_tensor = described(tensor.histogram, E4M3, clipping, (per_tensor.method, largest * E4M3.max, largest))
    return per_tensor.model_copy(update={"heads": scales.tolist()})


def query_scales(
    queries: Mapping[str, TensorStatistics], clipping: Clipping, heads: int | None = None
) -> dict[str, TensorScale]:
    """Choose the scales of `queries`, `<attention>.q` -> its statistics after the rotary embedding.

    `heads`: the query heads, each of which gets a scale; None: one for all. Raises InputError naming the first that has
    none.
    """
    for name, tensor in queries.items():
        if reason := unfit(tensor.histogram):
            raise InputError(name, reason.reason, "leave out --q-scale")
    return {name: scaled_by_head(name, tensor, clipping, heads) for name, tensor in queries.items()}
