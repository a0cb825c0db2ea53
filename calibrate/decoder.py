"""The decoder of a model that has no weights yet: its list of layers, what each is called with, and one layer's weights at a time.

Layer by layer is right only for a model that is a chain: each layer gets the hidden states that the one before it returned, and nothing else
that depends on the text. No list of architectures says so. A two-token pass on the meta device shows which object each layer receives and
returns, and a pass of every batch with the layers taken out, which costs no more than the embedding, records the masks and
position embeddings that the model itself makes for each layer and shows that they are the same for all batches of a shape.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import Cache, DynamicCache, PreTrainedModel

from ..errors import InputError
from .source import Source
from .weights import Weights

#: Stand for the hidden states and for the cache in the recorded arguments of a layer.
HIDDEN, CACHE = object(), object()
Forward = Callable[..., Any]


@dataclass(frozen=True)
class Call:
    """The arguments a layer is called with for batches of one shape; HIDDEN and CACHE stand where those go."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple["Call", torch.Tensor]:
        """The call, and the hidden states that were in it: the first argument, or the one of that name."""
        hidden = args[0] if args else kwargs["hidden_states"]
        first = (HIDDEN,) if args else ()
        names = {} if args else {"hidden_states": HIDDEN}
        return cls(first + tuple(map(_no_cache, args[1:])), {name: _no_cache(value) for name, value in kwargs.items()} | names), hidden

    def run(self, layer: nn.Module, hidden: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """The hidden states that `layer` makes of `hidden`."""
        stands = {id(HIDDEN): hidden, id(CACHE): cache}
        out = layer(*(stands.get(id(value), value) for value in self.args), **{name: stands.get(id(value), value) for name, value in self.kwargs.items()})
        result: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return result


def _no_cache(value: object) -> object:
    return CACHE if isinstance(value, Cache) else value


@dataclass(frozen=True)
class Chain:
    """A model's decoder layers, named `prefix.0`, `prefix.1` …; each returns `width`-wide states, in a tuple of `outputs` where that is not 0."""

    prefix: str
    count: int
    outputs: int
    width: int
    dtype: torch.dtype

    def answer(self, hidden: torch.Tensor) -> Any:
        """`hidden` as a layer returns it."""
        return (hidden, *[None] * (self.outputs - 1)) if self.outputs else hidden

    def layers(self, model: PreTrainedModel) -> list[nn.Module]:
        """The layers of `model`, in order."""
        return [model.get_submodule(f"{self.prefix}.{index}") for index in range(self.count)]

    def layer_of(self, module: str) -> int | None:
        """Index of the layer that holds the module of that name; None for what is before or after the layers."""
        rest = module.removeprefix(f"{self.prefix}.")
        return int(rest.partition(".")[0]) if rest != module else None


@dataclass(frozen=True)
class Traced:
    """One call of a layer on the meta device: what went in and what came out."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    @property
    def hidden(self) -> Any:
        """The hidden states that came out."""
        return self.out[0] if isinstance(self.out, tuple) else self.out


def find_chain(meta: PreTrainedModel, source: Source) -> Chain:
    """The decoder layers of `meta`, a model on the meta device.

    Raises InputError, naming the architecture and what it does, for a model that cannot be run layer by layer.
    """
    count = source.text_config.num_hidden_layers
    prefix = next((name for name, module in meta.named_modules() if isinstance(module, nn.ModuleList) and len(module) == count), None)
    if prefix is None:
        what: str | None = f"has no list of {count} decoder layers"
    elif meta._keep_in_fp32_modules_strict:
        what = f"keeps {min(meta._keep_in_fp32_modules_strict)} in FP32"
    else:
        layers = list(meta.get_submodule(prefix).children())
        calls = _trace(meta, layers)
        what = _unlike_a_chain(layers, calls)
    if prefix is None or what is not None:
        raise InputError(f"{source.name}: {source.architecture} {what}, so it cannot be streamed layer by layer; calibrate it in memory, with --no-stream")
    out, hidden = calls[-1].out, calls[-1].hidden
    return Chain(prefix, count, len(out) if isinstance(out, tuple) else 0, hidden.shape[-1], hidden.dtype)


def _trace(meta: PreTrainedModel, layers: Sequence[nn.Module]) -> list[Traced]:
    """The calls of `layers` while `meta` runs on two tokens."""
    calls: list[Traced] = []

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        calls.append(Traced(layer, args, kwargs, out))

    handles = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        with torch.inference_mode():
            meta.base_model(input_ids=torch.zeros((1, 2), dtype=torch.int64, device="meta"), past_key_values=DynamicCache(), use_cache=True)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _unlike_a_chain(layers: Sequence[nn.Module], calls: Sequence[Traced]) -> str | None:
    """What the model does that a chain does not; None for a chain. Objects are told apart by identity, and `calls` keeps them alive."""
    if [call.layer for call in calls] != list(layers):
        return "does not call its decoder layers one after the other"
    made: set[int] = set()
    for index, traced in enumerate(calls):
        if not traced.args and "hidden_states" not in traced.kwargs:
            return f"does not give layer {index} its hidden states as the first argument"
        call, hidden = Call.of(traced.args, traced.kwargs)
        if index and hidden is not calls[index - 1].hidden:
            return f"changes the hidden states between layer {index - 1} and layer {index}"
        if any(id(leaf) in made for leaf in tree_leaves((call.args, call.kwargs))):
            return f"gives layer {index} more of an earlier layer than its hidden states"
        made |= {id(leaf) for leaf in tree_leaves(traced.out) if isinstance(leaf, torch.Tensor)}
    return None


class LayersReached(Exception):  # noqa: N818  # it stops a forward pass and is no error
    """Stops a forward pass where its last decoder layer would have run."""


@contextmanager
def standing_in(layers: Sequence[nn.Module], forwards: Sequence[Forward]) -> Iterator[None]:
    """Let `forwards` be called in place of the layers' own; everything else about the layers stays visible to the model."""
    for layer, forward in zip(layers, forwards, strict=True):
        vars(layer)["forward"] = forward
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def record_calls(model: PreTrainedModel, chain: Chain, input_ids: torch.Tensor, cache: DynamicCache) -> tuple[list[Call], torch.Tensor]:
    """What each layer is called with for `input_ids` int64 [windows, seq_len], and the hidden states that the first one gets."""
    calls: list[Call] = []
    entering: list[torch.Tensor] = []

    def pass_on(*args: Any, **kwargs: Any) -> Any:
        call, hidden = Call.of(args, kwargs)
        calls.append(call)
        entering.append(hidden)
        if len(calls) == chain.count:
            raise LayersReached
        return chain.answer(hidden)

    with standing_in(chain.layers(model), [pass_on] * chain.count), torch.inference_mode():
        try:
            model.base_model(input_ids=input_ids, past_key_values=cache, use_cache=True)
        except LayersReached:
            return calls, entering[0]
    raise AssertionError("the meta pass called every layer")


def run_after(model: PreTrainedModel, chain: Chain, input_ids: torch.Tensor, leaving: torch.Tensor, observing: AbstractContextManager[DynamicCache]) -> None:
    """Run what follows the layers on `leaving`, the hidden states of the last one; `observing` is entered where that begins."""
    with ExitStack() as stack, torch.inference_mode():

        def pass_on(*args: Any, **kwargs: Any) -> Any:
            return chain.answer(Call.of(args, kwargs)[1])

        def leave(*args: Any, **kwargs: Any) -> Any:
            stack.enter_context(observing)
            return chain.answer(leaving)

        stack.enter_context(standing_in(chain.layers(model), [pass_on] * (chain.count - 1) + [leave]))
        model.base_model(input_ids=input_ids, past_key_values=DynamicCache(), use_cache=True)


def equal_calls(mine: Sequence[Call], theirs: Sequence[Call]) -> bool:
    """Whether all layers are called with the same values."""
    compared: set[tuple[int, int]] = set()
    for one, other in zip(mine, theirs, strict=True):
        leaves = tree_leaves((one.args, one.kwargs)), tree_leaves((other.args, other.kwargs))
        if len(leaves[0]) != len(leaves[1]):
            return False
        for a, b in zip(*leaves, strict=True):
            if a is b or (id(a), id(b)) in compared:
                continue
            if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor) or not (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b):
                return False
            compared.add((id(a), id(b)))
    return True


