"""Measure how the model's loss depends on the outputs of GEMMs, by which GPTQ weighs tokens and revises codes.

To second order an error e_t of an output at token t costs ½ Σ_t E (g_t · e_t)², with g_t the gradient of the loss for
labels that the model draws (`gradients`). GPTQ takes all tokens as alike, and all output channels.

**First tokens** (`--weigh-first-token`). To the first token, on which the attention of all others rests, that is least
true: its query is read by nothing, its keys and values by every later token, and a norm behind the GEMM may blow its
output up, and its input may be hundreds of times as large as others. So it enters the H of each GEMM as often as the
mean of |g|² there is of that elsewhere. GEMMs that read one tensor differ: on SmolLM2-135M the first token has no
weight for q, hundreds for k, thousands for v. GuidedQuant (Kim et al. 2025, arXiv 2505.07004, section 3) weighs every
token by its own gradient. On SmolLM2-135M the first token alone gives most of what all do (`docs/decisions/0082`), and
its mean over windows needs few of them.

**Output moments** (`--weigh-outputs`), for `weights.output_side`. H_O of a GEMM is Σ g gᵀ over the tokens, but for the
first token of each window: its gradients are hundreds of times as large at keys and values, and what rests on it is
weighed in H_I. Of every `EVERY`th window inputs and gradients of some tokens are stored instead, by which codes are
judged: they see neither H_O nor the independence of g and x that it supposes. Labels are drawn by a generator whose
seed is the number of the window. The files of a layer are written at the end of its step. GEMMs whose outputs have
another number of tokens, as those of experts, are left out, and those whose gradients are not finite or whose H_O
memory does not hold.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import nn
from transformers import PreTrainedModel

from ...calibrate.measure.held_out import save_inputs
from ...calibrate.measure.hidden_states import Batches
from ...calibrate.measure.moments import moments_file
from ...calibrate.measure.stream import LayerSteps, check_room
from ...calibrate.model.expert_modules import experts_of
from ...calibrate.model.gemms import output_channel_axis
from ...calibrate.model.source import Source
from ...core.errors import is_want_of_memory
from ...core.files import Strict
from ...core.reporter import Reporter
from ..weights.output_side import GRADIENTS, INPUTS
from .backward import Backward, Collect, refused_with
from .gradients import End, drawn_gradient, seeing

#: The time of a forward pass and a backward pass, in forward passes.
PASSES = 4.0
#: The largest weight of the first token, and one over the smallest.
MOST = 1e4
#: One window in so many is held out of the output moments, the last of each; of fewer windows the last one.
EVERY = 5
#: Tokens of a GEMM that are stored of a held-out window, evenly spaced.
TOKENS = 256


class GradientSquares(Strict):
    """Σ |g|² over the outputs of a GEMM, by token: of `first` tokens of windows and of `others`, and the numbers of
    both.
    """

    first: float = 0.0
    others: float = 0.0
    first_tokens: int = 0
    other_tokens: int = 0

    def __add__(self, other: "GradientSquares") -> "GradientSquares":
        """Add two sums over different windows."""
        return GradientSquares(
            first=self.first + other.first,
            others=self.others + other.others,
            first_tokens=self.first_tokens + other.first_tokens,
            other_tokens=self.other_tokens + other.other_tokens,
        )

    @property
    def weight(self) -> float:
        """The mean at first tokens over that at others, between 1 / MOST and MOST; 1 where one of them has none."""
        if not (self.first_tokens and self.other_tokens and np.isfinite([self.first, self.others]).all()):
            return 1.0
        first = self.first / self.first_tokens
        others = self.others / self.other_tokens
        if first == 0 and others == 0:
            return 1.0
        return min(max(first, others / MOST) / max(others, first / MOST), MOST)


class FirstTokens(Strict):
    """`first_tokens.json`: the weight of the first token of a window in the second moments that each GEMM is rounded
    by.
    """

    schema_: Annotated[int, Field(alias="schema", ge=2, le=2)] = 2
    windows: int
    weights: dict[str, float] = Field(description="module -> weight; that of others is 1")


@dataclass(frozen=True)
class WatchedGemms:
    """A model and its GEMMs; nothing of its cache is recorded."""

    model: PreTrainedModel
    gemms: Mapping[str, nn.Module]
    attention: Mapping[int, str] = field(default_factory=dict)


def output_gradients(
    names: Iterable[str], end: End, shape: tuple[int, ...]
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """The gradients at the output of each of the GEMMs `names`, float32 [windows, seq_len, out]; and the gradient at
    the hidden states that the pass began with, if any.

    `shape`: (windows, seq_len) of the batch. GEMMs whose outputs have another number of tokens, as those of experts,
    are left out, and GEMMs that the pass did not reach.
    """
    outputs = {
        name: tensor
        for name in names
        if (tensor := end.seen.outputs.get(name)) is not None and tensor.shape[:-1] == shape and tensor.requires_grad
    }
    begun = [] if end.begun is None else [end.begun]
    gradients = torch.autograd.grad(end.value, [*outputs.values(), *begun], end.gradient, allow_unused=True)
    reached = zip(outputs, gradients[: len(outputs)], strict=True)
    of_names = {name: gradient.detach() for name, gradient in reached if gradient is not None}
    return of_names, gradients[-1] if begun else None


def gradient_squares(
    names: Iterable[str], end: End, shape: tuple[int, ...]
) -> tuple[dict[str, GradientSquares], torch.Tensor | None]:
    """Sum the squares of `output_gradients`; and return the gradient at the hidden states that the pass began with, if
    any.
    """
    gradients, back = output_gradients(names, end, shape)
    sums: dict[str, GradientSquares] = {}
    for name, gradient in gradients.items():
        of_tokens = gradient.double().square().sum(-1)
        sums[name] = GradientSquares(
            first=float(of_tokens[:, 0].sum()),
            others=float(of_tokens[:, 1:].sum()),
            first_tokens=shape[0],
            other_tokens=shape[0] * (shape[1] - 1),
        )
    return sums, back


def batch_squares(watched: WatchedGemms, batch: int, ids: npt.NDArray[np.int64]) -> dict[str, GradientSquares]:
    """Sum the squared gradients of each GEMM over the tokens `ids` int64 [windows, seq_len] of batch number `batch`, by
    the `watched` model in FP32, whose weights need no gradients.
    """
    model = watched.model
    tokens = torch.from_numpy(ids).to(model.device)
    with seeing(watched) as (seen, cache), torch.enable_grad():
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
    draw = torch.Generator(model.device).manual_seed(batch)
    end = End(seen, logits, drawn_gradient(logits, 1, draw))
    return gradient_squares(watched.gemms, end, ids.shape)[0]


def added(batches: Iterable[Mapping[str, GradientSquares]]) -> dict[str, GradientSquares]:
    """Add the sums of all batches."""
    total: dict[str, GradientSquares] = {}
    for batch in batches:
        for name, squares in batch.items():
            total[name] = total.get(name, GradientSquares()) + squares
    return total


@dataclass
class LayerSquares(LayerSteps):
    """The sums of the GEMMs of the steps that have ended, by name."""

    squares: dict[str, GradientSquares] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take the sums as JSON has them too."""
        self.squares = {name: GradientSquares.model_validate(sums) for name, sums in self.squares.items()}


