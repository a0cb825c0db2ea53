"""Round weights layer by layer: each layer on what the rounded layers before it give, toward the float outputs.

`ridge_target` gives the weights that GPTQ then rounds to, and `residual_bases` the tensor that a GEMM is added to.

The float model and the quantized one go through memory one decoder layer at a time, as in `calibrate.measure.stream`,
in FP32. Their hidden states lie in two files each, 4 · tokens · width bytes: a layer reads one and writes the other, so
that a killed run goes on at the layer it was in. The groups of a layer are rounded in the order they are called in,
each after a pass of all batches through both models, up to the group's input; the last GEMMs of experts share passes
(`paired_inputs`). Where the two models do not give an input the same tokens (experts) there is no M; nor is there for
the input that all experts of a layer share, whose M would have a column for each row of each expert. There H is of the
quantized model and w* = w. GEMMs outside the layers are rounded to nearest.

The residual to which a decoder layer adds a GEMM is found by running the layer.

One batch goes through the layer. A GEMM is added to the residual r where r plus the GEMM's output equals, to the
last bit, the input of a later module or the output of the layer. Candidates for r are the input of the layer and the
inputs of earlier modules. A layer that adds in another way (after a norm, three terms at once) has no such sum, and no
residual is reported for it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ...calibrate.measure.chain import Chain
from ...calibrate.measure.held_out import input_name, is_held_out
from ...calibrate.measure.hidden_states import HiddenStates
from ...calibrate.measure.moments import shrink
from ...calibrate.measure.stream import LayerSteps, states_in_turn
from ...calibrate.model.caches import new_cache
from ...calibrate.model.decoder import LayerCall, NoChainError
from ...calibrate.model.expert_modules import Experts, experts_of, full_input_module, routed_gemms
from ...calibrate.model.gemms import output_channel_axis
from ...calibrate.model.source import Source
from ...calibrate.ranks.world import World
from ...core.errors import InputError
from ...core.reporter import Reporter
from ...options import BLOCK
from ..codes.blocks import group_values
from ..codes.encoding import RUN_TIME_SCALES, code_values, two_code_values
from ..codes.formats import TWO_TERMS
from ..scales.decisions import TensorScale
from .channels import QuantizedWeight, WeightScaling, dequantized, judged, quantize_scaled
from .gptq import EXPERT_SHRINKAGE, Compensation, compensation, finite_moments
from .paired_inputs import GroupInput, InputAndResidual, InputSums, passes
from .ridge_target import ridge_targets
from .rounding_progress import Rounded
from .sequential_ranks import SharedRounding


def residual_bases(
    model: nn.Module,
    layer: nn.Module,
    gemms: Mapping[str, nn.Module],
    hidden: torch.Tensor,
    run: Callable[[], torch.Tensor],
) -> dict[str, str]:
    """Find, for each of the layer's `gemms`, the module of `model` whose input is the residual it is added to.

    The module's name is empty for the input of `layer` itself; GEMMs without a residual are left out. `run` calls
    the layer on `hidden` [windows, seq_len, width].
    """
    names = {module: name for name, module in model.named_modules()}
    inputs: list[tuple[str, torch.Tensor]] = [("", hidden)]
    outputs: dict[str, tuple[int, torch.Tensor]] = {}  # and the number of inputs recorded before

    def record_input(module: nn.Module, arguments: tuple[object, ...]) -> None:
        if arguments and isinstance(arguments[0], torch.Tensor) and arguments[0].numel() == hidden.numel():
            inputs.append((names[module], arguments[0]))

    def record_output(module: nn.Module, arguments: tuple[object, ...], out: object) -> None:
        if isinstance(out, torch.Tensor) and out.numel() == hidden.numel():
            outputs[names[module]] = (len(inputs), out)

    with ExitStack() as stack:
        for module in layer.modules():
            if module is not layer:
                stack.callback(module.register_forward_pre_hook(record_input).remove)
        for module in gemms.values():
            stack.callback(module.register_forward_hook(record_output).remove)
        leaving = run()
    bases: dict[str, str] = {}
    for name, (before, out) in outputs.items():
        later = [tensor for _, tensor in inputs[before:]] + [leaving]
        for base, tensor in inputs[:before]:
            total = tensor.flatten() + out.flatten()
            if any(torch.equal(total, after.flatten()) for after in later):
                bases[name] = base
                break
    return bases


Batches = Mapping[int, npt.NDArray[np.int64]]
#: The argument and result of a forward pre-hook.
Arguments = tuple[torch.Tensor, ...]


def gemm_input(x: torch.Tensor, activation: TensorScale) -> torch.Tensor:
    """Quantize and dequantize `x` under the scale `activation`, float32 of the same shape; in dynamic form, under the
    scales of its own tokens, and in blocks under those of their groups.
    """
    if activation.form == BLOCK:
        return group_values(x, activation.group_grid == "power-of-two")
    if activation.form.at_run_time:
        scales = RUN_TIME_SCALES[activation.form.kind](x)
        return code_values(x, scales).mul_(scales)
    scale = torch.full((), activation.scale, device=x.device)  # `torch.tensor` would wait for a GPU
    if activation.form.terms == 1:
        return code_values(x, scale).mul_(scale)
    first, second = two_code_values(x, scale)
    return first.add_(second, alpha=1 / TWO_TERMS.divisor).mul_(scale)


def check_sequential(source: Source, device: str) -> None:
    """Raise InputError for a model that is no chain of decoder layers."""
    try:
        Chain(source, device)
    except NoChainError as error:
        raise _no_layers(error) from error


def _no_layers(error: NoChainError) -> InputError:
    return InputError(
        error.subject, f"{error.reason}, so it cannot be rounded layer by layer", "use --weight-rounding gptq"
    )


class InputReached(Exception):  # noqa: N818  # it stops a forward pass and is no error
    """Stops the forward pass of a layer once all inputs of a pass are recorded."""


class SequentialRounding(Chain):
    """The float model and the quantized one, with the layers rounded so far.

    Invariant: `float[n % 2]` and `quantized[n % 2]` hold the hidden states that enter layer n, of all batches, when
    n + 1 `steps` have ended, and the modules of their layers are in `rounded`.
    """

    def __init__(
        self,
        source: Source,
        activations: Mapping[str, TensorScale | None],
        scaling: WeightScaling,
        batches: Batches,
        folder: Path,
        world: World | None = None,
    ):
        """Prepare to round the modules of `activations`, with weight scales by `scaling`.

        `activations`: module -> the scale of its input; None for an input that stays as it is.

        `batches`: index -> token ids int64 [windows, seq_len]. `folder`, which exists, holds the hidden states and the
        rounded modules. A killed call goes on from what it left there, so its arguments must have been the same.
        Modules that are not in `activations` keep their weights here. `world`: the device, and ranks that round
        together, which all make this with the same arguments but for their folders; None: one process on a CPU.

        Raises InputError where the disk has no room, and for a model that is no chain of layers.
        """
        world = world or World()
        super().__init__(source, world.device, torch.float32)
        self.activations = activations
        self.scaling = scaling
        self.ranks = SharedRounding(world, len(batches))
        self.batch_count = len(batches)
        numbers = {*self.ranks.numbers}
        #: This rank's batches, and their places among all.
        self.batches = {batch: ids for number, (batch, ids) in enumerate(batches.items()) if number in numbers}
        self.routed = {name for gemms in routed_gemms(self.model).values() for name in gemms}
        self.experts = tuple(f"{layer}." for layer in routed_gemms(self.model))
        self.float, self.quantized = states_in_turn(
            ("float", "quantized"), self.batches, self.layer_output, folder, "--weight-rounding sequential"
        )
        self.rounded = Rounded(folder)
        self.steps = LayerSteps.of(folder / "steps.json")
        self.steps.steps = self.ranks.agreed(self.steps.steps)

    def input_values(self, x: torch.Tensor, module: str) -> torch.Tensor:
        """Quantize and dequantize the input `x` of `module`, float32 of the same shape."""
        scale = self.activations[module]
        if scale is None:
            return x.float()
        return gemm_input(x, scale)

    def run(self, report: Reporter) -> Rounded:
        """Round the layers that are not yet rounded, one after the other."""
        remaining = self.steps.layers_left(self.layers.count, report)
        if not remaining:
            return self.rounded
        calls = self._enter_layers(self.steps.steps > 0)
        tokens = sum(ids.size for ids in self.batches.values())
        with report.track(
            f"Rounding {len(remaining)} layers, one by one", len(remaining) * tokens, "tokens"
        ) as advance:
            for index in remaining:
                with self.weights.filled(self.inside(index)), torch.inference_mode():
                    self._round_layer(index, calls)
                self._end(index + 2)
                self.ranks.end_layer(self.rounded)
                advance(tokens)
        return self.rounded

    def _end(self, step: int) -> None:
        """End a step: the hidden states that enter the next layer are on the disk before the step counts as ended."""
        for states in (self.float, self.quantized):
            states[(step - 1) % 2].flush()
        self.steps.end(step)

    def _enter_layers(self, done: bool) -> dict[tuple[int, ...], list[LayerCall]]:
        """Step 1: write the hidden states that enter the first layer, the same in both models, unless that is `done`.

        Returns the arguments of all layers for each shape of batch.
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

    def _round_layer(self, index: int, calls: Mapping[tuple[int, ...], list[LayerCall]]) -> None:
        """Round the groups of a layer whose float weights are loaded, and take both models past it."""
        layer = self.layers.modules(self.model)[index]
        entering, leaving = ((self.float[n % 2], self.quantized[n % 2]) for n in (index, index + 1))

        def run_layer(states: HiddenStates, batch: int) -> torch.Tensor:
            call = calls[self.batches[batch].shape][index]
            return call.run(layer, states.read(batch, self.device), new_cache(self.model))

        weights: dict[str, torch.Tensor] = {}
        batch = next(iter(self.batches))
        inside = {name: module for name, module in self.gemms.items() if self.layers.index(name) == index}
        bases = self.ranks.bases(
            residual_bases(
                self.model, layer, inside, entering[0].read(batch, self.device), partial(run_layer, entering[0], batch)
            )
        )
        for inputs in passes(self._group_inputs(inside, bases), self.routed):
            for sums in self._input_sums(inputs, entering, run_layer, weights):
                names = self.ranks.own(sums.weights)
                self._round_group(sums, names)
                self.ranks.exchange(self.rounded, names)
                for name in sums.group.members:
                    if rounded := self.rounded.get(name):
                        weights[name] = self._dequantized(name, *rounded)
        for batch in self.batches:
            leaving[0].write(batch, run_layer(entering[0], batch))
            with self._quantized(weights):
                leaving[1].write(batch, run_layer(entering[1], batch))

    def _round_group(self, sums: InputSums, names: Collection[str]) -> None:
        """Round those of a group's weights that `names` has, and store their codes; the sums are used up."""
        if not names:
            return
        factored, shrunk, targets = _compensations_and_targets(sums, sums.group.first in self.routed)
        for name in names:
            weight = sums.weights[name]
            method = self.scaling.method
            scale = self.scaling.scale(name, weight)
            rounded = quantize_scaled(weight, scale, method, factored, wanted=targets.get(name))
            if name.startswith(self.experts):
                rounded = judged(weight, rounded, method, sums.held_out.tokens(input_name(name)), shrunk)
            if isinstance(rounded, QuantizedWeight):
                self.rounded.add(name, rounded)

    def _dequantized(self, name: str, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Code × scale of the weight of a module, float32, shaped as the module stores it."""
        values = dequantized(codes.to(self.device), scale.to(self.device))
        return values.movedim(0, output_channel_axis(self.gemms[name])).contiguous()

    def _group_inputs(self, inside: Collection[str], bases: Mapping[str, str]) -> Iterator[GroupInput]:
        """Yield the inputs of the groups `inside` a layer that are rounded, in the order they are called in.

        `bases`: GEMM -> the module whose input is the residual that the GEMM is added to.
        """
        for first, members in self.groups.items():
            if chosen := [name for name in members if name in self.activations and name in inside]:
                base = bases.get(first) if members == [first] else None
                paired = first not in self.routed and full_input_module(self.model, first) is self.gemms[first]
                shapes = [_weight_by_rows(self.gemms[name]).shape for name in chosen]
                yield GroupInput(first, tuple(chosen), base, paired, (shapes[0][1], sum(shape[0] for shape in shapes)))

    def _input_sums(
        self,
        inputs: list[GroupInput],
        entering: tuple[HiddenStates, HiddenStates],
        run_layer: Callable[[HiddenStates, int], torch.Tensor],
        weights: Mapping[str, torch.Tensor],
    ) -> Iterator[InputSums]:
        """Add up the `inputs` in both models, by one pass of all batches through the layer.

        `weights`: the weights of the layer that are rounded so far. Sums are let go of as they are yielded.
        """
        count = self.batch_count
        pending = [
            InputSums(group, lambda name: weight_rows(self.gemms[name]), self.device, count, self.ranks.waits)
            for group in inputs
        ]

        def add(number: int, batch: int, size: int) -> None:
            float_inputs = self._record_inputs(inputs, entering[0], batch, run_layer)
            with self._quantized(weights), self._recorded_choices() as chosen:
                quantized_inputs = self._record_inputs(inputs, entering[1], batch, run_layer)
            for sums in pending:
                group = sums.group
                quantized_input = quantized_inputs.get(group.first)
                tokens = None if quantized_input is None else self.input_values(quantized_input[0], group.members[0])
                if group.first.startswith(self.experts) and is_held_out(number, count):
                    shared = chosen[group.first.rsplit(".", 2)[0]] if group.first not in self.routed else None
                    sums.hold_out(tokens, shared, number)
                    continue
                sums.add(number % 2, float_inputs.get(group.first), quantized_input, tokens, size)

        for number, (batch, ids) in zip(self.ranks.numbers, self.batches.items(), strict=True):
            add(number, batch, ids.size)  # a function, so that the inputs are freed before H is factored
        while pending:
            self.ranks.complete(pending[0])
            yield pending.pop(0)

    def _record_inputs(
        self,
        inputs: list[GroupInput],
        states: HiddenStates,
        batch: int,
        run_layer: Callable[[HiddenStates, int], torch.Tensor],
    ) -> dict[str, InputAndResidual]:
        """Run the layer on a batch and record each of `inputs`, float32 [tokens, width], by the name of its group.

        Beside it the residual that its GEMM is added to; the layer's hidden states where none is known. Inputs that
        no token reaches are left out.
        """
        recorded = {"": states.read(batch, self.device).flatten(0, -2)}
        firsts = {group.first for group in inputs}

        def recorder(name: str) -> Callable[[nn.Module, Arguments], None]:
            def hook(module: nn.Module, arguments: Arguments) -> None:
                recorded[name] = arguments[0].flatten(0, -2).float()
                if firsts <= recorded.keys():
                    raise InputReached

            return hook

        with ExitStack() as stack, suppress(InputReached):
            for name in firsts | {group.base for group in inputs if group.base}:
                module = full_input_module(self.model, name)
                stack.callback(module.register_forward_pre_hook(recorder(name)).remove)
            run_layer(states, batch)
        return {
            group.first: (recorded[group.first], recorded[group.base or ""])
            for group in inputs
            if group.first in recorded
        }

    @contextmanager
    def _recorded_choices(self) -> Iterator[dict[str, torch.Tensor]]:
        """Record the experts that each token goes to in this block: name of a layer's experts -> int64 [tokens,
        chosen].
        """
        choices: dict[str, torch.Tensor] = {}

        def recorder(name: str, experts: Experts) -> Callable[[nn.Module, Arguments, dict[str, torch.Tensor]], None]:
            def hook(module: nn.Module, arguments: Arguments, named: dict[str, torch.Tensor]) -> None:
                choices[name] = experts.choices(*arguments, **named)

            return hook

        with ExitStack() as stack:
            for name, module in experts_of(self.model).items():
                stack.callback(module.register_forward_pre_hook(recorder(name, module), with_kwargs=True).remove)
            yield choices

    @contextmanager
    def _quantized(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Let the modules of `weights` (module -> its dequantized weight) compute quantized in this block."""

        def quantize_input(name: str) -> Callable[[nn.Module, Arguments], Arguments]:
            return lambda module, arguments: (self.input_values(arguments[0], name), *arguments[1:])

        modules = {name: self.gemms[name] for name in weights}
        before = {name: module._parameters["weight"] for name, module in modules.items()}
        with ExitStack() as stack:
            for name, module in modules.items():
                stack.callback(module.register_forward_pre_hook(quantize_input(name)).remove)
                module._parameters["weight"] = nn.Parameter(weights[name], requires_grad=False)
            try:
                yield
            finally:
                for name, module in modules.items():
                    module._parameters["weight"] = before[name]


def _compensations_and_targets(
    sums: InputSums, routed: bool
) -> tuple[Compensation, Compensation | None, dict[str, torch.Tensor]]:
    """The Cholesky factor of the quantized model's input; that of its shrunk moments where it is `routed` to one
    expert; and the ridge target of each weight that has one.

    The sums are used up.
    """
    targets: dict[str, torch.Tensor] = {}
    if sums.paired:
        targets = dict(zip(sums.weights, ridge_targets([*sums.weights.values()], *sums.halves), strict=True))
    moments = finite_moments(sums.group.first, sums.halves[0].moments.add_(sums.halves[1].moments))
    del sums.halves  # before H is factored: of a wide input they are gigabytes
    factored = compensation(moments)
    return factored, compensation(shrink(moments, EXPERT_SHRINKAGE)) if routed else None, targets


def weight_rows(module: nn.Module) -> torch.Tensor:
    """The weight of a GEMM, BF16 [out, in], where the module has it."""
    return _weight_by_rows(module).to(torch.bfloat16).contiguous()


def _weight_by_rows(module: nn.Module) -> torch.Tensor:
    """A view of the weight of a GEMM, [out, in]."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor), "a GEMM has a weight"
    return weight.movedim(output_channel_axis(module), 0)
