"""Group decoder layers into kinds, and let most layers of a kind pass their input through.

A model has one to three kinds of layers, and torch's exporter takes more than a second for each traced layer. So only
three of each kind are traced: the first, which also computes what the others share (a mask), the second, which is the
pattern for the others, and the last, which proves the pattern (`graph.layer_copies`). In place of the others the graph
has a node, `operators.SKIPPED`.

Two layers are of one kind if everything about them is equal: the classes of their modules, every attribute, the shapes
and types of their tensors, here and in the file, and the values of tensors that no file holds. What cannot be compared
counts as different. Three differences show only while the model runs, and end the attempt with `NotAlikeError`: other
arguments than those of the kind, a read of the layer's own index, and a read of a module or tensor of a layer that is
not traced.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from ...calibrate.model.gemms import attention_modules
from . import operators

#: So many layers of a kind are traced: first, second, last.
TRACED = 3
#: Attributes in which torch keeps parameters, buffers and submodules; these are compared by name, shape and type.
REGISTERED = {"_parameters", "_buffers", "_modules"}
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class NotAlikeError(Exception):
    """Layers that looked alike are not; the model has to be traced in full."""


@dataclass(frozen=True)
class Kind:
    """Decoder layers that differ in their index alone, ascending."""

    members: tuple[int, ...]

    @property
    def traced(self) -> tuple[int, ...]:
        """The layers to trace: all where there are few, otherwise the first, the second and the last."""
        if len(self.members) <= TRACED:
            return self.members
        return (*self.members[:2], self.members[-1])

    @property
    def skipped(self) -> tuple[int, ...]:
        """The layers that are not traced."""
        return self.members[2:-1]


def layer_prefix(model: nn.Module) -> str | None:
    """The common prefix of the decoder layers' names, such as `model.layers.`; None where they differ in more than an
    index.
    """
    prefixes = set()
    for index, name in attention_modules(model).items():
        match = re.match(rf"(.+?\.){index}\.", name)
        prefixes.add(match[1] if match else None)
    return prefixes.pop() if len(prefixes) == 1 else None


def kinds_of(
    model: nn.Module, prefix: str, stored: Mapping[str, ir.DataType], computed: Mapping[str, ir.TensorProtocol]
) -> list[Kind]:
    """Group the decoder layers of `model`, which is prepared for the graph, by kind.

    `stored`: types of the tensors in the files, by the model's names; `computed`: the buffers that no file holds.
    """
    members: dict[object, list[int]] = {}
    for index in sorted(attention_modules(model)):
        layer = model.get_submodule(f"{prefix}{index}")
        members.setdefault(_description(layer, f"{prefix}{index}", index, stored, computed), []).append(index)
    return [Kind(tuple(indices)) for indices in members.values()]


def _description(
    layer: nn.Module,
    name: str,
    index: int,
    stored: Mapping[str, ir.DataType],
    computed: Mapping[str, ir.TensorProtocol],
) -> object:
    """Describe `layer` by everything but its index, as a value that can be compared."""
    inside = {id(module): path for path, module in layer.named_modules()}
    description: list[object] = []
    for path, module in layer.named_modules():
        attributes = {
            key: "own" if key == "layer_idx" and value == index else _value(value, inside)
            for key, value in vars(module).items()
            if key not in REGISTERED
        }
        tensors = []
        for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            full = ".".join(filter(None, (name, path, key)))
            values = computed[full].tobytes() if full in computed else None
            tensors.append((key, type(tensor), tuple(tensor.shape), tensor.dtype, stored.get(full), values))
        description.append((path, type(module), tuple(sorted(attributes.items())), tuple(tensors)))
    return tuple(description)


def _value(value: object, inside: Mapping[int, str]) -> object:
    """Convert an attribute to a value that can be compared: plain data by value, a module by its path in the layer, any
    other object by identity.
    """
    if isinstance(value, PLAIN):
        return (type(value), repr(value))
    if isinstance(value, list | tuple):
        return (type(value), tuple(_value(item, inside) for item in value))
    if isinstance(value, set | frozenset):
        return (type(value), frozenset(_value(item, inside) for item in value))
    if isinstance(value, dict):
        return (type(value), tuple((_value(key, inside), _value(item, inside)) for key, item in value.items()))
    if isinstance(value, partial):
        return (partial, _value([value.func, value.args, value.keywords], inside))
    if isinstance(value, MethodType):
        return (MethodType, _value([value.__func__, value.__self__], inside))
    return inside.get(id(value), id(value))


@dataclass
class Call:
    """The last arguments and outputs of the layers of a kind."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    output: object = None


