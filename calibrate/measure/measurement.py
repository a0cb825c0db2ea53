"""Describe one measurement, in memory or streamed (`stream`), and measure a model that fits in memory.

Its progress is saved now and then, so that a killed call goes on after the last batch saved. Statistics of batches are
added exactly, so those of the batches before and after are those of all, byte for byte. Second moments are summed in
files that change with each batch: what is saved are copies, of which one is complete at any time. A call that goes on
adds the same batches in the same order, so these are equal too.
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ...core.errors import InputError
from ...core.files import reading, replacing
from ...core.memory import release_memory
from ...core.reporter import Reporter
from ..input.untrusted import error_text, foreign
from ..model.expert_modules import routed_gemms
from ..model.gemms import observed_gemms, output_channel_axis, vision_gemms
from ..model.processor import Inputs, RowInputs
from .moments import SecondMoments
from .observe import Watch, image_groups, probe_groups
from .statistics import (
    Corpus,
    ModelIdentity,
    Statistics,
    StatisticsRecord,
    TensorStatistics,
    added_tensors,
    load_arrays,
    save_arrays,
)

#: Seconds between two times that the progress is saved, at least, and the share of the time that saving may take.
EVERY_S = 60.0
SHARE = 0.02


@dataclass(frozen=True, eq=False)
class Measurement:
    """A measurement of the model `identity` on `windows` int64 [windows, seq_len] of `corpus`, in batches of its size.

    `batches`: indices of the batches to run, in that order; None for all. `moments`: the store that second moments of
    the inputs are added to; None for none. `all_experts`: run every expert on every token. `images`: the rows with
    images of the corpus, each a batch of its own behind those of the windows. `vision`: shell patterns of linear layers
    that text does not reach, which are observed where rows with images run.
    """

    windows: npt.NDArray[np.int64]
    identity: ModelIdentity
    corpus: Corpus
    batches: Sequence[int] | None = None
    moments: SecondMoments | None = None
    all_experts: bool = False
    images: RowInputs | None = None
    vision: Sequence[str] = ()

    @cached_property
    def parts(self) -> dict[int, npt.NDArray[np.int64]]:
        """Index of a batch of windows -> int64 [at most batch_size, seq_len], in the order in which they run."""
        size = self.corpus.batch_size
        chosen = range(self._first_row) if self.batches is None else self.batches
        return {batch: self.windows[batch * size : (batch + 1) * size] for batch in chosen if batch < self._first_row}

    @property
    def _first_row(self) -> int:
        """The index of the first batch that is a row with images."""
        return self.corpus.batches - len(self.images or ())

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Index of a batch -> the number of its tokens, in the order in which they run, rows with images last."""
        rows = self.images.rows if self.images else ()
        sizes = {batch: ids.size for batch, ids in self.parts.items()}
        return sizes | {batch: row.tokens for batch, row in enumerate(rows, self._first_row)}

    @cached_property
    def shapes(self) -> dict[int, npt.NDArray[np.int64]]:
        """Index of a batch -> an array of the shape of its tokens, in the order in which they run: those of windows,
        and for each row with images one that holds nothing.
        """
        rows = {batch: size for batch, size in self.sizes.items() if batch not in self.parts}
        nothing = np.zeros((), np.int64)
        return self.parts | {batch: np.broadcast_to(nothing, (1, size)) for batch, size in rows.items()}

    def inputs(self, batch: int) -> Inputs:
        """Make the model's inputs of a batch; raises InputError for a row with images that is not as it was."""
        if self.images and batch >= self._first_row:
            return self.images[batch - self._first_row]
        return {"input_ids": torch.from_numpy(self.parts[batch])}

    def blamed(self, batch: int) -> AbstractContextManager[None]:
        """Turn what the model raises in the block over a row with images into InputError."""
        if self.images is None or batch < self._first_row:
            return nullcontext()
        where = self.images.rows[batch - self._first_row].where
        return foreign(
            lambda error: InputError(where, f"the model refuses it: {error_text(error)}", "leave the row out"),
            torch.OutOfMemoryError,
        )

    @property
    def tokens(self) -> int:
        """The number of tokens that run through the model."""
        return sum(self.sizes.values())

    def statistics(
        self,
        groups: dict[str, list[str]],
        tensors: dict[str, TensorStatistics],
        weights: Mapping[str, npt.NDArray[np.float32]],
        experts: dict[str, list[str]],
    ) -> Statistics:
        """Make statistics of the measured `tensors` and `weights`, with their record; `experts` as in
        `StatisticsRecord`.
        """
        record = StatisticsRecord(
            model=self.identity,
            corpus=self.corpus,
            tokens=self.tokens,
            groups=groups,
            experts=experts or None,
            all_experts=self.all_experts or None,
        )
        return Statistics(record, tensors, dict(weights))


