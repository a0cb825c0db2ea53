"""Weigh calibration tokens by how much the model's loss depends on the output of a GEMM at each of them.

To second order an error e_t of an output at token t costs ½ Σ_t E (g_t · e_t)², with g_t the gradient of the loss for
labels that the model draws (`gradients`). GPTQ's H is one matrix for all output channels, so that of g_t only a number
can enter it: GuidedQuant (Kim et al. 2025, arXiv 2505.07004, section 3) takes the mean of g² over a group of channels.
Here it is the root of the sum of |g_t|² over all GEMMs that read the tensor, not the sum itself: single tokens with
large gradients would rule H, which 30,000 tokens estimate badly as it is. On SmolLM2-135M the root leaves less of
GPTQ's loss than the sum does (`docs/decisions/0082`).

Some tokens have inputs a thousand times those of others: a first token, on which attention rests. One of them would
hold most of H's trace, and so of its damping, which is a share of the mean diagonal and then hides all other tokens. So
no token has more than `MOST` times the part of the trace, w_t |x_t|², that the median token has.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from ...calibrate.measure.hidden_states import Batches
from ...calibrate.model.gemms import observed_gemms
from ...calibrate.model.source import Source
from ...core.files import replacing
from ...core.reporter import Reporter
from .backward import Backward, Collect, refused_with
from .gradients import End, drawn_loss, next_token_log_probabilities, seeing

Floats = npt.NDArray[np.float32]
#: The part of the trace of H that a token may have, in parts of the median token.
MOST = 30.0
#: What stands for zero where something is divided by it.
SMALLEST = float(np.finfo(np.float32).tiny)
#: The fields of `TokenNorms`, as files name them.
PARTS = ("gradients", "inputs")
#: The remedy for a model that cannot be run layer by layer.
WITHOUT_LAYERS = "give it memory for the whole in FP32, or take --weigh-tokens equal, which needs no gradients"
#: The time of a forward pass and a backward pass, in forward passes.
PASSES = 3.0


@dataclass(frozen=True)
class WatchedGemms:
    """A model and its GEMMs; nothing of its cache is recorded."""

    model: PreTrainedModel
    gemms: Mapping[str, nn.Module]
    attention: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenNorms:
    """The norms of a group's tokens, both float32 [windows, seq_len]: of `gradients`, the root of Σ |g|² over all GEMMs
    that read its input, and of the `inputs`.
    """

    gradients: Floats
    inputs: Floats

    @property
    def weights(self) -> Floats:
        """The weight of each token, float32 [windows, seq_len], whose mean is about one."""
        weights = self.gradients / max(float(self.gradients.mean(dtype=np.float64)), SMALLEST)
        energies = np.square(self.inputs, dtype=np.float32)
        most = MOST * float(np.median(weights * energies))
        capped: Floats = np.minimum(weights, most / np.maximum(energies, SMALLEST)) if most > 0 else weights
        return capped


def token_norms(
    groups: Mapping[str, Sequence[str]], end: End, shape: tuple[int, ...]
) -> tuple[dict[str, TokenNorms], torch.Tensor | None]:
    """Compute the norms of the tokens of each group, by the first of the group; and the gradient at the hidden states
    that the pass began with, if any.

    `groups`: first module -> all that read its input; `shape`: (windows, seq_len) of the batch. Groups whose outputs
    have another number of tokens, as those of experts, are left out, and groups that the pass did not reach.
    """
    outputs = {
        name: tensor
        for members in groups.values()
        for name in members
        if (tensor := end.seen.outputs.get(name)) is not None and tensor.shape[:-1] == shape and tensor.requires_grad
    }
    begun = [] if end.begun is None else [end.begun]
    gradients = torch.autograd.grad(end.value, [*outputs.values(), *begun], end.gradient, allow_unused=True)
    squares = {
        name: gradient.detach().square().sum(-1)
        for name, gradient in zip(outputs, gradients[: len(outputs)], strict=True)
        if gradient is not None
    }
    norms = dict[str, TokenNorms]()
    for first, members in groups.items():
        if reached := [name for name in members if name in squares]:
            gradient = torch.stack([squares[name] for name in reached]).sum(0).sqrt()
            norm = end.seen.inputs[reached[0]].detach().float().norm(dim=-1)
            norms[first] = TokenNorms(gradient.cpu().numpy(), norm.cpu().numpy())
    return norms, gradients[-1] if begun else None


def batch_norms(
    model: PreTrainedModel, groups: Mapping[str, Sequence[str]], batch: int, ids: npt.NDArray[np.int64]
) -> dict[str, TokenNorms]:
    """Compute the norms of the tokens `ids` int64 [windows, seq_len] of batch number `batch` for each of `groups`, by
    the `model` in FP32, whose weights need no gradients.
    """
    tokens = torch.from_numpy(ids).to(model.device)
    with seeing(WatchedGemms(model, observed_gemms(model))) as (seen, cache), torch.enable_grad():
        log_p = next_token_log_probabilities(model, tokens, cache)
        end = End(seen, drawn_loss(log_p, torch.Generator(model.device).manual_seed(batch)))
    return token_norms(groups, end, ids.shape)[0]


@dataclass
class Collected:
    """The norms of each group's tokens, batch by batch."""

    parts: dict[str, list[TokenNorms]] = field(default_factory=dict)

    def add(self, norms: Mapping[str, TokenNorms]) -> None:
        """Add those of the next batch."""
        for name, values in norms.items():
            self.parts.setdefault(name, []).append(values)

    def joined(self) -> dict[str, TokenNorms]:
        """The norms of the tokens of all batches."""
        return {
            name: TokenNorms(
                np.concatenate([part.gradients for part in parts]), np.concatenate([part.inputs for part in parts])
            )
            for name, parts in self.parts.items()
        }


