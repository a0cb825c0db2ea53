"""Load a checkpoint through transformers a part at a time: one decoder layer, or all modules but the layers.

transformers has no such call. Here it gets a subclass of the model's class in which all other modules are empty, so
that it finds, reads and converts the tensors of the part alone, under the names of the whole model: its rules for each
form of quantization, which depend on these names, hold as they do for the whole. A module has therefore the weights,
and quantizes its inputs, as in the model loaded at once (`endpoint.transformers_loader`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ...calibrate.checkpoint.recognizer import QUANTIZATION_KEYS
from ...calibrate.measure.chain import LayerChain
from ...calibrate.model.decoder import (
    Description,
    common_output,
    find_layers,
    outputs_behind,
    trace_layers,
)
from ...calibrate.model.skeleton import empty
from ...core.errors import InputError
from ...core.memory import release_memory
from ...quantize.reading.codecs import CODECS
from ..endpoint.transformers_loader import TransformersLoader
from .models import quantization_of, running_by_transformers
from .module_errors import matrices


class CheckpointChain(LayerChain):
    """The model of a checkpoint as transformers loads it."""

    def __init__(self, path: Path, subject: str, device: str, dtype: torch.dtype | None = None):
        """Read the model in `dtype`, or (None) its own, onto `device`; `subject` stands before `path` in errors.

        Raises InputError for what transformers does not load, and NoChainError for a model that is no chain of layers.
        """
        self.path = path
        self.device = device
        self.loader = TransformersLoader(path, subject, device, dtype)
        self.model = self.loader.empty
        text_config = self.model.config.get_text_config()
        self.described = Description(f"{subject}{path}", type(self.model).__name__, text_config)
        self.layers = find_layers(self.model, self.described)
        with self.open_outside() as model:
            calls = trace_layers(model, self._meta(model.dtype), self.layers, device)
        self.layer_output = common_output(calls, self.layers, self.described)

    def _meta(self, dtype: torch.dtype) -> PreTrainedModel:
        """The model on the meta device, where its layers can run: with each expert as a module."""
        config = deepcopy(self.model.config)
        for key in QUANTIZATION_KEYS:
            vars(config).pop(key, None)
        with self.loader.loading():
            return empty(config, dtype)

    @contextmanager
    def open_outside(self, head: bool = False) -> Iterator[PreTrainedModel]:
        """Load all modules outside the layers; the output head is among them whatever `head` says."""
        yield self._outside()

    def _outside(self) -> PreTrainedModel:
        model = self._part(lambda name: self.layers.index(name) is None)
        for index, layer in enumerate(self.layers.modules(self.model)):  # the model reads their attributes
            model.set_submodule(f"{self.layers.prefix}.{index}", layer)
        return model

    @contextmanager
    def open_layer(self, index: int) -> Iterator[PreTrainedModel]:
        """Load one layer; the model yielded has nothing else."""
        name = f"{self.layers.prefix}.{index}"
        yield self._part(lambda module: self.layers.index(module) == index or name.startswith(f"{module}."))

    def _part(self, wanted: Callable[[str], bool]) -> PreTrainedModel:
        """Load the modules with `wanted` names, ready to run."""
        kind = _part_of(type(self.model), wanted)
        layers = self.layers.prefix.rpartition(".")[2]

        def in_part(tensor: str) -> bool:
            _, inside, rest = f".{tensor}".partition(f".{layers}.")  # files may lack the prefix of the base model
            number = rest.partition(".")[0]
            if not inside or not number.isdecimal() or int(number) >= self.layers.count:
                return wanted(tensor.rpartition(".")[0])
            return wanted(f"{self.layers.prefix}.{number}")

        model = self.loader.load(kind, in_part)
        with running_by_transformers(self.path):
            for hook in list(model._forward_pre_hooks.values()):  # with which compressed-tensors decompresses weights
                hook(model, ())
        return model

    def check(self) -> None:
        """Load each part and run one token through it; raises InputError or BackendError as for the whole model."""
        entering: list[torch.Tensor] = []
        ids = np.zeros((1, 1), np.int64)
        with running_by_transformers(self.path):
            calls = self.enter(
                {0: ids}, lambda batch, states: entering.append(states), lambda batch: nullcontext(None)
            )[ids.shape]
            hidden = entering[0]
            for index, call in enumerate(calls):
                with self.open_layer(index) as model:
                    hidden = call.run(self.layers.modules(model)[index], hidden, None)
                del model
                release_memory()
            with self.open_outside(head=True) as model:
                outputs_behind(model, self.layers, self.layer_output, torch.from_numpy(ids).to(self.device), hidden)


def _part_of(kind: type[PreTrainedModel], wanted: Callable[[str], bool]) -> type[PreTrainedModel]:
    """Make a subclass of `kind` in which modules without `wanted` names are empty; it has the name of `kind`, by which
    transformers finds its rules.
    """

    def build(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        emptied = ""
        for name in [name for name, _ in self.named_modules() if name and not wanted(name)]:
            if not emptied or not name.startswith(f"{emptied}."):
                self.set_submodule(name, nn.Identity())
                emptied = name
        left = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        tied = self.all_tied_weights_keys.items()
        self.all_tied_weights_keys = {name: other for name, other in tied if {name, other} <= left}

    return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})


def check_streamed_form(path: Path, config: Mapping[str, Any], option: str) -> None:
    """Raise InputError for a form of quantization that is not computed layer by layer."""
    form = quantization_of(path, config)
    if form is not None and not form.startswith((*CODECS,)):
        raise InputError(
            f"{option}{path}",
            f"is in the form {form}, which is not compared layer by layer",
            "give --no-stream, and memory for whole models",
        )


class LayerMatrices(Mapping[str, torch.Tensor]):
    """Module -> its weight [out, in], of a model whose parts are loaded as they are asked for, one at a time."""

    def __init__(self, chain: LayerChain):
        """Read the weights of `chain`."""
        self.chain = chain
        self.part: tuple[int | None, Mapping[str, torch.Tensor]] | None = None

    def _of(self, part: int | None) -> Mapping[str, torch.Tensor]:
        """The weights of one layer, or (None) outside the layers."""
        if self.part is None or self.part[0] != part:
            self.part = None
            release_memory()
            index = self.chain.layers.index
            with self.chain.open_outside(head=True) if part is None else self.chain.open_layer(part) as model:
                self.part = part, matrices(model, lambda name: index(name) == part)
        return self.part[1]

    def __getitem__(self, name: str) -> torch.Tensor:
        """The weight of the module `name`."""
        return self._of(self.chain.layers.index(name))[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the modules, those of a part together."""
        for part in (None, *range(self.chain.layers.count)):
            yield from self._of(part)

    def __len__(self) -> int:
        """Count the modules, which loads all parts."""
        return sum(1 for _ in self)
