"""Measure the KL of one site: the model runs with this site quantized and nothing else.

The layers before the site's decoder layer are unchanged, so they are not run again: the hidden states of the float
model are reused. A model that is no chain of layers runs as a whole.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from ...calibrate.measure.scoring import kl_terms
from ...calibrate.model.caches import new_cache
from ...calibrate.model.decoder import (
    LayerOutput,
    Layers,
    NoChainError,
    common_output,
    find_layers,
    standing_in,
    trace_layers,
)
from ...calibrate.model.source import Source, meta_model
from .document import Site
from .gradients import next_token_log_probabilities
from .site_quantizers import Quantizer


@dataclass(frozen=True)
class Prefix:
    """The layers before a site's layer, which can be skipped in a model that is a chain of layers: they hand on stored
    hidden states.
    """

    layers: Layers
    answer: LayerOutput

    @classmethod
    def from_model(cls, quantizer: Quantizer, source: Source, device: str) -> "Prefix | None":
        """Find the layers of the model; None where the model is no chain of layers."""
        try:
            layers = find_layers(quantizer.model, source)
            return cls(
                layers, common_output(trace_layers(quantizer.model, meta_model(source), layers, device), layers, source)
            )
        except NoChainError:
            return None

    def share(self, site: Site) -> float:
        """The share of the layers that run when `site` is measured."""
        return 1 - (self.layers.index(site.module) or 0) / self.layers.count


class Float:
    """The float model's output for a batch of windows: log-probabilities, and the hidden states that layers get."""

    def __init__(self, quantizer: Quantizer, ids: torch.Tensor, prefix: Prefix | None, sites: Sequence[Site]):
        """Run `ids` int64 [windows, seq_len] and store the hidden states that measuring `sites` continues from."""
        self.quantizer = quantizer
        self.ids = ids
        self.prefix = prefix
        self._entering: dict[int, torch.Tensor] = {}
        wanted = {prefix.layers.index(site.module) or 0 for site in sites} - {0} if prefix else set()
        with ExitStack() as stack:
            for index in wanted:
                layer = prefix.layers.modules(quantizer.model)[index] if prefix else None
                assert layer is not None, "without a prefix no layer is wanted"
                stack.callback(layer.register_forward_pre_hook(self._keep(index), with_kwargs=True).remove)
            self.log_p = self._run(new_cache(quantizer.model))

    def _keep(self, index: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._entering[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    def divergence(self, site: Site) -> float:
        """KL(float || with `site` quantized) in nats, summed over the tokens that are predicted."""
        with self.quantizer.alone(site) as cache, self._behind(site):
            log_q = self._run(cache)
        return float(kl_terms(self.log_p, log_q).sum(dtype=torch.float64))

    @contextmanager
    def _behind(self, site: Site) -> Iterator[None]:
        """Let the layers before that of `site` return the stored hidden states, in the block."""
        index = self.prefix.layers.index(site.module) if self.prefix else None
        if self.prefix is None or index not in self._entering:
            yield
            return
        entering = self.prefix.answer.wrap(self._entering[index])
        before = self.prefix.layers.modules(self.quantizer.model)[:index]
        with standing_in(before, [lambda *args, **kwargs: entering] * len(before)):
            yield

    def _run(self, cache: DynamicCache) -> torch.Tensor:
        with torch.inference_mode():
            prompt = self.quantizer.prompt(self.ids.shape[1])
            return next_token_log_probabilities(self.quantizer.model, self.ids, cache, prompt)
