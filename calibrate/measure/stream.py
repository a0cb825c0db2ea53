"""Measure a model larger than memory: decoder layer by decoder layer, with hidden states on disk.

Every batch goes through one layer before the next layer is read, so a checkpoint is read once, and memory holds one
layer and one batch whatever the number of layers. The price is two files of hidden states, each 2 · tokens · width
bytes. Layers get the arguments that the model gives them (`decoder`), on the same batches, with the same observers, so
the statistics equal those of the model in memory, bit for bit on the CPU.

On a GPU the next batch's hidden states and the next layer's weights are read and copied while one batch computes, and
the hidden states of the batch before are written (`model.copies`).

A step (the modules before the layers, each layer, the modules after them) reads one file of hidden states, writes the
other, and ends with a file of its statistics; a killed run goes on after the last complete step.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import DynamicCache

from ...core.columns import size as size_text
from ...core.errors import InputError
from ...core.reporter import Reporter
from ..input.silence import quiet_transformers
from ..model.adapter_addition import attach_adapter
from ..model.bf16_products import widen_products
from ..model.copies import copies_of
from ..model.decoder import (
    LayerCall,
    LayerOutput,
    NoChainError,
    common_output,
    equal_calls,
    find_layers,
    record_calls,
    run_after,
    standing_in,
    trace_layers,
)
from ..model.expert_modules import routed_products
from ..model.materialize import Materializer
from ..model.products import language_modules, observed_products, output_head
from ..model.skeleton import skeleton
from ..model.source import Source, meta_model
from .hidden_states import Batches, HiddenStates
from .measurement import Measurement, weight_amax
from .observe import Watch, recorded_groups
from .statistics import Statistics, TensorStatistics, load_arrays, save_arrays


def measure_streamed(
    source: Source, what: Measurement, report: Reporter, folder: Path, device: str = "cpu"
) -> Statistics:
    """`measure` for the model in `source` on `device`, with one decoder layer in memory at a time.

    `folder` exists and holds the hidden states and the finished steps. A killed call's files there are continued, so it
    must have had the same arguments, and `what.moments` must be kept. Raises InputError for a model that is no chain of
    layers, and when the disk has no room for the hidden states.
    """
    stream = Stream(source, what, folder, device)
    stream.run(report)
    tensors, weights = _added(sorted(folder.glob("*.safetensors")))
    weights = {name: weights[name] for name in stream.products}
    return what.statistics(stream.groups, tensors, weights, routed_products(stream.model))


def _added(steps: Iterable[Path]) -> tuple[dict[str, TensorStatistics], dict[str, npt.NDArray[np.float32]]]:
    """Load tensors and weights of all steps; a tensor that occurs in two steps is added."""
    tensors: dict[str, TensorStatistics] = {}
    weights: dict[str, npt.NDArray[np.float32]] = {}
    for step in steps:
        loaded, amax = load_arrays(step)
        tensors |= {name: tensors[name].merge(tensor) if name in tensors else tensor for name, tensor in loaded.items()}
        weights |= amax
    return tensors, weights


class Chain:
    """A model without weights whose layers are a chain, proven by two tokens, and the form of their output."""

    def __init__(self, source: Source, device: str, dtype: torch.dtype = torch.bfloat16, rounded: bool = True):
        """Build the model, to compute in `dtype` with weights as `Materializer` has them, and trace two tokens through
        it.

        Raises InputError for a model that is no chain of layers.
        """
        with quiet_transformers():
            self.model = skeleton(deepcopy(source.config), dtype)
        widen_products(self.model, dtype, device)
        if source.on:
            attach_adapter(self.model, source.on, dtype, device)
        self.source, self.device = source, device
        self.products = observed_products(self.model)
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
        inside = observed_products(meta)
        modules = {
            name: module if self.layers.index(name) is None else inside[name] for name, module in self.products.items()
        }
        with self.weights.filled(self.outside, resident=False), recorded_groups(modules) as groups:
            calls = trace_layers(self.model, meta, self.layers, self.device)
        return groups, common_output(calls, self.layers, self.source)

    def inside(self, layer: int) -> list[str]:
        """The names of all modules of one layer."""
        return [name for name, _ in self.model.named_modules() if self.layers.index(name) == layer]

    def enter(
        self,
        batches: Batches,
        keep: Callable[[int, torch.Tensor], None] | None,
        observing: Callable[[int], AbstractContextManager[DynamicCache]] = lambda batch: nullcontext(DynamicCache()),
    ) -> dict[tuple[int, ...], list[LayerCall]]:
        """Record the arguments of all layers for each shape of batch.

        `keep` receives each batch's hidden states that enter the first layer; where it is None, one batch of each shape
        is run. `observing` gives the cache for a batch, by its number.

        Raises NoChainError when the arguments depend on the text.
        """
        calls: dict[tuple[int, ...], list[LayerCall]] = {}
        with self.weights.filled(self.outside, resident=False):
            for batch, ids in batches.items():
                if keep is None and ids.shape in calls:
                    continue
                tokens = torch.from_numpy(ids).to(self.device)
                with observing(batch) as cache:
                    recorded, hidden = record_calls(self.model, self.layers, self.layer_output, tokens, cache)
                if not equal_calls(calls.setdefault(ids.shape, recorded), recorded):
                    raise NoChainError(self.source, "gives its decoder layers more of the text than hidden states")
                if keep is not None:
                    keep(batch, hidden)
        return calls

    @contextmanager
    def behind_layers(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Fill what comes behind the layers; yield a function from the hidden states [windows, positions, width] that
        leave the last layer to their logits. The embedding is not read.
        """
        embedding, head = self.model.get_input_embeddings(), output_head(self.model)
        assert isinstance(embedding, nn.Embedding), "tokens are looked up"
        assert head is not None, "a causal language model makes logits"
        (name,) = (name for name, module in self.model.named_modules() if module is embedding)
        needed = [module for module in self.outside if module != name and not module.startswith(f"{name}.")]
        leaving: list[torch.Tensor] = []

        def blank(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return torch.zeros((*ids.shape, embedding.embedding_dim), device=self.device)

        def pass_on(*args: Any, **kwargs: Any) -> Any:
            return self.layer_output.wrap(LayerCall.split(args, kwargs)[1])

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            leaving[:] = [hidden]
            ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=self.device)
            output: torch.Tensor = self.model(input_ids=ids, past_key_values=DynamicCache(), use_cache=True).logits
            return output

        stands = [pass_on] * (self.layers.count - 1) + [lambda *args, **kwargs: self.layer_output.wrap(leaving[0])]
        with (
            self.weights.filled([*needed, head]),
            standing_in([*self.layers.modules(self.model), embedding], [*stands, blank]),
        ):
            yield logits


