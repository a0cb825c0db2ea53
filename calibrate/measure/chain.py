"""Hold one decoder layer of a model in memory at a time: what reads the layers, and what calls them.

`LayerChain` is what a pass over the layers needs, whoever reads the weights; `Chain` reads a source checkpoint, whose
tensors fp8q names and dequantizes itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from ..input.silence import quiet_transformers
from ..model.adapter_addition import attach_adapter
from ..model.bf16_gemms import compute_gemms_in_fp32
from ..model.caches import new_cache
from ..model.decoder import (
    Described,
    LayerCall,
    LayerOutput,
    Layers,
    NoChainError,
    common_output,
    equal_calls,
    find_layers,
    leaving_layers,
    record_calls,
    standing_in,
    trace_layers,
)
from ..model.gemms import language_modules, observed_gemms, output_head
from ..model.materialize import Materializer
from ..model.skeleton import skeleton
from ..model.source import Source, meta_model
from .hidden_states import Batches
from .observe import recorded_groups

#: Gives the cache for a batch, by its number; None where the model runs without one.
Observing = Callable[[int], AbstractContextManager[DynamicCache | None]]


class LayerChain(ABC):
    """A model whose layers are a chain, of which one layer has weights at a time.

    `described` is the checkpoint in messages.
    """

    described: Described
    device: str
    layers: Layers
    layer_output: LayerOutput

    @abstractmethod
    def open_outside(self, head: bool = False) -> AbstractContextManager[PreTrainedModel]:
        """Give the modules outside the layers their weights in this block, the output `head` where asked for; yield the
        model, whose layers have none.
        """

    @abstractmethod
    def open_layer(self, index: int) -> AbstractContextManager[PreTrainedModel]:
        """Give one layer its weights in this block; yield the model."""

    def caching(self, batch: int) -> AbstractContextManager[DynamicCache | None]:
        """Give the cache that the model runs a batch with where nothing is observed: by default it runs without one."""
        return nullcontext()

    def enter(
        self, batches: Batches, keep: Callable[[int, torch.Tensor], None] | None, observing: Observing | None = None
    ) -> dict[tuple[int, ...], list[LayerCall]]:
        """Record the arguments of all layers for each shape of batch.

        `keep` receives each batch's hidden states that enter the first layer; where it is None, one batch of each shape
        is run. `observing` None: each batch gets a new cache.

        Raises NoChainError when the arguments depend on the text.
        """
        calls: dict[tuple[int, ...], list[LayerCall]] = {}
        with self.open_outside() as model:
            for batch, ids in batches.items():
                if keep is None and ids.shape in calls:
                    continue
                tokens = torch.from_numpy(ids).to(self.device)
                with observing(batch) if observing else nullcontext(new_cache(model)) as cache:
                    recorded, hidden = record_calls(model, self.layers, self.layer_output, {"input_ids": tokens}, cache)
                if not equal_calls(calls.setdefault(ids.shape, recorded), recorded):
                    raise NoChainError(self.described, "gives its decoder layers more of the text than hidden states")
                if keep is not None:
                    keep(batch, hidden)
        return calls


def cloned_calls(calls: Mapping[tuple[int, ...], list[LayerCall]]) -> dict[tuple[int, ...], list[LayerCall]]:
    """Clone all tensors of `calls`, each once: gradients may pass by clones, not by what inference mode made."""
    copies: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return copies.setdefault(id(tensor), tensor.clone())

    return {shape: [call.with_tensors(copy) for call in made] for shape, made in calls.items()}


class Chain(LayerChain):
    """A model without weights whose layers are a chain, proven by two tokens, and the form of their output."""

    def __init__(self, source: Source, device: str, dtype: torch.dtype = torch.bfloat16, rounded: bool = True):
        """Build the model, to compute in `dtype` with weights as `Materializer` has them, and trace two tokens through
        it.

        Raises InputError for a model that is no chain of layers.
        """
        with quiet_transformers():
            self.model = skeleton(deepcopy(source.config), dtype)
        compute_gemms_in_fp32(self.model, dtype, device)
        if source.on:
            attach_adapter(self.model, source.on, dtype, device)
        self.source = source
        self.described = source
        self.device = device
        self.gemms = observed_gemms(self.model)
        self.weights = Materializer(self.model, source, device, dtype, rounded)
        self.layers = find_layers(self.model, source)
        self.outside = [
            name
            for name in language_modules(self.model)
            if self.layers.index(name) is None and name != output_head(self.model)
        ]
        self.groups, self.layer_output = self._probe()

    def _probe(self) -> tuple[dict[str, list[str]], LayerOutput]:
        """Find the groups of modules that receive the same tensor, and the form of a layer's output, without the
        weights of any layer.
        """
        meta = meta_model(self.source)
        inside = observed_gemms(meta)
        modules = {
            name: module if self.layers.index(name) is None else inside[name] for name, module in self.gemms.items()
        }
        with self.weights.filled(self.outside, resident=False), recorded_groups(modules) as groups:
            calls = trace_layers(self.model, meta, self.layers, self.device)
        return groups, common_output(calls, self.layers, self.source)

    def inside(self, layer: int) -> list[str]:
        """The names of all modules of one layer."""
        return [name for name, _ in self.model.named_modules() if self.layers.index(name) == layer]

    @contextmanager
    def open_outside(self, head: bool = False) -> Iterator[PreTrainedModel]:
        """Leave BF16 weights on the CPU in their mapped files."""
        behind = [name for name in [output_head(self.model)] if head and name is not None]
        with self.weights.filled([*self.outside, *behind], resident=False):
            yield self.model

    @contextmanager
    def open_layer(self, index: int) -> Iterator[PreTrainedModel]:
        """Copy the weights of one layer to memory."""
        with self.weights.filled(self.inside(index)):
            yield self.model

    def ends(self) -> tuple[str, nn.Embedding, str]:
        """Return the name of the embedding of the model, the embedding, and the name of the output head.

        Raises NoChainError for a model that looks tokens up in another module, or makes logits in none.
        """
        embedding = self.model.get_input_embeddings()
        head = output_head(self.model)
        if not isinstance(embedding, nn.Embedding):
            raise NoChainError(
                self.described, f"looks tokens up in {type(embedding).__name__}, which is no nn.Embedding"
            )
        if head is None:
            raise NoChainError(self.described, "names no module that makes the logits")
        return next(name for name, module in self.model.named_modules() if module is embedding), embedding, head

    @contextmanager
    def behind_layers(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Fill what comes behind the layers; yield a function from the hidden states [windows, positions, width] that
        leave the last layer to their logits. The embedding is not read.
        """
        name, embedding, head = self.ends()
        needed = [module for module in self.outside if module != name and not module.startswith(f"{name}.")]
        leaving: list[torch.Tensor] = []

        def blank(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.zeros((*ids.shape, embedding.embedding_dim), device=self.device)

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            leaving[:] = [hidden]
            ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=self.device)
            output: torch.Tensor = self.model(
                input_ids=ids, past_key_values=new_cache(self.model), use_cache=True
            ).logits
            return output

        with (
            self.weights.filled([*needed, head]),
            leaving_layers(self.model, self.layers, self.layer_output, lambda: leaving[0]),
            standing_in([embedding], [blank]),
        ):
            yield logits
