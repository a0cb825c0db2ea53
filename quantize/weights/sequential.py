"""Round layer by layer: each on what the layers before it, already rounded, feed it, toward the float model's outputs.

`ridge_target` says which weight a product is rounded to then, and `residual` finds what it is added to.

The model goes through memory one decoder layer at a time, as `calibrate.measure.stream` has it, twice: the float one
and the quantized one, in FP32, their hidden states in two files each, 4 · tokens · width bytes, of which a layer reads
one and writes the other: a killed run goes on at the layer it was in. The groups of a layer are rounded in the order
they are called in, each after a pass of all batches up to its input through both, experts' last products after one
for many (`paired_inputs`). Where the two have not the same
tokens (experts) there is no M, nor for what all experts of a layer read, which would have a column for each of their
rows: H is of the quantized model, and w* = w. What is outside the layers is rounded to nearest.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import DynamicCache

from ...calibrate.measure.stream import Chain, HiddenStates, check_space, going_on
from ...calibrate.model.decoder import LayerCall, NoChainError
from ...calibrate.model.expert_modules import routed_products, whole_input_module
from ...calibrate.model.products import output_channel_axis
from ...calibrate.model.source import Source
from ...core.errors import InputError
from ...core.reporter import Reporter
from ..codes.encoding import code_values, two_code_values
from ..codes.formats import TWO_TERMS
from ..scales.decisions import Scales, TensorScale
from .channels import QuantizedWeight, WeightMethod, quantize_weight
from .gptq import Compensation, compensation_of
from .paired_inputs import GroupInput, InputAndResidual, InputSums, passes
from .residual import residual_bases
from .ridge_target import ridge_target
from .rounding_progress import Rounded

Batches = Mapping[int, npt.NDArray[np.int64]]
#: What a product gets of its input, as float32 numbers, under the decision for its activation.
ProductInput = Callable[[torch.Tensor, TensorScale], torch.Tensor]


def product_input(x: torch.Tensor, activation: TensorScale) -> torch.Tensor:
    """The numbers that the codes of `x` stand for, float32 of x's shape."""
    scale = torch.tensor(activation.scale, device=x.device)
    if activation.terms == 1:
        return code_values(x, scale).mul_(scale)
    first, second = two_code_values(x, scale)
    return first.add_(second, alpha=1 / TWO_TERMS.divisor).mul_(scale)


def exact_input(x: torch.Tensor, activation: TensorScale) -> torch.Tensor:
    """`x` itself: activations that lose nothing, under any decision."""
    return x.float()


def check_sequential(source: Source, device: str) -> None:
    """Raise InputError for a model that is no chain of decoder layers."""
    try:
        Chain(source, device)
    except NoChainError as error:
        raise _no_layers(error) from error


def _no_layers(error: NoChainError) -> InputError:
    return InputError(f"{error.what}, so it cannot be rounded layer by layer; use --weight-rounding gptq")


class InputReached(Exception):  # noqa: N818  # it stops a forward pass and is no error
    """Stops a layer at the input that is looked at."""


