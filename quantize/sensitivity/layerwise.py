"""Predict sensitivity for a model larger than memory, decoder layer by decoder layer (`backward`).

The sums equal those of `gradients.predict_sites` over the same tokens and labels. Memory holds the codes of one layer
beside its weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import rmtree

import torch

from ...calibrate.measure.hidden_states import Batches
from ...calibrate.measure.stream import LayerSteps
from ...calibrate.model.source import Source
from ...core.reporter import Reporter
from ..scales.decisions import Scales
from .backward import Backward, Collect, refused_with
from .document import Predicted, Site
from .gptq_prediction import Gathered, left_of_sites
from .gradients import End, backward_losses, summed
from .site_quantizers import Coded, LoadedGemms, Quantizer

#: The time of all steps, in forward passes.
PASSES = 5.75


@dataclass
class LayerwiseResults(LayerSteps):
    """The results of the finished steps, in a file: the prediction of each step back, and the share of the loss that
    `gptq` would leave of weights (`gptq_prediction.shares_left`).
    """

    predicted: list[Predicted] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerwiseTask:
    """The task: `sites`, on `batches` (index -> token ids int64 [windows, seq_len]); `calibrated`: the tokens that
    `gptq` would round by.
    """

    sites: Sequence[Site]
    batches: Batches
    calibrated: int


class Layerwise(Backward):
    """All steps of one prediction."""

    def __init__(
        self,
        source: Source,
        stored: Coded,
        scales: Scales,
        task: LayerwiseTask,
        folder: Path,
        device: str = "cpu",
    ):
        """Prepare `task` for the run of `stored` (mode `exact`) and `scales`, in the existing `folder`; a killed call's
        results there are continued, so it must have had the same arguments.

        Raises InputError where the disk has no room, and for a model that is no chain of layers.
        """
        super().__init__(source, task.batches, folder, device, "--stream", "or ask for fewer --windows")
        self.held = LoadedGemms(stored)
        self.task = task
        self.watched = self.quantizer = Quantizer(self.model, self.held, scales)
        self.sites = {
            index: [site for site in task.sites if self.layers.index(site.module) == index]
            for index in (None, *range(self.layers.count))
        }
        self.results: LayerwiseResults = LayerwiseResults.of(folder / "found.json")

    def refused(self) -> AbstractContextManager[None]:
        """Name the option that needs no chain of layers."""
        return refused_with("give `fp8q sensitivity` memory for the whole of it, with --no-stream")

    def prompt(self, positions: int) -> int:
        """The prompt that servers of this run read."""
        return self.quantizer.prompt(positions)

    @property
    def before_layers(self) -> bool:
        """Tell whether any site is before the layers."""
        return bool(self.sites[None])

    def note_time(self, seconds: float, report: Reporter) -> None:
        """Note the time of all steps."""
        report.note(f"sensitivity: by what the first layer took, some {PASSES * seconds:,.0f} s here")

    @contextmanager
    def collecting(self, index: int | None) -> Iterator[Collect]:
        """Predict the losses of the sites of one layer, or of none, and of their weights the share that GPTQ leaves."""
        sites = self.sites[index]
        moments = self.folder / "moments"
        rmtree(moments, ignore_errors=True)
        gathered = Gathered(moments)
        predicted: list[Predicted] = []

        def collect(number: int, end: End) -> torch.Tensor | None:
            losses, back = backward_losses(self.quantizer, sites, end, partial(gathered.add, number))
            predicted.append(losses)
            return back

        weights = [site.module for site in sites if site.kind == "weight"]
        with self.held.holding(weights):
            yield collect
            gathered.save()
            self.results.left |= left_of_sites(self.quantizer, sites, gathered, self.task.calibrated)
        self.results.predicted.append(summed(predicted))
