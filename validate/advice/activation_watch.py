"""Observe the float model on a few windows: the inputs of its norms, its attention logits, and outlier tokens in keys
and values.

Logits are computed in FP32 from the queries and keys in the call of transformers' attention function, after the rotary
embedding; the function itself runs unchanged. Masked logits are left out, and a soft cap is applied.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from ...calibrate.measure.observe import ObservedLayer
from ...calibrate.measure.queries import attention_of, attention_replaced
from ...calibrate.model.caches import new_cache
from ...calibrate.model.gemms import attention_modules
from .criteria import ONE_HOT_NATS

#: The suffix of the names of normalization classes.
NORM = re.compile(r"norm$", re.IGNORECASE)


@dataclass
class Token:
    """A token of the cache: its amax over the median token's, where it stands, and its id."""

    ratio: float
    position: int
    token: int


@dataclass
class LargestValues:
    """The largest values by module; all of it are maxima, but `hot`: rows of attention that are one-hot in FP32, and
    all rows. `tokens`: amax of each token of a cache tensor [windows, seq], a batch after the other.
    """

    norms: dict[str, float] = field(default_factory=dict)
    logits: dict[str, float] = field(default_factory=dict)
    hot: dict[str, tuple[int, int]] = field(default_factory=dict)
    tokens: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    ids: list[torch.Tensor] = field(default_factory=list)

    def outlier(self, tensor: str) -> Token:
        """The token of a cache tensor that stands out most."""
        amax = torch.cat(self.tokens[tensor])
        ids = torch.cat(self.ids)
        worst = int(amax.argmax())
        median = float(amax.median())
        ratio = float(amax.flatten()[worst]) / median if median > 0 else float("inf")
        return Token(ratio, worst % amax.shape[1], int(ids.flatten()[worst]))


class Watcher:
    """Watches a float model."""

    def __init__(self, model: PreTrainedModel):
        """Ready to watch `model`."""
        self.model = model
        self.seen = LargestValues()
        self.attention = attention_modules(model)
        self.names = {id(module): name for name, module in model.named_modules()}
        self.norms = {
            name: module
            for name, module in model.named_modules()
            if NORM.search(type(module).__name__) and not list(module.children())
        }

    @property
    def sees_logits(self) -> bool:
        """Tell whether the model's attention goes through transformers' interface."""
        return attention_of(self.model) is not None

    @contextmanager
    def watching(self, ids: torch.Tensor) -> Iterator[DynamicCache]:
        """Watch the model in the block on `ids` int64 [windows, seq]; yields the cache to run it with."""
        cache = new_cache(
            self.model, {number: ObservedLayer(self._cache(name)) for number, name in self.attention.items()}
        )
        self.seen.ids.append(ids.cpu())
        with ExitStack() as stack:
            for name, module in self.norms.items():
                stack.callback(module.register_forward_pre_hook(self._norm(name)).remove)
            if self.sees_logits:
                stack.enter_context(self._calls())
            yield cache

    def _norm(self, name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def see(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            self.seen.norms[name] = larger(self.seen.norms.get(name, 0.0), float(inputs[0].abs().amax()))

        return see

    def _cache(self, attention: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
        def see(keys: torch.Tensor, values: torch.Tensor) -> None:
            for part, x in (("k", keys), ("v", values)):
                amax = x.abs().amax((1, 3)).float().cpu()
                self.seen.tokens.setdefault(f"{attention}.{part}", []).append(amax)

        return see

    @contextmanager
    def _calls(self) -> Iterator[None]:
        plain = attention_of(self.model)
        assert plain is not None, "it goes through the interface"

        def noting(
            module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any
        ) -> Any:
            mask = rest[0] if rest else options.get("attention_mask")
            self._logits(self.names[id(module)], query, key, mask, options)
            return plain(module, query, key, value, *rest, **options)

        with attention_replaced(self.model, noting):
            yield

    def _logits(
        self, name: str, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]
    ) -> None:
        scaling = options.get("scaling")
        shared = query.shape[1] // key.shape[1]
        for head in range(query.shape[1]):
            logits = head_logits(
                query[:, head], key[:, head // shared], scaling, options.get("softcap"), _of_head(mask, head)
            )
            largest = logits.masked_fill(logits == float("-inf"), 0).abs().amax()
            self.seen.logits[name] = larger(self.seen.logits.get(name, 0.0), float(largest))
            hot, rows = one_hot(logits)
            before = self.seen.hot.get(name, (0, 0))
            self.seen.hot[name] = (before[0] + hot, before[1] + rows)


def larger(before: float, value: float) -> float:
    """Return the larger of two magnitudes; NaN where one is NaN, which Python's `max` passes over."""
    if isnan(before) or isnan(value):
        return before + value
    return max(before, value)


def _of_head(mask: torch.Tensor | None, head: int) -> torch.Tensor | None:
    """The mask of one head, [windows, seq, keys]."""
    if mask is None:
        return None
    return mask[:, head if mask.shape[1] > 1 else 0]


def head_logits(
    query: torch.Tensor,
    key: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The logits of one head's `query` and `key` [windows, seq, size] in front of the softmax, float32 [windows, seq,
    seq].

    They are minus infinity where `mask` (bool, or added to the logits; None: causal) hides a key.
    """
    logits = query.float() @ key.float().transpose(1, 2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is None:
        causal = torch.ones(logits.shape[1:], dtype=torch.bool, device=logits.device).tril()
        return logits.masked_fill(~causal, float("-inf"))
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return logits.masked_fill(~seen[..., : logits.shape[-1]], float("-inf"))


def one_hot(logits: torch.Tensor) -> tuple[int, int]:
    """Count the rows of `logits` [windows, seq, seq] that softmax in FP32 makes one-hot, and those with a choice."""
    if logits.shape[-1] < 2:
        return 0, 0
    first, second = logits.topk(2, -1).values.unbind(-1)
    choice = second > float("-inf")
    return int((choice & (first - second > ONE_HOT_NATS)).sum()), int(choice.sum())