class Stream(Chain):
    """The steps of one measurement.

    Invariant: if the statistics of step n exist, the hidden states that step n+1 reads are complete.
    """

    def __init__(self, source: Source, what: Measurement, folder: Path, device: str):
        """Make the model without weights and check the disk's room for the hidden states of `what.parts`.

        Raises InputError where there is too little, and for a model that is no chain of layers.
        """
        super().__init__(source, device)
        self.what, self.folder, self.copies = what, folder, copies_of(device)
        size = what.tokens * self.layer_output.width * self.layer_output.dtype.itemsize
        files = [folder / f"hidden-{parity}" for parity in range(2)]
        check_space(folder, files, size, "--stream")
        self.hidden = [HiddenStates(file, what.parts, self.layer_output) for file in files]

    def run(self, report: Reporter) -> None:
        """Run all steps that are not finished."""
        done = next(
            step for step in range(self.layers.count + 2) if not self._file(step).is_file() or step > self.layers.count
        )
        if done > 1:
            going_on(report, min(done, self.layers.count), self.layers.count)
        calls = self._before(done > 0)
        remaining = range(max(done, 1), self.layers.count + 1)
        with report.track(
            f"Calibrating {len(remaining)} layers, one by one", len(remaining) * self.what.tokens, "tokens"
        ) as advance:
            for step in remaining:
                self._layer(step, calls, advance)
        if self._watched(None):
            self._after()

    def _file(self, step: int) -> Path:
        return self.folder / f"{step:05}.safetensors"

    def _watched(self, layer: int | None) -> dict[str, list[str]]:
        return {first: members for first, members in self.groups.items() if self.layers.index(first) == layer}

    def _watch(self, layer: int | None, again: bool = False) -> Watch:
        """Make the observers of one layer, or (None) of the modules outside all layers.

        `again`: their moments are complete already.
        """
        moments = None if again else self.what.moments
        watched, batches = self._watched(layer), self.what.corpus.batches
        return Watch(self.model, self.products, watched, batches, moments, self.what.all_experts)

    def _weight_amax(self, layer: int | None) -> dict[str, npt.NDArray[np.float32]]:
        return {name: weight_amax(module) for name, module in self.products.items() if self.layers.index(name) == layer}

    def _tokens(self, batch: int) -> torch.Tensor:
        return torch.from_numpy(self.what.parts[batch]).to(self.device)

    def _before(self, done: bool) -> dict[tuple[int, ...], list[LayerCall]]:
        """Step 0: write the hidden states that enter the first layer; return the arguments of all layers by shape.

        `done`: the hidden states are complete, and one batch of each shape is run. Raises InputError when the arguments
        depend on the text.
        """
        watch = self._watch(None, again=done)
        calls = self.enter(self.what.parts, None if done else self.hidden[0].write, watch.observing)
        if not done:
            self.hidden[0].flush()
            outside = [name for name in self.products if self.layers.index(name) is None]
            with self.weights.filled(outside, resident=False):
                self._save(0, watch, self._weight_amax(None))
        return calls

    def _layer(
        self, step: int, calls: Mapping[tuple[int, ...], list[LayerCall]], advance: Callable[[int], None]
    ) -> None:
        """Step n: run all batches through decoder layer n - 1."""
        index = step - 1
        before, after = self.hidden[index % 2], self.hidden[step % 2]
        layer = self.layers.modules(self.model)[index]
        watch = self._watch(index)
        with (
            self.weights.filled(self.inside(index)),
            torch.inference_mode(),
            after.writing(self.copies) as write,
        ):
            if step < self.layers.count:
                self.weights.prefetch(self.inside(step))
            for batch, hidden in before.each(self.copies):
                ids = self.what.parts[batch]
                with watch.observing(batch) as cache:
                    write(batch, calls[ids.shape][index].run(layer, hidden, cache))
                advance(ids.size)
            amax = self._weight_amax(index)
        after.flush()
        self._save(step, watch, amax)

    def _after(self) -> None:
        """The last step, for models with matrix products after their layers."""
        leaving = self.hidden[self.layers.count % 2]
        watch = self._watch(None)
        with self.weights.filled(self.outside, resident=False):
            for batch in self.what.parts:
                run_after(
                    self.model,
                    self.layers,
                    self.layer_output,
                    self._tokens(batch),
                    leaving.read(batch, self.device),
                    watch.observing(batch),
                )
        self._save(self.layers.count + 1, watch, {})

    def _save(self, step: int, watch: Watch, amax: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """End a step: write its moments first, then its statistics."""
        if self.what.moments is not None:
            self.what.moments.close()
        save_arrays(self._file(step), watch.statistics(), amax)


def going_on(report: Reporter, layer: int, count: int) -> None:
    """Note the first of `count` layers that an earlier call did not finish."""
    report.note(f"going on at decoder layer {layer} of {count}, where an earlier call stopped")


def check_space(
    folder: Path,
    files: Sequence[Path],
    size: int,
    option: str,
    remedy: str = "name another directory with --out, or ask for fewer --samples",
) -> None:
    """Raise InputError when the disk has no room for `files` of `size` bytes each.

    `option`: the option that needs them; `remedy`: advice for the message, besides freeing space.
    """
    needed = sum(size - (file.stat().st_size if file.is_file() else 0) for file in files)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            option,
            f"the hidden states take {size_text(len(files) * size)} on the disk of {folder.parent}, which has "
            f"{size_text(free)} free",
            f"free some, {remedy}",
        )
