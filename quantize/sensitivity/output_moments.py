"""Gather the second moments of the loss's gradients at the outputs of GEMMs, layer by layer, for `weights.two_sided`.

Some calibration windows run forward and back once (`backward`), with labels that the model draws, by a generator whose
seed is the number of the window. H_O of a GEMM is Σ g gᵀ over their tokens, but for the first token of each window:
its gradients are hundreds of times as large at keys and values, and what rests on it is weighed in H_I
(`first_tokens`). Of every `EVERY`th window inputs and gradients of some tokens are stored instead, by which codes are
judged: they see neither H_O nor the independence of g and x that it supposes.

The files of a layer are written at the end of its step. GEMMs whose outputs have another number of tokens, as those of
experts, are left out, and those whose gradients are not finite.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from ...calibrate.measure.held_out import save_inputs
from ...calibrate.measure.hidden_states import Batches
from ...calibrate.measure.moments import moments_file
from ...calibrate.measure.stream import LayerSteps, check_room
from ...calibrate.model.expert_modules import experts_of
from ...calibrate.model.gemms import output_channel_axis
from ...calibrate.model.source import Source
from ..weights.output_side import GRADIENTS, INPUTS
from .backward import Collect
from .first_tokens import GradientsOfLayers, output_gradients
from .gradients import End

#: The remedy for a model that cannot be run layer by layer.
WITHOUT_LAYERS = "leave --weigh-outputs out, which needs gradients"
#: One window in so many is held out, the last of each; of fewer windows the last one.
EVERY = 5
#: Tokens of a GEMM that are stored of a held-out window, evenly spaced.
TOKENS = 256


def is_judged_by(window: int, windows: int) -> bool:
    """Tell whether window number `window`, of so many `windows`, is held out of H_O."""
    return windows > 1 and window % EVERY == min(EVERY, windows) - 1


class LayerGradients:
    """The sums and held-out tokens of the GEMMs of one layer."""

    def __init__(self) -> None:
        self._moments: dict[str, torch.Tensor] = {}
        self._inputs: dict[str, list[torch.Tensor]] = {}
        self._gradients: dict[str, list[torch.Tensor]] = {}

    def add(self, module: str, inputs: torch.Tensor, gradients: torch.Tensor, judged: bool) -> None:
        """Add the tokens of a window: `inputs` [tokens, in], `gradients` [tokens, out], both float32."""
        if judged:
            number = min(TOKENS, len(inputs))
            some = torch.arange(number, device=inputs.device) * len(inputs) // number
            self._inputs.setdefault(module, []).append(inputs[some].bfloat16())
            self._gradients.setdefault(module, []).append(gradients[some].bfloat16())
        elif module in self._moments:
            self._moments[module].addmm_(gradients.T, gradients)
        else:
            self._moments[module] = gradients.T @ gradients

    def save(self, folder: Path) -> None:
        """Write the files of all GEMMs that have both and whose gradients are finite to `folder`."""
        for module in self._moments.keys() & self._inputs.keys():
            moments, inputs, gradients = (
                self._moments[module], torch.cat(self._inputs[module]), torch.cat(self._gradients[module])
            )  # fmt: skip
            if all(bool(torch.isfinite(tensor).all()) for tensor in (moments, inputs, gradients)):
                save_inputs(folder / f"{module}{INPUTS}", inputs)
                save_inputs(folder / f"{module}{GRADIENTS}", gradients)
                np.save(moments_file(folder, module), moments.cpu().numpy())


class OutputMoments(GradientsOfLayers):
    """All steps of gathering; the files are in the folder `outputs` of the work folder."""

    option = "--weigh-outputs"
    without = WITHOUT_LAYERS

    def __init__(self, source: Source, batches: Batches, folder: Path, device: str = "cpu"):
        """Prepare to run `batches`, of one window each, in the existing `folder`.

        Raises InputError as `Backward` does, and where the disk has no room for the moments.
        """
        super().__init__(source, batches, folder, device)
        self.results = LayerSteps.of(folder / "steps.json")
        self.outputs = folder / "outputs"
        self.outputs.mkdir(exist_ok=True)
        sizes = {moments_file(self.outputs, name): 4 * width**2 for name, width in self._widths().items()}
        check_room(self.folder, sizes, self.option, "or leave it out", "the moments of outputs")

    def _widths(self) -> dict[str, int]:
        """The output channels of each GEMM whose moments are gathered."""
        experts = tuple(f"{layer}." for layer in experts_of(self.model))
        gemms = {name: module for name, module in self.gemms.items() if not name.startswith(experts)}
        return {
            name: module.get_parameter("weight").shape[output_channel_axis(module)] for name, module in gemms.items()
        }

    @property
    def before_layers(self) -> bool:
        """Nothing is gathered before the layers."""
        return False

    @contextmanager
    def collecting(self, index: int | None) -> Iterator[Collect]:
        """Sum what the gradients of the GEMMs of one layer give, and write it."""
        names = [] if index is None else self.of_layer(index)
        batches = [*self.batches]
        sums = LayerGradients()

        def collect(number: int, end: End) -> torch.Tensor | None:
            gradients, back = output_gradients(names, end, self.batches[batches[number]].shape)
            for name, gradient in gradients.items():
                inputs = end.seen.inputs[name].detach()
                judged = is_judged_by(number, len(batches))
                sums.add(name, inputs[:, 1:].flatten(0, 1), gradient[:, 1:].flatten(0, 1), judged)
            return back

        yield collect
        sums.save(self.outputs)