class GradientsOfLayers(Backward):
    """A pass forward and back for an `option` that weighs what GPTQ rounds by; `without`: the remedy for a model that
    cannot be run layer by layer.
    """

    option: ClassVar[str]
    without: ClassVar[str]

    def __init__(self, source: Source, batches: Batches, folder: Path, device: str = "cpu"):
        """Prepare to run `batches` in the existing `folder`.

        Raises InputError as `Backward` does.
        """
        super().__init__(source, batches, folder, device, self.option, "or leave it out")
        self.watched = WatchedGemms(self.model, self.gemms)

    def refused(self) -> AbstractContextManager[None]:
        """Name the option that needs a chain of layers."""
        return refused_with(self.without)

    def prompt(self, positions: int) -> int:
        """Every token is scored but the first."""
        return 1

    def note_time(self, seconds: float, report: Reporter) -> None:
        """Note the time of all steps."""
        report.note(f"{self.option}: by what the first layer took, some {PASSES * seconds:,.0f} s here")

    def of_layer(self, index: int | None) -> list[str]:
        """The GEMMs of one layer, or (None) those before all layers."""
        return [name for name in self.gemms if self.layers.index(name) == index]


class LayerwiseFirstTokens(GradientsOfLayers):
    """All steps of measuring a model larger than memory; their results are in one file of the folder."""

    option = "--weigh-first-token"
    without = "give it memory for the whole in FP32, or leave --weigh-first-token out, which needs gradients"

    def __init__(self, source: Source, batches: Batches, folder: Path, device: str = "cpu"):
        """Prepare as every pass is, and read the results that a killed call left."""
        super().__init__(source, batches, folder, device)
        self.results: LayerSquares = LayerSquares.of(folder / "squares.json")

    @property
    def before_layers(self) -> bool:
        """Tell whether any GEMM is before the layers."""
        return bool(self.of_layer(None))

    @contextmanager
    def collecting(self, index: int | None) -> Iterator[Collect]:
        """Sum the squared gradients of the GEMMs of one layer, or of none."""
        names = self.of_layer(index)
        batches = [*self.batches.values()]
        sums: list[Mapping[str, GradientSquares]] = []

        def collect(number: int, end: End) -> torch.Tensor | None:
            squares, back = gradient_squares(names, end, batches[number].shape)
            sums.append(squares)
            return back

        yield collect
        self.results.squares |= added(sums)


