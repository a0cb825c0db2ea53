"""The decoder layers of a model without weights, and the arguments that the model calls each of them with.

A model can run layer by layer only if its layers are a chain: each layer gets the hidden states that the layer before
it returned, and nothing else that depends on the text. This is tested, and needs no list of architectures. A pass of
two tokens, with the layers on the meta device, shows which objects each layer receives and returns. A pass of every
batch without the layers, which costs no more than the embedding, records the masks and position embeddings that the
model makes for each layer, and shows that they are the same for all batches of a shape.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

from ...core.errors import InputError
from .caches import new_cache
from .gemms import language_modules
from .processor import Inputs

#: Placeholders for the hidden states and the cache in the recorded arguments of a layer.
HIDDEN = object()
CACHE = object()
Forward = Callable[..., Any]


class Described(Protocol):
    """A checkpoint as messages and `find_layers` need it: a `Source`, or a `Description`."""

    @property
    def name(self) -> str:
        """The name that the user gave."""

    @property
    def architecture(self) -> str:
        """The class of the model."""

    @property
    def text_config(self) -> PreTrainedConfig:
        """The configuration of the language model."""


@dataclass(frozen=True)
class Description:
    """A checkpoint as messages name it."""

    name: str
    architecture: str
    text_config: PreTrainedConfig


@dataclass(frozen=True)
class LayerCall:
    """The arguments of a layer for batches of one shape, with HIDDEN and CACHE in the places of these two.

    `added`: features that the model adds to the hidden states of the layer before, of a row with images.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    added: torch.Tensor | None = None

    @classmethod
    def split(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple["LayerCall", torch.Tensor]:
        """Separate the hidden states, the first argument or the one of that name, from the other arguments."""
        hidden = args[0] if args else kwargs["hidden_states"]
        first = (HIDDEN,) if args else ()
        names = {} if args else {"hidden_states": HIDDEN}
        return cls(
            first + tuple(map(_no_cache, args[1:])), {name: _no_cache(value) for name, value in kwargs.items()} | names
        ), hidden

    def with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "LayerCall":
        """Return these arguments with each tensor changed."""
        return LayerCall(*tree_map_only(torch.Tensor, change, (self.args, self.kwargs, self.added)))

    def run(self, layer: nn.Module, hidden: torch.Tensor, cache: DynamicCache | None) -> torch.Tensor:
        """Call `layer` on `hidden`, to which `added` is added, with these arguments; return its hidden states.

        `cache` None: the arguments were recorded without one.
        """
        if self.added is not None:
            hidden = hidden + self.added
        values = {id(HIDDEN): hidden, id(CACHE): cache}
        out = layer(
            *(values.get(id(value), value) for value in self.args),
            **{name: values.get(id(value), value) for name, value in self.kwargs.items()},
        )
        result: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return result


def _no_cache(value: object) -> object:
    return CACHE if isinstance(value, Cache) else value


@dataclass(frozen=True)
class Layers:
    """The names of a model's decoder layers: `prefix.0`, `prefix.1` …, `count` of them."""

    prefix: str
    count: int

    def modules(self, model: PreTrainedModel) -> list[nn.Module]:
        """The layers of `model`, in order."""
        return [model.get_submodule(f"{self.prefix}.{index}") for index in range(self.count)]

    def index(self, module: str) -> int | None:
        """The index of the layer that contains `module`; None for a module outside the layers."""
        rest = module.removeprefix(f"{self.prefix}.")
        if rest != module:
            return int(rest.partition(".")[0])
        return None


@dataclass(frozen=True)
class LayerOutput:
    """The form of a layer's output: hidden states of `width` values in `dtype`.

    `outputs`: the length of the tuple whose first element they are; 0 where the layer returns them alone.
    """

    outputs: int
    width: int
    dtype: torch.dtype

    def wrap(self, hidden: torch.Tensor) -> Any:
        """Put `hidden` into the form that a layer returns."""
        if self.outputs:
            return (hidden, *[None] * (self.outputs - 1))
        return hidden


@dataclass(frozen=True)
class TracedCall:
    """One recorded call of a layer: its index, arguments and output."""

    index: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    @property
    def hidden(self) -> Any:
        """The hidden states in the output."""
        if isinstance(self.out, tuple):
            return self.out[0]
        return self.out


class NoChainError(InputError):
    """The model is no chain of decoder layers; `reason` says why, as a clause that follows the model's name."""

    def __init__(self, source: Described, why: str):
        """Name the model and the reason, and how to calibrate it all the same."""
        self.reason = f"{source.architecture} {why}"
        super().__init__(
            source.name,
            f"{self.reason}, so it cannot be streamed layer by layer",
            "calibrate it in memory, with --no-stream",
        )


def find_layers(model: PreTrainedModel, source: Described) -> Layers:
    """Find the decoder layers of `model`: the outermost list of as many modules as its configuration says.

    Raises NoChainError where there is no such list.
    """
    count = source.text_config.num_hidden_layers
    modules = language_modules(model)
    prefix = next(
        (name for name, module in modules.items() if isinstance(module, nn.ModuleList) and len(module) == count), None
    )
    if prefix is None:
        raise NoChainError(source, f"has no list of {count} decoder layers")
    return Layers(prefix, count)


def trace_layers(model: PreTrainedModel, meta: PreTrainedModel, layers: Layers, device: str) -> list[TracedCall]:
    """Run `model` on two tokens and record the call of each layer; the layers themselves run on the meta device.

    `model` needs weights outside its layers only, `meta`, the same model on the meta device, none at all. In place of a
    layer's output the model gets zeros of the shape of the output on the meta device.
    """
    calls: list[TracedCall] = []
    cache = new_cache(meta)

    def to_meta(leaf: Any) -> Any:
        if isinstance(leaf, Cache):
            return cache
        if isinstance(leaf, torch.Tensor):
            return leaf.to("meta")
        return leaf

    def forward(index: int, layer: nn.Module) -> Forward:
        def call(*args: Any, **kwargs: Any) -> Any:
            meta_args, meta_kwargs = tree_map(to_meta, (args, kwargs), is_leaf=lambda value: isinstance(value, Cache))
            out = tree_map_only(
                torch.Tensor, lambda leaf: torch.zeros_like(leaf, device=device), layer(*meta_args, **meta_kwargs)
            )
            calls.append(TracedCall(index, args, kwargs, out))
            return out

        return call

    with (
        standing_in(layers.modules(model), [forward(*numbered) for numbered in enumerate(layers.modules(meta))]),
        torch.inference_mode(),
    ):
        model.base_model(
            input_ids=torch.zeros((1, 2), dtype=torch.int64, device=device),
            past_key_values=new_cache(model),
            use_cache=True,
        )
    return calls


def common_output(calls: Sequence[TracedCall], layers: Layers, source: Described) -> LayerOutput:
    """Check that recorded `calls` are those of a chain, and return the form of output that the layers share.

    Raises NoChainError, naming the reason, for a model that is no chain. Tensors are compared by identity; `calls`
    keeps them alive.
    """
    if [call.index for call in calls] != list(range(layers.count)):
        raise NoChainError(source, "does not call its decoder layers one after the other")
    outputs: set[int] = set()
    for index, traced in enumerate(calls):
        if not traced.args and "hidden_states" not in traced.kwargs:
            raise NoChainError(source, f"does not give layer {index} its hidden states as the first argument")
        call, hidden = LayerCall.split(traced.args, traced.kwargs)
        if index and hidden is not calls[index - 1].hidden:
            raise NoChainError(source, f"changes the hidden states between layer {index - 1} and layer {index}")
        if any(id(leaf) in outputs for leaf in tree_leaves((call.args, call.kwargs))):
            raise NoChainError(source, f"gives layer {index} more of an earlier layer than its hidden states")
        outputs |= {id(leaf) for leaf in tree_leaves(traced.out) if isinstance(leaf, torch.Tensor)}
    out = calls[-1].out
    hidden = calls[-1].hidden
    return LayerOutput(len(out) if isinstance(out, tuple) else 0, hidden.shape[-1], hidden.dtype)


class LayersReached(Exception):  # noqa: N818  # it stops a forward pass and is no error
    """Stops a forward pass at its last decoder layer."""


@contextmanager
def standing_in(layers: Sequence[nn.Module], forwards: Sequence[Forward]) -> Iterator[None]:
    """Replace the forward function of each layer in this block; the model still sees all else about the layers."""
    for layer, forward in zip(layers, forwards, strict=True):
        vars(layer)["forward"] = forward
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def record_calls(
    model: PreTrainedModel,
    layers: Layers,
    output: LayerOutput,
    inputs: Inputs,
    cache: DynamicCache | None,
    leave: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden,
) -> tuple[list[LayerCall], torch.Tensor]:
    """Record the arguments of each layer for the `inputs` of a batch, and the hidden states that enter the first layer.

    `cache` None: the model runs without one; `leave` makes what leaves each layer of what enters it.
    """
    calls: list[LayerCall] = []
    entering: list[torch.Tensor] = []

    def pass_on(*args: Any, **kwargs: Any) -> Any:
        call, hidden = LayerCall.split(args, kwargs)
        calls.append(call)
        if not entering:
            entering.append(hidden)
        leaving = leave(hidden)
        if len(calls) == layers.count:
            raise LayersReached
        return output.wrap(leaving)

    with standing_in(layers.modules(model), [pass_on] * layers.count), torch.inference_mode(), suppress(LayersReached):
        model.base_model(**inputs, past_key_values=cache, use_cache=cache is not None)
    return calls, entering[0]


def record_row(
    model: PreTrainedModel, layers: Layers, output: LayerOutput, inputs: Inputs, cache: DynamicCache | None
) -> tuple[list[LayerCall], torch.Tensor]:
    """`record_calls` of the `inputs` of a row with images, through all of the model but its layers.

    Zeros leave each layer, so that what enters the next one is what the model adds between them: features of images.
    """
    added: list[torch.Tensor | None] = []

    def leave(hidden: torch.Tensor) -> torch.Tensor:
        between = bool(added) and bool(hidden.any())
        added.append(hidden if between else None)
        return torch.zeros_like(hidden)

    calls, first = record_calls(model, layers, output, inputs, cache, leave)
    return [replace(call, added=features) for call, features in zip(calls, added, strict=True)], first


def check_row(
    model: PreTrainedModel, layers: Layers, output: LayerOutput, inputs: Inputs, calls: Sequence[LayerCall],
    source: Described,
) -> None:  # fmt: skip
    """Raise NoChainError where the model does not add to hidden states between layers what `calls` of the row say.

    Its embeddings leave each layer in place of zeros.
    """
    first: list[torch.Tensor] = []
    left = iter(calls)

    def leave(hidden: torch.Tensor) -> torch.Tensor:
        added = next(left).added
        if not first:
            first.append(hidden.clone())
        elif not torch.equal(hidden, first[0] if added is None else first[0] + added):
            raise NoChainError(source, "does more between its layers than add features of images to hidden states")
        return first[0].clone()

    record_calls(model, layers, output, inputs, None, leave)


@contextmanager
def leaving_layers(
    model: PreTrainedModel, layers: Layers, output: LayerOutput, leave: Callable[[], torch.Tensor]
) -> Iterator[None]:
    """Let the layers of `model` compute nothing in this block: the last returns the hidden states of `leave`."""

    def pass_on(*args: Any, **kwargs: Any) -> Any:
        return output.wrap(LayerCall.split(args, kwargs)[1])

    stands: list[Forward] = [pass_on] * (layers.count - 1)
    with standing_in(layers.modules(model), [*stands, lambda *args, **kwargs: output.wrap(leave())]):
        yield


def outputs_behind(
    model: PreTrainedModel, layers: Layers, output: LayerOutput, input_ids: torch.Tensor, leaving: torch.Tensor,
    **named: object,
) -> Any:  # fmt: skip
    """Call `model`, with the arguments `named`, on `input_ids` and on `leaving`, the hidden states of its last layer;
    the layers do not run. Returns the outputs of transformers.
    """
    with leaving_layers(model, layers, output, lambda: leaving):
        return model(input_ids=input_ids, use_cache=False, **named)


def run_after(
    model: PreTrainedModel,
    layers: Layers,
    output: LayerOutput,
    inputs: Inputs,
    leaving: torch.Tensor,
    observing: AbstractContextManager[DynamicCache],
) -> None:
    """Run the modules behind the layers on `leaving`, the hidden states of the last layer for the `inputs` of a batch.

    `observing` is entered just before they run.
    """
    with ExitStack() as stack, torch.inference_mode():

        def leave() -> torch.Tensor:
            stack.enter_context(observing)
            return leaving

        stack.enter_context(leaving_layers(model, layers, output, leave))
        model.base_model(**inputs, past_key_values=new_cache(model), use_cache=True)


def equal_calls(mine: Sequence[LayerCall], theirs: Sequence[LayerCall]) -> bool:
    """Tell whether all layers are called with the same values."""
    compared: set[tuple[int, int]] = set()
    for one, other in zip(mine, theirs, strict=True):
        leaves = tree_leaves((one.args, one.kwargs)), tree_leaves((other.args, other.kwargs))
        if len(leaves[0]) != len(leaves[1]):
            return False
        for a, b in zip(*leaves, strict=True):
            if a is b or (id(a), id(b)) in compared:
                continue
            if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor) or not (
                torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            ):
                return False
            compared.add((id(a), id(b)))
    return True
