"""Hold one decoder layer of the FP8 reference in memory at a time.

Each part (a layer, or all modules outside the layers) is a model of its own without the weights of the others, made by
`fp8_model.load_reference` from the checkpoint's files, so that it computes what the whole reference computes.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel

from ...calibrate.measure.chain import LayerChain
from ...calibrate.model.decoder import Description, common_output, find_layers, trace_layers
from ...calibrate.model.skeleton import empty
from .fp8_model import Part, Reference, written_config


class ReferenceChain(LayerChain):
    """The FP8 reference whose layers are a chain."""

    def __init__(self, directory: Path, load: Callable[[Part], Reference], dtype: torch.dtype, device: str):
        """Trace two tokens through the checkpoint in `directory`, of which `load` loads a part, all outside FP8 in
        `dtype`, onto `device`.

        Raises NoChainError for a model that is no chain of layers.
        """
        config = written_config(directory)
        del config.quantization_config
        meta = empty(config, dtype)
        self.load = load
        self.device = device
        self.described = Description(str(directory), type(meta).__name__, config.get_text_config())
        self.layers = find_layers(meta, self.described)
        outside = self._part(None)
        calls = trace_layers(outside.model, meta, self.layers, device)
        self.layer_output = common_output(calls, self.layers, self.described)
        self._new_cache = self.load(lambda name: False).new_cache

    def _part(self, index: int | None) -> Reference:
        return self.load(lambda name: self.layers.index(name) == index)

    @contextmanager
    def open_outside(self, head: bool = False) -> Iterator[PreTrainedModel]:
        """Load all modules outside the layers; the output head is among them whatever `head` says."""
        yield self._part(None).model

    @contextmanager
    def open_layer(self, index: int) -> Iterator[PreTrainedModel]:
        """Load one layer; the model yielded has no other weights."""
        yield self._part(index).model

    def caching(self, batch: int) -> AbstractContextManager[DynamicCache | None]:
        """Give a batch an empty cache of the type that the model is served with."""
        return nullcontext(self._new_cache())