class SavedBatches:
    """The statistics and second moments of the first batches of a measurement, in a folder."""

    def __init__(self, folder: Path, moments: SecondMoments | None):
        """Save inside `folder`, which exists, with the sums of `moments`."""
        self.folder = folder / "batches"
        self.moments = moments
        self._next = time.monotonic() + EVERY_S

    def load(self, batches: int) -> tuple[int, dict[str, TensorStatistics]]:
        """Return how many of so many `batches` an earlier call measured, and their statistics; go on with its second
        moments.
        """
        if self.moments is not None:
            shutil.rmtree(self.moments.folder)
            self.moments.folder.mkdir()
            self.moments.go_on(self.folder / "moments", batches)
        if not self.folder.is_dir():
            return 0, {}
        with reading(self.folder, "what a killed call left", "remove it"):
            count = int((self.folder / "count").read_text(encoding="utf-8"))
        return count, load_arrays(self.folder / "statistics.safetensors")[0]

    def is_due(self) -> bool:
        """Tell whether it is time to save: on a disk without the room it never is."""
        sums = self.moments.bytes if self.moments is not None else 0
        return time.monotonic() >= self._next and 2 * sums <= shutil.disk_usage(self.folder.parent).free

    def save(self, count: int, tensors: Mapping[str, TensorStatistics]) -> None:
        """Save the statistics `tensors` of the first `count` batches, and the second moments as they are."""
        begin = time.monotonic()
        with replacing(self.folder) as partial:
            partial.mkdir()
            save_arrays(partial / "statistics.safetensors", tensors, {})
            if self.moments is not None:
                self.moments.copy(partial / "moments")
            (partial / "count").write_text(str(count), encoding="utf-8")
        end = time.monotonic()
        self._next = end + max(EVERY_S, (end - begin) / SHARE)


def measure_in_memory(
    model: PreTrainedModel, what: Measurement, report: Reporter, folder: Path | None = None
) -> Statistics:
    """Run `model` on the batches of `what` and observe each tensor that can be quantized, without the output head.

    `folder`, which exists, keeps the progress: a call with the same arguments goes on from what a killed one saved.
    """
    modules = observed_gemms(model)
    groups = probe_groups(model, modules)
    if what.images and what.vision:
        blind = vision_gemms(model, what.vision)
        groups |= image_groups(model, blind, what.images[0])
        modules |= blind
    watch = Watch(model, modules, groups, what.corpus.batches, what.moments, what.all_experts)
    saved = None if folder is None else SavedBatches(folder, what.moments)
    done, before = saved.load(what.corpus.batches) if saved else (0, {})
    if done:
        report.note(f"going on behind batch {done} of {len(what.sizes)}, where an earlier call stopped")
    remaining = [*what.sizes.items()][done:]
    with report.track("Calibrating", sum(size for _, size in remaining), "tokens") as advance:
        for number, (batch, size) in enumerate(remaining, done + 1):
            with what.blamed(batch):
                watch.run(what.inputs(batch), batch)
            release_memory()  # what a batch stores between its large tensors keeps their memory from being used again
            advance(size)
            if saved and number < len(what.sizes) and saved.is_due():
                saved.save(number, added_tensors(before, watch.statistics()))
    weights = {name: weight_amax(module) for name, module in modules.items()}
    return what.statistics(groups, added_tensors(before, watch.statistics()), weights, routed_gemms(model))


def weight_amax(module: torch.nn.Module) -> npt.NDArray[np.float32]:
    """The largest magnitude of each output channel of a linear layer's weight, float32 [output channels]."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor), "a GEMM has a weight"
    smallest, largest = torch.aminmax(weight.detach(), dim=1 - output_channel_axis(module))  # `abs` would copy it
    amax: npt.NDArray[np.float32] = torch.maximum(smallest.abs(), largest.abs()).float().cpu().numpy()
    return amax
