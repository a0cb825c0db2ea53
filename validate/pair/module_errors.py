"""Compare the modules of two models one by one.

Each module of the candidate runs on the inputs that the original's receives. So an error has one place: where an early
layer is wrong, the later ones, whose own inputs would be wrong as well, show no error of their own. The hidden states
of both models, each run by itself, show beside it how these errors add up.

Modules may differ, and a layer not: heads, channels of an MLP or experts in another order, or scales that one weight
has more of and the next less (SmoothQuant, AWQ), are the same function. So each decoder layer of the candidate also
runs as one on the input of the original's, and the outputs of its parts (attention, MLP, norms) are compared within it.
A module's error is undone where its part of the layer answers as the original's does, or where the next part does,
which by itself would not.

Rows of embeddings are compared by their numbers, since a text reads but some of the tokens and positions.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any

import torch
from torch import nn

from .document import HiddenError, ModuleError, TableError
from .outliers import outlier_limit

#: Below this correlation, of either sign, two outputs have nothing to do with each other.
UNRELATED = 0.5
#: A module of the original whose weight is this near to the candidate's of another name is where that came from.
SAME_WEIGHT = 0.9
#: Rows of an embedding that are compared at once.
ROWS_AT_ONCE = 1 << 13


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
        first = ours.double()
        second = theirs.to(ours.device).double()
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
    compared = ComparedModules(original, candidate)
    hidden: dict[int, OutputSums] = {}
    for ids in windows:
        with torch.inference_mode():
            with compared.adding():
                original(input_ids=ids, use_cache=False)
            # apart: transformers records the states of any layer that runs meanwhile
            states = states_of(original, ids), states_of(candidate, ids)
            for layer, (first, second) in enumerate(zip(*states, strict=False)):
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
        self.layers = [
            LayerParts(name, module, theirs[name])
            for name, module in original.named_modules()
            if LAYER.fullmatch(name) and wanted(name) and name in theirs
        ]

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Run the candidate's modules on the inputs that the original's receive in this block, and add both outputs."""
        with ExitStack() as hooks:
            for name, (module, other) in self.pairs.items():
                handle = module.register_forward_hook(_hook(other, self.sums[name]), with_kwargs=True)
                hooks.callback(handle.remove)
            for layer in self.layers:
                hooks.enter_context(layer.adding())
            yield

    def errors(self) -> list[ModuleError]:
        """The errors of all modules that ran, in the order of the model."""
        parts = {name: part for layer in self.layers for name, part in layer.parts().items()}
        ran = {name: sums for name, sums in self.sums.items() if sums.original or sums.error is None}
        entries = [sums.document(name) for name, sums in ran.items()]
        return [entry.model_copy(update=parts.get(layer_part(entry.module) or "", {})) for entry in entries]


#: The name of a decoder layer.
LAYER = re.compile(r"(?:[A-Za-z_]\w*\.)+\d+")
_PART = re.compile(rf"({LAYER.pattern}\.\w+)(\..*)?")


def layer_part(module: str) -> str | None:
    """The name of the part of a decoder layer that a module is, or is in: `model.layers.0.mlp`; None outside."""
    match = _PART.fullmatch(module)
    return match[1] if match else None


