"""Compare the modules of two models one by one.

Each module of the candidate runs on the inputs that the original's receives. So an error has one place: where an early
layer is wrong, the later ones, whose own inputs would be wrong as well, show no error of their own. The hidden states
of both models, each run by itself, show beside it how these errors add up.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any

import torch
from torch import nn

from .document import HiddenError, ModuleError

#: Below this correlation, of either sign, two outputs have nothing to do with each other.
UNRELATED = 0.5
#: A module of the original whose weight is this near to the candidate's of another name is where that came from.
SAME_WEIGHT = 0.9


@dataclass
class OutputSums:
    """Sums over tokens and channels: of squared differences, of squares of both sides, and of their products."""

    difference: float = 0.0
    original: float = 0.0
    candidate: float = 0.0
    dot: float = 0.0
    comparable: bool = True

    def add(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Add an output of the original and the candidate's of the same shape."""
        if ours.shape != theirs.shape:
            self.comparable = False
            return
        first, second = ours.double(), theirs.to(ours.device).double()
        self.difference += float((second - first).square().sum())
        self.original += float(first.square().sum())
        self.candidate += float(second.square().sum())
        self.dot += float((first * second).sum())

    @property
    def error(self) -> float | None:
        """The relative error; None where it is not finite, or shapes differ."""
        if not self.comparable or not isfinite(self.difference):
            return None
        if not self.original:
            return 0.0 if not self.difference else None
        return sqrt(self.difference / self.original)

    def document(self, module: str) -> ModuleError:
        """The entry of `module`."""
        if self.error is None or not self.original:
            return ModuleError(module=module, error=self.error)
        norms = sqrt(self.original) * sqrt(self.candidate)
        return ModuleError(
            module=module,
            error=self.error,
            gain=self.dot / self.original,
            correlation=self.dot / norms if norms else 0.0,
        )


def compare_modules(
    original: nn.Module,
    candidate: nn.Module,
    windows: Sequence[torch.Tensor],
    advance: Callable[[int], None] = lambda _: None,
) -> tuple[list[ModuleError], list[HiddenError]]:
    """Run `windows` (int64 [batch, context] each) through both models, and compare outputs of modules and layers.

    Both are models of transformers in evaluation mode on one device. Modules without parameters of their own, and those
    that the candidate has under no such name, are not compared. Returns the modules, the worst first (not finite before
    all), and the hidden states in order.
    """
    compared, hidden = ComparedModules(original, candidate), dict[int, OutputSums]()
    for ids in windows:
        with torch.inference_mode():
            with compared.adding():
                ours = states_of(original, ids)
            for layer, (first, second) in enumerate(zip(ours, states_of(candidate, ids), strict=False)):
                hidden.setdefault(layer, OutputSums()).add(first, second)
        advance(len(ids))
    return sorted_by_error(compared.errors()), [
        HiddenError(layer=layer, error=one.error) for layer, one in hidden.items()
    ]


class ComparedModules:
    """The modules that two models have under one name, and the sums of their outputs, added while `adding`."""

    def __init__(self, original: nn.Module, candidate: nn.Module, wanted: Callable[[str], bool] = lambda name: True):
        """Compare the modules with `wanted` names that have parameters of their own in both models."""
        theirs = dict(candidate.named_modules())
        self.pairs = {
            name: (module, theirs[name])
            for name, module in original.named_modules()
            if wanted(name) and name in theirs and _has_weights(module) and _has_weights(theirs[name])
        }
        self.sums = {name: OutputSums() for name in self.pairs}

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Run the candidate's modules on the inputs that the original's receive in this block, and add both outputs."""
        with ExitStack() as hooks:
            for name, (module, other) in self.pairs.items():
                handle = module.register_forward_hook(_hook(other, self.sums[name]), with_kwargs=True)
                hooks.callback(handle.remove)
            yield

    def errors(self) -> list[ModuleError]:
        """The errors of all modules that ran, in the order of the model."""
        ran = {name: sums for name, sums in self.sums.items() if sums.original or sums.error is None}
        return [sums.document(name) for name, sums in ran.items()]


def sorted_by_error(errors: Sequence[ModuleError]) -> list[ModuleError]:
    """Sort the errors of modules, those that are not finite before all."""
    return sorted(errors, key=lambda entry: -(float("inf") if entry.error is None else entry.error))


def _has_weights(module: nn.Module) -> bool:
    return not any(True for _ in module.children()) and any(True for _ in module.parameters(recurse=False))


def states_of(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Run the model on `ids` [batch, context]; return the states that enter each layer, and the last norm's."""
    states: tuple[torch.Tensor, ...] = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    return states


def _hook(other: nn.Module, sums: OutputSums) -> Callable[..., None]:
    """Return a hook of the original's module that runs the candidate's `other` on the same inputs."""
    dtype = next((p.dtype for p in other.parameters(recurse=False) if p.dtype.is_floating_point), torch.bfloat16)

    def cast(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() > 1
        return value.to(dtype) if floating and dtype.itemsize > 1 else value

    def compare(module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> None:
        if isinstance(output, torch.Tensor):
            sums.add(output, other(*map(cast, args), **{name: cast(value) for name, value in named.items()}))

    return compare


def origin_of(candidate: torch.Tensor, originals: Mapping[str, torch.Tensor]) -> str | None:
    """Name the weight among `originals` that `candidate` (of the same shape) nearly is; None where it is none of them.

    Compares directions, so that a wrong scale does not hide where a weight came from.
    """
    best, name = SAME_WEIGHT, None
    flat = candidate.float().flatten()
    norm = flat.norm()
    for other, weight in originals.items():
        if weight.shape == candidate.shape and norm:
            values = weight.float().flatten()
            alike = float(torch.dot(flat, values) / (norm * values.norm()).clamp_min(1e-30))
            if alike > best:
                best, name = alike, other
    return name


def matrices(model: nn.Module, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, torch.Tensor]:
    """Module -> its weight [out, in], of the modules with `wanted` names that hold it as numbers."""
    return {
        name.removesuffix(".weight"): weight.detach()
        for name, weight in model.named_parameters()
        if name.endswith(".weight") and weight.dim() == 2 and weight.element_size() > 1 and wanted(name)
    }


def expert_errors(
    original: nn.Module, candidate: nn.Module, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, list[float | None]]:
    """Relative errors of each expert's weight, of parameters that hold all experts of a layer [experts, …].

    Only those with `wanted` names that both models hold as numbers in one shape.
    """
    theirs = dict(candidate.named_parameters())
    errors_by_parameter = {}
    for name, weight in original.named_parameters():
        other = theirs.get(name)
        if (
            wanted(name)
            and weight.dim() == 3
            and other is not None
            and other.shape == weight.shape
            and other.element_size() > 1
        ):
            errors = []
            for ours, expert in zip(weight.detach(), other.detach(), strict=True):
                sums = OutputSums()
                sums.add(ours, expert)
                errors.append(sums.error)
            errors_by_parameter[name] = errors
    return errors_by_parameter