def save_norms(path: Path, norms: Mapping[str, TokenNorms]) -> None:
    """Write the norms of each group's tokens to the file at `path`."""
    arrays = {f"{name}.{part}": getattr(values, part) for name, values in norms.items() for part in PARTS}
    with replacing(path) as partial:
        save_file(arrays, partial)


def load_norms(path: Path) -> dict[str, TokenNorms]:
    """Read the norms in the file at `path`."""
    arrays = load_file(path)
    names = dict.fromkeys(name.rpartition(".")[0] for name in arrays)
    return {name: TokenNorms(*(arrays[f"{name}.{part}"] for part in PARTS)) for name in names}


@dataclass
class FinishedSteps:
    """The number of finished steps, in the file at `path`."""

    path: Path

    @property
    def steps(self) -> int:
        """The number of finished steps."""
        return int(self.path.read_text(encoding="utf-8")) if self.path.is_file() else 0

    def save(self, step: int) -> None:
        """Save the number."""
        with replacing(self.path) as partial:
            partial.write_text(str(step), encoding="utf-8")


class LayerwiseTokenWeights(Backward):
    """All steps of weighing tokens of a model larger than memory; the norms of a layer's groups are a file each."""

    def __init__(self, source: Source, batches: Batches, folder: Path, device: str = "cpu"):
        """Prepare to weigh the tokens of `batches` in the existing `folder`.

        Raises InputError as `Backward` does.
        """
        option, remedy = "--weigh-tokens gradient", "or take --weigh-tokens equal"
        super().__init__(source, batches, folder, device, option, remedy)
        self.watched = WatchedGemms(self.model, self.gemms)
        self.results = FinishedSteps(folder / "steps")

    def refused(self) -> AbstractContextManager[None]:
        """Name the option that needs no chain of layers."""
        return refused_with(WITHOUT_LAYERS)

    def prompt(self, positions: int) -> int:
        """Every token is scored but the first."""
        return 1

    @property
    def before_layers(self) -> bool:
        """Tell whether any group is before the layers."""
        return bool(self._of_layer(None))

    def _of_layer(self, index: int | None) -> dict[str, Sequence[str]]:
        return {first: members for first, members in self.groups.items() if self.layers.index(first) == index}

    def note_time(self, seconds: float, report: Reporter) -> None:
        """Note the time of all steps."""
        report.note(f"weighing tokens: by what the first layer took, some {(1 + PASSES) * seconds:,.0f} s here")

    @contextmanager
    def collecting(self, index: int | None) -> Iterator[Collect]:
        """Collect the norms of the groups of one layer, or of none, and write them to a file."""
        groups, collected, batches = self._of_layer(index), Collected(), [*self.batches.values()]

        def collect(number: int, end: End) -> torch.Tensor | None:
            norms, back = token_norms(groups, end, batches[number].shape)
            collected.add(norms)
            return back

        yield collect
        if collected.parts:
            save_norms(self._file(index), collected.joined())

    def _file(self, index: int | None) -> Path:
        return self.folder / f"norms-{'outside' if index is None else index}.safetensors"

    def collected(self) -> dict[str, TokenNorms]:
        """The norms of all groups, of the finished steps."""
        files = [self._file(index) for index in (None, *range(self.layers.count))]
        return {name: values for file in files if file.is_file() for name, values in load_norms(file).items()}