class SequentialRounding(Chain):
    """Both models, as far as they have come.

    Invariant: `float[n % 2]` and `quantized[n % 2]` hold what enters layer n, all batches of it, when n + 1 steps of
    `rounded` have ended.
    """

    def __init__(
        self,
        source: Source,
        scales: Scales,
        method: WeightMethod,
        batches: Batches,
        folder: Path,
        device: str = "cpu",
        seen: ProductInput = product_input,
        unknown: Collection[str] = frozenset(),
    ):
        """Round the modules of `scales.activations`, with scales by `method`, on `batches` (index -> token ids int64
        [windows, seq_len]); hidden states and `Rounded` lie in `folder`, which is there. What a killed call left there
        is gone on from, so it must have been of the same arguments. `unknown`: modules of whose input too little was
        seen, which are rounded to nearest.

        Raises InputError where the disk has no room, and for a model that is no chain of layers.
        """
        super().__init__(source, device, torch.float32)
        self.activations, self.method, self.batches, self.seen = scales.activations, method, batches, seen
        self.unknown = unknown
        self.routed = {name for products in routed_products(self.model).values() for name in products}
        files = [folder / f"{model}-{parity}" for model in ("float", "quantized") for parity in range(2)]
        size = sum(ids.size for ids in batches.values()) * self.layer_output.width * self.layer_output.dtype.itemsize
        check_space(folder, files, size, "--weight-rounding sequential")
        hidden = [HiddenStates(file, batches, self.layer_output) for file in files]
        self.float, self.quantized = hidden[:2], hidden[2:]
        self.rounded = Rounded(folder)

    def run(self, report: Reporter) -> Rounded:
        """Round the layers that are not yet rounded, one after the other."""
        done = self.rounded.steps
        remaining = range(max(done - 1, 0), self.layers.count)
        if not remaining:
            return self.rounded
        if done > 1:
            going_on(report, done, self.layers.count)
        calls = self._entered(done > 0)
        tokens = sum(ids.size for ids in self.batches.values())
        with report.track(
            f"Rounding {len(remaining)} layers, one by one", len(remaining) * tokens, "tokens"
        ) as advance:
            for index in remaining:
                with self.weights.filled(self.inside(index)), torch.inference_mode():
                    self._layer(index, calls)
                self._end(index + 2)
                advance(tokens)
        return self.rounded

    def _end(self, step: int) -> None:
        """End a step: what enters the next layer is on the disk before it is said to be."""
        for states in (self.float, self.quantized):
            states[(step - 1) % 2].flush()
        self.rounded.end(step)

    def _entered(self, done: bool) -> dict[tuple[int, ...], list[LayerCall]]:
        """Step 1: what the first layer gets, the same in both models, where that is not `done`; returns the layers'
        calls for each shape of batch.
        """

        def keep(batch: int, hidden: torch.Tensor) -> None:
            self.float[0].write(batch, hidden)
            self.quantized[0].write(batch, hidden)

        try:
            calls = self.enter(self.batches, None if done else keep)
        except NoChainError as error:
            raise _no_layers(error) from error
        if not done:
            self._end(1)
        return calls

    def _layer(self, index: int, calls: Mapping[tuple[int, ...], list[LayerCall]]) -> None:
        """Round the groups of a layer whose weights are there, and take both models past it."""
        layer = self.layers.of(self.model)[index]
        entering, leaving = ((self.float[n % 2], self.quantized[n % 2]) for n in (index, index + 1))

        def through(states: HiddenStates, batch: int) -> torch.Tensor:
            call = calls[self.batches[batch].shape][index]
            return call.run(layer, states.read(batch, self.device), DynamicCache())

        weights: dict[str, torch.Tensor] = {}
        batch = next(iter(self.batches))
        inside = {name: module for name, module in self.products.items() if self.layers.index(name) == index}
        added = residual_bases(
            self.model, layer, inside, entering[0].read(batch, self.device), partial(through, entering[0], batch)
        )
        for places in passes(self._places(inside, added), self.routed):
            for gathered in self._gathered(places, entering, through, weights):
                found, wanted = _goals(gathered)
                for name, weight in gathered.rows.items():
                    made = quantize_weight(weight, self.method, found, wanted=wanted.get(name))
                    if isinstance(made, QuantizedWeight):
                        self.rounded.add(name, made)
                        weights[name] = self._numbers(name, made)
        for batch in self.batches:
            leaving[0].write(batch, through(entering[0], batch))
            with self._quantized(weights):
                leaving[1].write(batch, through(entering[1], batch))

    def _numbers(self, name: str, made: QuantizedWeight) -> torch.Tensor:
        """The numbers that the codes of a module stand for, shaped as the module has them."""
        numbers = made.codes.float() * made.scale[:, None]
        return numbers.movedim(0, output_channel_axis(self.products[name])).contiguous().to(self.device)

    def _places(self, inside: Collection[str], added: Mapping[str, str]) -> Iterator[GroupInput]:
        """The inputs of the products `inside` a layer that are rounded, in the order they are called in."""
        for first, members in self.groups.items():
            chosen = [name for name in members if name in self.activations and name not in self.unknown]
            if chosen := [name for name in chosen if name in inside]:
                base = added.get(first) if members == [first] else None
                whole = first not in self.routed and whole_input_module(self.model, first) is self.products[first]
                shapes = [_rows(self.products[name]).shape for name in chosen]
                yield GroupInput(first, tuple(chosen), base, whole, (shapes[0][1], sum(shape[0] for shape in shapes)))

    def _gathered(
        self,
        places: list[GroupInput],
        entering: tuple[HiddenStates, HiddenStates],
        through: Callable[[HiddenStates, int], torch.Tensor],
        weights: Mapping[str, torch.Tensor],
    ) -> Iterator[InputSums]:
        """Add up the inputs of the products at `places` in both models, by one pass of all batches through both models;
        each is given up when it was taken.
        """
        held = [InputSums(place, lambda name: weight_rows(self.products[name])) for place in places]

        def add(number: int, batch: int, size: int) -> None:
            exact = self._seen(places, entering[0], batch, through)
            with self._quantized(weights):
                got = self._seen(places, entering[1], batch, through)
            for each in held:
                mine = got.get(each.place.first)
                tokens = None if mine is None else self.seen(mine[0], self.activations[each.place.members[0]])
                each.add(number % 2, exact.get(each.place.first), mine, tokens, size)

        for number, (batch, ids) in enumerate(self.batches.items()):
            add(number, batch, ids.size)  # what it has seen is given up with it, before H is factored
        while held:
            yield held.pop(0)

    def _seen(
        self,
        places: list[GroupInput],
        states: HiddenStates,
        batch: int,
        through: Callable[[HiddenStates, int], torch.Tensor],
    ) -> dict[str, InputAndResidual]:
        """Record the input of the product at each of `places`, float32 [tokens, width], and the residual it is added to
        (the hidden states where that is not asked for), of those that are reached.
        """
        seen = {"": states.read(batch, self.device).flatten(0, -2)}
        firsts = {place.first for place in places}

        def see(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
            def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
                seen[name] = inputs[0].flatten(0, -2).float()
                if firsts <= seen.keys():
                    raise InputReached

            return hook

        with ExitStack() as stack, suppress(InputReached):
            for name in firsts | {place.base for place in places if place.base}:
                hook = whole_input_module(self.model, name).register_forward_pre_hook(see(name))
                stack.callback(hook.remove)
            through(states, batch)
        return {place.first: (seen[place.first], seen[place.base or ""]) for place in places if place.first in seen}

    @contextmanager
    def _quantized(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """The layer with these `weights` and what their products get of their inputs, for a while."""

        def quantizing(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
            return lambda module, inputs: (self.seen(inputs[0], self.activations[name]), *inputs[1:])

        modules = {name: self.products[name] for name in weights}
        before = {name: module._parameters["weight"] for name, module in modules.items()}
        with ExitStack() as stack:
            for name, module in modules.items():
                stack.callback(module.register_forward_pre_hook(quantizing(name)).remove)
                module._parameters["weight"] = nn.Parameter(weights[name], requires_grad=False)
            try:
                yield
            finally:
                for name, module in modules.items():
                    module._parameters["weight"] = before[name]


def _goals(gathered: InputSums) -> tuple[Compensation, dict[str, torch.Tensor]]:
    """The compensation of what a place gets in the quantized model, and what each of its weights is to come close to,
    where that is not the weight itself. The sums are used up.
    """
    wanted: dict[str, torch.Tensor] = {}
    start = 0
    for name, weight in gathered.rows.items() if gathered.same else ():
        wanted[name] = ridge_target(weight, *gathered.halves, slice(start, start + len(weight)))
        start += len(weight)
    moments = gathered.halves[0].moments.add_(gathered.halves[1].moments)
    del gathered.halves  # before H is factored: of a wide input they are gigabytes
    return compensation_of(gathered.place.first, moments), wanted


def weight_rows(module: nn.Module) -> torch.Tensor:
    """The weight of a product, BF16 [out, in] in memory."""
    return _rows(module).cpu().to(torch.bfloat16).contiguous()


def _rows(module: nn.Module) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor), "a matrix product has a weight"
    return weight.movedim(output_channel_axis(module), 0)