class LayerParts:
    """The parts of one decoder layer of two models, and the sums of their outputs where each layer runs as one on the
    input of the original's.
    """

    def __init__(self, name: str, original: nn.Module, candidate: nn.Module):
        """Compare the direct children with weights that both layers have; `name`: of the layer."""
        self.name = name
        self.original = original
        self.candidate = candidate
        theirs = dict(candidate.named_children())
        self.children = {
            child: (module, theirs[child])
            for child, module in original.named_children()
            if child in theirs and any(True for _ in module.parameters())
        }
        self.outputs: dict[str, torch.Tensor] = {}
        self.sums: dict[str, OutputSums] = {}

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Run the candidate's layer whenever the original's runs in this block, and add the outputs of their parts."""
        with ExitStack() as hooks:
            for child, (module, _) in self.children.items():
                handle = module.register_forward_hook(self._keeper(child))
                hooks.callback(handle.remove)
            handle = self.original.register_forward_hook(self._run_candidate, with_kwargs=True)
            hooks.callback(handle.remove)
            yield

    def _keeper(self, child: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if (tensor := _tensor_of(output)) is not None:
                self.outputs[child] = tensor

        return keep

    def _run_candidate(self, module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> None:
        cast = _caster(self.candidate)
        with ExitStack() as hooks:
            for child in self.outputs:  # in the order in which they ran
                handle = self.children[child][1].register_forward_hook(self._adder(child))
                hooks.callback(handle.remove)
            self.candidate(*map(cast, args), **{name: cast(value) for name, value in named.items()})
        self.outputs.clear()

    def _adder(self, child: str) -> Callable[..., None]:
        ours = self.outputs[child]
        sums = self.sums.setdefault(child, OutputSums())

        def add(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if (tensor := _tensor_of(output)) is not None:
                sums.add(ours, tensor)

        return add

    def parts(self) -> dict[str, dict[str, object]]:
        """Part -> what entries of its modules say of it: its error, and the name of the part that runs next."""
        names = [*self.sums]
        following = [*(f"{self.name}.{child}" for child in names[1:]), None]
        return {
            f"{self.name}.{child}": {"part_error": self.sums[child].error, "next_part": following[number]}
            for number, child in enumerate(names)
        }


def _tensor_of(output: Any) -> torch.Tensor | None:
    first = output[0] if isinstance(output, tuple) and output else output
    if isinstance(first, torch.Tensor):
        return first
    return None


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
    cast = _caster(other)

    def compare(module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> None:
        if isinstance(output, torch.Tensor):
            sums.add(output, other(*map(cast, args), **{name: cast(value) for name, value in named.items()}))

    return compare


def _caster(other: nn.Module) -> Callable[[Any], Any]:
    """Return a function that gives inputs the type that the module `other` computes in; codes stay codes."""
    types = (p.dtype for p in other.parameters() if p.dtype.is_floating_point and p.dtype.itemsize > 1)
    dtype = next(types, None)

    def cast(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cast, value))
        floating = isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() > 1
        if floating and dtype is not None:
            return value.to(dtype)
        return value

    return cast


def origin_of(candidate: torch.Tensor, originals: Mapping[str, torch.Tensor]) -> str | None:
    """Name the weight among `originals` that `candidate` (of the same shape) nearly is; None where it is none of them.

    Compares directions, so that a wrong scale does not hide where a weight came from.
    """
    best = SAME_WEIGHT
    name = None
    flat = candidate.float().flatten()
    norm = flat.norm()
    for other, weight in originals.items():
        if weight.shape == candidate.shape and norm:
            values = weight.float().flatten()
            alike = float(torch.dot(flat, values) / (norm * values.norm()).clamp_min(1e-30))
            if alike > best:
                best = alike
                name = other
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

    Only those with `wanted` names that both models hold as numbers in one shape. Experts in another order are compared
    with those whose row of the router they have.
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
            block = name.split(".")[:-2]
            order = _order_of_experts(original, theirs, ".".join(block), len(weight))
            errors = []
            for number, expert in zip(order, other.detach(), strict=True):
                sums = OutputSums()
                sums.add(weight[number].detach(), expert)
                errors.append(sums.error)
            errors_by_parameter[name] = errors
    return errors_by_parameter


def _order_of_experts(
    original: nn.Module, theirs: Mapping[str, torch.Tensor], block: str, experts: int
) -> Sequence[int]:
    """The original's expert of each of the candidate's in the module `block`, by the rows of the router [experts, in];
    the same order where these do not tell another.
    """
    for name, weight in original.get_submodule(block).named_parameters():
        other = theirs.get(f"{block}.{name}")
        if weight.dim() == 2 and len(weight) == experts and other is not None and other.shape == weight.shape:
            rows = [torch.nn.functional.normalize(matrix.detach().double(), dim=1) for matrix in (other, weight)]
            alike, order = (rows[0] @ rows[1].to(rows[0].device).T).max(dim=1)
            if sorted(order.tolist()) == [*range(experts)] and float(alike.min()) > SAME_WEIGHT:
                return [int(number) for number in order]
    return range(experts)


def embedding_errors(
    original: nn.Module, candidate: nn.Module, wanted: Callable[[str], bool] = lambda name: True
) -> list[TableError]:
    """The embeddings with `wanted` names of which rows are not the original's: of tokens, or positions, that no text
    may have read.
    """
    theirs = dict(candidate.named_modules())
    tables = []
    for name, module in original.named_modules():
        other = theirs.get(name)
        if not (wanted(name) and isinstance(module, nn.Embedding) and isinstance(other, nn.Embedding)):
            continue
        if other.weight.shape == module.weight.shape and other.weight.element_size() > 1:
            tables.append(_table_error(name, module.weight.detach(), other.weight.detach()))
    return [table for table in tables if table.outside]


def _table_error(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> TableError:
    """Compare two tables [rows, width], some rows at a time."""
    differences: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    for first, second in zip(ours.split(ROWS_AT_ONCE), theirs.split(ROWS_AT_ONCE), strict=True):
        before = first.float()
        differences.append((second.to(first.device).float() - before).norm(dim=1).cpu())
        norms.append(before.norm(dim=1).cpu())
    norm = torch.cat(norms)
    smallest = max(1e-3 * float(norm.median()), 1e-30)  # rows of zeros have no relative error
    relative = torch.cat(differences) / norm.clamp_min(smallest)
    finite = relative.isfinite()
    outside = torch.nonzero(~finite | (relative > outlier_limit(relative[finite].tolist())))[:, 0]
    return TableError(
        module=name,
        rows=len(relative),
        outside=len(outside),
        first=int(outside[0]) if len(outside) else 0,
        last=int(outside[-1]) if len(outside) else 0,
        worst=float(relative.max()) if bool(finite.all()) else None,
    )