class Materializer:
    """Gives modules of a skeleton their weights for a while, in BF16, and takes them back."""

    def __init__(self, model: PreTrainedModel, source: Source, device: str):
        """Take the weights of `source` for `model`, onto `device`."""
        self.model, self.weights, self.device = model, Weights(source), device
        self.name = source.name
        self.tied: Mapping[str, str] = {**model.all_tied_weights_keys, **{kept: tied for tied, kept in model.all_tied_weights_keys.items()}}

    @contextmanager
    def filled(self, names: Sequence[str], resident: bool = True) -> Iterator[None]:
        """Fill the named modules' own parameters and buffers; `resident` False leaves BF16 weights on the CPU in their mapped files.

        Raises InputError for a weight that the checkpoint has under another name.
        """
        modules = [(name, self.model.get_submodule(name)) for name in names]
        before = [dict(module._parameters) for _, module in modules]
        try:
            for name, module in modules:
                self._fill(name, module, resident)
            yield
        finally:
            for (_, module), parameters in zip(modules, before, strict=True):
                module._parameters.update(parameters)

    def _fill(self, name: str, module: nn.Module, resident: bool) -> None:
        prefix = f"{name}." if name else ""
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = nn.Parameter(self._read(prefix + key, resident), requires_grad=False)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                computed = key in module._non_persistent_buffers_set
                module._buffers[key] = buffer.to(self.device) if computed else self._read(prefix + key, resident)

    def _read(self, name: str, resident: bool) -> torch.Tensor:
        stored = next((key for key in (name, self.tied.get(name)) if key in self.weights.names()), None)
        if stored is None:
            raise InputError(
                f"{self.name}: has no tensor {name}; load the model once with transformers and save it with save_pretrained, which gives tensors their present names"
            )
        mapped = self.weights.tensor(stored)
        tensor = mapped.to(self.device, torch.bfloat16 if mapped.is_floating_point() else mapped.dtype)
        return tensor.clone() if resident and tensor is mapped else tensor
