"""Measure a model larger than memory: decoder layer by decoder layer, with hidden states on disk.

Every batch goes through one layer before the next layer is read, so a checkpoint is read once, and memory holds one
layer and one batch whatever the number of layers. The price is two files of hidden states, each 2 · tokens · width
bytes. Layers get the arguments that the model gives them (`decoder`), on the same batches, with the same observers, so
the statistics equal those of the model in memory, bit for bit on the CPU.

On a GPU the next batch's hidden states and the next layer's weights are read and copied while one batch computes, and
the hidden states of the batch before are written (`model.copies`).

A step (the modules before the layers, each layer, the modules after them) reads one file of hidden states, writes the
other, and ends with a file of its statistics; a killed run goes on after the last complete step.

Rows with images enter the first layer with the embeddings of what is seen among those of tokens: the vision part runs
once, before the layers. Features of images that a model adds between its layers are kept like the masks of the row.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from ...core.columns import size as size_text
from ...core.errors import InputError
from ...core.memory import release_memory
from ...core.output_folder import Saved
from ...core.reporter import Reporter
from ..model.classes import non_text_modules
from ..model.copies import Copies, copies_of
from ..model.decoder import LayerCall, LayerOutput, NoChainError, check_row, record_row, run_after
from ..model.expert_modules import routed_gemms
from ..model.gemms import vision_gemms
from ..model.processor import Inputs, on_device
from ..model.source import Source
from .chain import Chain, LayerChain, Observing
from .hidden_states import Batches, HiddenStates, files_in_turn, mapped_calls, states_bytes
from .measurement import Measurement, weight_amax
from .observe import Watch, recorded_groups
from .statistics import Statistics, TensorStatistics, added_tensors, load_arrays, save_arrays

#: The remedy for a disk without the room, besides freeing some.
FEWER_SAMPLES = "name another directory with --out, or ask for fewer --samples"


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
    weights = {name: weights[name] for name in stream.gemms}
    return what.statistics(stream.groups, tensors, weights, routed_gemms(stream.model))


def _added(steps: Iterable[Path]) -> tuple[dict[str, TensorStatistics], dict[str, npt.NDArray[np.float32]]]:
    """Load tensors and weights of all steps; a tensor that occurs in two steps is added."""
    tensors: dict[str, TensorStatistics] = {}
    weights: dict[str, npt.NDArray[np.float32]] = {}
    for step in steps:
        loaded, amax = load_arrays(step)
        tensors = added_tensors(tensors, loaded)
        weights |= amax
    return tensors, weights


@dataclass
class LayerPass:
    """A model's batches on their way through its layers, one layer after the other: the hidden states that enter the
    next layer and those that leave it, in turn, and the arguments of all layers by the shape of a batch, or by its
    number for rows with images, whose arguments are their own.
    """

    chain: LayerChain
    batches: Batches
    states: tuple[HiddenStates, HiddenStates]
    copies: Copies
    calls: dict[tuple[int, ...], list[LayerCall]] = field(default_factory=dict)
    row_calls: dict[int, list[LayerCall]] = field(default_factory=dict)

    @classmethod
    def of(cls, chain: LayerChain, batches: Batches, files: Sequence[Path]) -> Self:
        """Begin a pass with hidden states in two `files`, those of a killed call if they are there."""
        first, second = (HiddenStates(file, batches, chain.layer_output) for file in files)
        return cls(chain, batches, (first, second), copies_of(chain.device))

    def enter(self, done: bool, observing: Observing) -> None:
        """Write the hidden states that enter the first layer, unless that is `done`; find the arguments of layers."""
        self.calls = self.chain.enter(self.batches, None if done else self.states[0].write, observing)
        self.states[0].flush()

    def run(self, index: int, model: torch.nn.Module, observing: Observing) -> None:
        """Run all batches through layer `index` of `model`, each within the block that `observing` gives for it."""
        layer = model.get_submodule(f"{self.chain.layers.prefix}.{index}")
        with self.states[(index + 1) % 2].writing(self.copies) as write:
            for batch, hidden in self.states[index % 2].on_device(self.copies):
                with observing(batch) as cache:
                    write(batch, self._call(batch, index).run(layer, hidden, cache))

    def _call(self, batch: int, index: int) -> LayerCall:
        """The arguments of layer `index` for a batch."""
        if batch in self.row_calls:
            return self.row_calls[batch][index].with_tensors(lambda tensor: tensor.to(self.chain.device))
        return self.calls[self.batches[batch].shape][index]

    def leaving(self, batch: int) -> torch.Tensor:
        """The hidden states of a batch that left the last layer."""
        return self.states[self.chain.layers.count % 2].read(batch, self.chain.device)


def layers_to_run(file: Callable[[int], Path], count: int, report: Reporter) -> range:
    """The steps of `count` layers, from 1, whose `file` of results is not there, with a note where an earlier call
    began; from 0, the step before the layers, where nothing is done.
    """
    done = next((step for step in range(count + 1) if not file(step).is_file()), count + 1)
    if done > 1:
        going_on(report, min(done, count), count)
    return range(done, count + 1)


@dataclass
class LayerSteps(Saved):
    """The progress of a pass over layers, in a file: the steps that have ended, of which the first comes before the
    layers and each other is a layer's. What they gave are fields of subclasses, or files.

    A step that a killed call was in begins anew, so all that the next one reads is on the disk before a step ends.
    """

    steps: int = 0

    def end(self, step: int) -> None:
        """Record that so many steps have ended, and what they gave."""
        self.steps = step
        self.save()

    def layers_left(self, count: int, report: Reporter) -> range:
        """The numbers of those of `count` layers that are left, from 0, with a note where an earlier call began."""
        left = range(max(self.steps - 1, 0), count)
        if left and self.steps > 1:
            going_on(report, self.steps, count)
        return left


class Stream(Chain):
    """The steps of one measurement.

    Invariant: if the statistics of step n exist, the hidden states that step n+1 reads are complete.
    """

    def __init__(self, source: Source, what: Measurement, folder: Path, device: str):
        """Make the model without weights and check the disk's room for the hidden states of all batches.

        Raises InputError where there is too little, and for a model that is no chain of layers.
        """
        super().__init__(source, device)
        self.what = what
        self.folder = folder
        self.vision = [*non_text_modules(self.model)]
        files = files_in_turn(folder, "hidden")
        sizes = dict.fromkeys(files, states_bytes(what.shapes, self.layer_output))
        if what.images:
            self._check_vision()
            additions = self._look_at(what.images[0])
            rows = {self._row_file(batch): {batch: what.shapes[batch]} for batch in self._rows()}
            sizes |= {file: additions * states_bytes(row, self.layer_output) for file, row in rows.items()}
        check_room(folder, sizes, "--stream", FEWER_SAMPLES)
        self.hidden = LayerPass.of(self, what.shapes, files)

    def _check_vision(self) -> None:
        """Raise NoChainError for parameters that text does not reach and that transformers makes of other tensors."""
        for name in self.vision:
            for key, _ in self.model.get_submodule(name).named_parameters(recurse=False):
                if not self.weights.has(f"{name}.{key}"):
                    raise NoChainError(self.described, f"stores {name}.{key} in another form than it computes in")

    def _look_at(self, inputs: Inputs) -> int:
        """Add the groups of the modules that `--vision` names, by the `inputs` of a row with images, and count the
        layers that the model adds features of images in front of.

        Raises NoChainError where the model does anything else between its layers.
        """
        named = vision_gemms(self.model, self.what.vision)
        with self._open_vision():
            with recorded_groups(named) as groups:
                calls, _ = self._record_row(inputs, None)
            moved = on_device(inputs, self.model, self.device)
            check_row(self.model, self.layers, self.layer_output, moved, calls, self.described)
        self.groups |= groups
        self.gemms |= named
        return sum(call.added is not None for call in calls)

    def _open_vision(self) -> AbstractContextManager[None]:
        """Give all modules outside the layers their weights, those that text does not reach too."""
        return self.weights.filled([*self.outside, *self.vision], resident=False)

    def _record_row(self, inputs: Inputs, cache: DynamicCache | None) -> tuple[list[LayerCall], torch.Tensor]:
        moved = on_device(inputs, self.model, self.device)
        return record_row(self.model, self.layers, self.layer_output, moved, cache)

    def run(self, report: Reporter) -> None:
        """Run all steps that are not finished."""
        steps = layers_to_run(self._file, self.layers.count, report)
        if self.what.moments is not None:
            self.what.moments.resume(steps.start, self.what.corpus.batches)
        self._before(0 not in steps, report)
        remaining = [step for step in steps if step]
        with report.track(
            f"Calibrating {len(remaining)} layers, one by one", len(remaining) * self.what.tokens, "tokens"
        ) as advance:
            for step in remaining:
                self._layer(step, advance)
        if self._watched(None).keys() - set(self.vision):
            self._after()

    def _file(self, step: int) -> Path:
        return self.folder / f"{step:05}.safetensors"

    def _rows(self) -> list[int]:
        """The numbers of the batches that are rows with images."""
        return [batch for batch in self.what.sizes if batch not in self.what.parts]

    def _row_file(self, batch: int) -> Path:
        """The file of the arguments of layers for a row with images."""
        return self.folder / f"row-{batch}"

    def _watched(self, layer: int | None) -> dict[str, list[str]]:
        return {first: members for first, members in self.groups.items() if self.layers.index(first) == layer}

    def _watch(self, layer: int | None, step: int, again: bool = False) -> Watch:
        """Make the observers of one layer, or (None) of the modules outside all layers, for `step`.

        `again`: their moments are complete already.
        """
        moments = None if again else self.what.moments
        if moments is not None:
            moments.begin(step)
        watched = self._watched(layer)
        batches = self.what.corpus.batches
        return Watch(self.model, self.gemms, watched, batches, moments, self.what.all_experts)

    def _weight_amax(self, layer: int | None) -> dict[str, npt.NDArray[np.float32]]:
        return {name: weight_amax(module) for name, module in self.gemms.items() if self.layers.index(name) == layer}

    def _before(self, done: bool, report: Reporter) -> None:
        """Step 0: write the hidden states that enter the first layer, unless they are complete (`done`), and find the
        arguments of all layers. Raises InputError when these depend on the text.
        """
        watch = self._watch(None, 0, again=done)
        keep = None if done else self.hidden.states[0].write
        self.hidden.calls = self.enter(self.what.parts, keep, watch.observing)
        if self.what.images:
            self._enter_rows(keep, watch.observing, report)
        self.hidden.states[0].flush()
        if not done:
            outside = [name for name in self.gemms if self.layers.index(name) is None]
            with self.weights.filled(outside, resident=False):
                self._save(0, watch, self._weight_amax(None))

    def _enter_rows(
        self, keep: Callable[[int, torch.Tensor], None] | None, observing: Observing, report: Reporter
    ) -> None:
        """Run rows with images through all that comes before the layers, the vision part among it; `keep` the hidden
        states that enter the first layer, with the embeddings of images among them.

        Masks, positions and features that are added between layers are a row's own, and stay on the disk.
        """
        rows = self._rows()
        with self._open_vision(), report.track("Looking at images", len(rows), "rows") as advance:
            for batch in rows:
                with self.what.blamed(batch), observing(batch) as cache:
                    calls, hidden = self._record_row(self.what.inputs(batch), cache)
                self.hidden.row_calls[batch] = mapped_calls(calls, self._row_file(batch))
                if keep is not None:
                    keep(batch, hidden)
                release_memory()
                advance(1)

    def _layer(self, step: int, advance: Callable[[int], None]) -> None:
        """Step n: run all batches through decoder layer n - 1."""
        index = step - 1
        watch = self._watch(index, step)

        @contextmanager
        def observing(batch: int) -> Iterator[DynamicCache]:
            with watch.observing(batch) as cache:
                yield cache
            advance(self.what.sizes[batch])

        with self.weights.filled(self.inside(index)), torch.inference_mode():
            if step < self.layers.count:
                self.weights.prefetch(self.inside(step))
            self.hidden.run(index, self.model, observing)
            amax = self._weight_amax(index)
        self.hidden.states[step % 2].flush()
        self._save(step, watch, amax)

    def _after(self) -> None:
        """The last step, for models with GEMMs after their layers."""
        watch = self._watch(None, self.layers.count + 1)
        with self._open_vision() if self.what.images else self.weights.filled(self.outside, resident=False):
            for batch in self.what.sizes:
                inputs = on_device(self.what.inputs(batch), self.model, self.device)
                leaving = self.hidden.leaving(batch)
                run_after(self.model, self.layers, self.layer_output, inputs, leaving, watch.observing(batch))
        self._save(self.layers.count + 1, watch, {})

    def _save(self, step: int, watch: Watch, amax: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """End a step: write or spend its moments first, then write its statistics."""
        tensors = watch.statistics()
        if self.what.moments is not None:
            self.what.moments.end(self.what.statistics(self.groups, tensors, {}, routed_gemms(self.model)))
        save_arrays(self._file(step), tensors, amax)


def going_on(report: Reporter, layer: int, count: int) -> None:
    """Note the first of `count` layers that an earlier call did not finish."""
    report.note(f"going on at decoder layer {layer} of {count}, where an earlier call stopped")


def states_in_turn(
    names: Sequence[str],
    batches: Batches,
    output: LayerOutput,
    folder: Path,
    option: str,
    remedy: str = FEWER_SAMPLES,
) -> list[list[HiddenStates]]:
    """Take the room of the disk for the hidden states of the models `names` in `folder`, two files each.

    Raises InputError where there is too little, which names the `option` that needs it and a `remedy`.
    """
    files = [files_in_turn(folder, name) for name in names]
    check_space(folder, [file for pair in files for file in pair], states_bytes(batches, output), option, remedy)
    return [[HiddenStates(file, batches, output) for file in pair] for pair in files]


def check_space(folder: Path, files: Sequence[Path], size: int, option: str, remedy: str = FEWER_SAMPLES) -> None:
    """Raise InputError when the disk has no room for `files` of `size` bytes each; see `check_room`."""
    check_room(folder, dict.fromkeys(files, size), option, remedy)


def check_room(
    folder: Path, sizes: Mapping[Path, int], option: str, remedy: str, what: str = "the hidden states"
) -> None:
    """Raise InputError when the disk of `folder` has no room for files of these `sizes` in bytes.

    `option`: the option that needs them; `remedy`: advice for the message, besides freeing space; `what`: they hold.
    """
    needed = sum(size - (file.stat().st_size if file.is_file() else 0) for file, size in sizes.items())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            option,
            f"{what} take {size_text(sum(sizes.values()))} on the disk of {folder.parent}, which has "
            f"{size_text(free)} free",
            f"free some, {remedy}",
        )