def judges_codes(window: int, windows: int) -> bool:
    """Tell whether window number `window`, of so many `windows`, is held out of H_O."""
    return windows > 1 and window % EVERY == min(EVERY, windows) - 1


class LayerGradients:
    """The sums and held-out tokens of the GEMMs of one layer."""

    def __init__(self) -> None:
        self._moments: dict[str, torch.Tensor] = {}
        self._inputs: dict[str, list[torch.Tensor]] = {}
        self._gradients: dict[str, list[torch.Tensor]] = {}
        self._beyond_memory: set[str] = set()

    def add(self, module: str, inputs: torch.Tensor, gradients: torch.Tensor, held_out: bool) -> None:
        """Add the tokens of a window, `inputs` [tokens, in] and `gradients` [tokens, out], both float32, to the sums,
        or to the tokens that are `held_out` of them. A GEMM whose sums memory does not hold has none from then on.
        """
        if module in self._beyond_memory:
            return
        try:
            self._add(module, inputs, gradients, held_out)
        except (MemoryError, RuntimeError) as error:  # torch's of a GPU is a RuntimeError
            if not is_want_of_memory(error):
                raise
            self._beyond_memory.add(module)
            for of_gemms in (self._moments, self._inputs, self._gradients):
                of_gemms.pop(module, None)

    def _add(self, module: str, inputs: torch.Tensor, gradients: torch.Tensor, held_out: bool) -> None:
        if held_out:
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
    without = "leave --weigh-outputs out, which needs gradients"

    def __init__(self, source: Source, batches: Batches, folder: Path, device: str = "cpu"):
        """Prepare to run `batches`, of one window each, in the existing `folder`.

        Raises InputError as `Backward` does, and where the disk has no room for the files.
        """
        super().__init__(source, batches, folder, device)
        self.results = LayerSteps.of(folder / "steps.json")
        self.outputs = folder / "outputs"
        self.outputs.mkdir(exist_ok=True)
        check_room(self.folder, self._sizes(), self.option, "or leave it out", "the gradients at outputs")

    def _sizes(self) -> dict[Path, int]:
        """The bytes of the files of all GEMMs that gradients are gathered for: of the moments, and of held-out tokens
        the inputs and gradients.
        """
        batches = enumerate(self.batches.values())
        tokens = sum(
            min(TOKENS, ids.shape[1] - 1) for number, ids in batches if judges_codes(number, len(self.batches))
        )
        experts = tuple(f"{layer}." for layer in experts_of(self.model))
        sizes: dict[Path, int] = {}
        for name, module in self.gemms.items():
            if name.startswith(experts):
                continue
            weight = module.get_parameter("weight")
            outputs = weight.shape[output_channel_axis(module)]
            sizes[moments_file(self.outputs, name)] = 4 * outputs**2
            sizes[self.outputs / f"{name}{GRADIENTS}"] = 2 * tokens * outputs
            sizes[self.outputs / f"{name}{INPUTS}"] = 2 * tokens * (weight.numel() // outputs)
        return sizes

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
                held_out = judges_codes(number, len(batches))
                sums.add(name, inputs[:, 1:].flatten(0, 1), gradient[:, 1:].flatten(0, 1), held_out)
            return back

        yield collect
        sums.save(self.outputs)