@dataclass(frozen=True)
class LayerIndex:
    """Replaces a layer's index during tracing: only the cache may use the number."""

    number: int

    def __eq__(self, other: object) -> bool:
        raise NotAlikeError(f"layer {self.number} compares its index")

    def __bool__(self) -> bool:
        raise NotAlikeError(f"layer {self.number} looks at its index")

    __hash__ = None  # type: ignore[assignment]


class SkippedLayer(nn.Module):
    """A decoder layer without modules, parameters and buffers; reading one of these raises NotAlikeError.

    It is made of the layer itself (`strip`), and the layer's class stays a base, so that the model's `isinstance` tests
    hold.
    """

    stripped: frozenset[str] = frozenset()

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get("stripped", ()):
            raise NotAlikeError(f"a layer that is not traced is asked for `{name}`, which it has no longer")
        return super().__getattr__(name)

    @classmethod
    def strip(cls, layer: nn.Module) -> None:
        """Remove the modules, parameters and buffers of `layer`, and remember their names."""
        registered = (layer._modules, layer._parameters, layer._buffers)
        vars(layer)["stripped"] = frozenset(name for names in registered for name in names)
        for names in registered:
            names.clear()
        layer.__class__ = type(type(layer).__name__, (cls, type(layer)), {})


def skip(model: nn.Module, prefix: str, kinds: Sequence[Kind]) -> None:
    """Let the layers of `model` that are not traced pass their input through, as a node `operators.SKIPPED`.

    Changed in place: these layers lose their modules, and the traced ones no longer know their index.
    """
    for kind in kinds:
        call = Call()
        for index in kind.traced:
            layer = model.get_submodule(f"{prefix}{index}")
            _watch(layer, call)
            for module in layer.modules():
                if getattr(module, "layer_idx", None) == index:
                    vars(module)["layer_idx"] = LayerIndex(index)
        for index in kind.skipped:
            layer = model.get_submodule(f"{prefix}{index}")
            SkippedLayer.strip(layer)
            layer.forward = _handing_on(index, call)


def _watch(layer: nn.Module, call: Call) -> None:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call.arguments = (args, kwargs)

    def after(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        call.output = output

    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(after)


def _handing_on(index: int, call: Call) -> Callable[..., object]:
    """Make the forward pass of the skipped layer `index`; `call` has the arguments of its kind."""

    def forward(*args: Any, **kwargs: Any) -> object:
        if call.arguments is None:
            raise NotAlikeError(f"layer {index} runs before the first of its kind")
        seen, named = call.arguments
        if not args or not seen or not _same((args[1:], kwargs), (seen[1:], named)):
            raise NotAlikeError(f"layer {index} is handed something else than its kind")
        passed = operators.layer(args[0], index)
        if isinstance(call.output, torch.Tensor):
            return passed
        if isinstance(call.output, tuple) and all(output is None for output in call.output[1:]):
            return (passed, *call.output[1:])
        raise NotAlikeError(f"layer {index} gives back more than its hidden states")

    return forward


def _same(one: object, other: object) -> bool:
    """Tell whether two arguments are one object, or equal plain data."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        assert isinstance(other, list | tuple), "both are of one type"
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        assert isinstance(other, dict), "both are of one type"
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return isinstance(one, PLAIN) and one == other
