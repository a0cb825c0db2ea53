"""List the tensors that can be quantized alone, and compute the error that each makes.

A site is a weight, an activation (one tensor, whatever the number of GEMMs that read it) or a tensor of the cache.
Each is quantized as the run's checkpoint has it: the codes and scales are read from there, not chosen again.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from ...calibrate.model.gemms import attention_modules, observed_gemms, output_channel_axis
from ...calibrate.text.evaluation import prompt_of
from ...options import ONE, TWO, Form
from ..reference.fp8_model import experts_around, fp8_cache, round_to_codes
from ..reference.linear import CallPositions, FP8Linear, Tail
from ..scales.clip import power_of_two_ceil
from ..scales.decisions import Scales, TensorScale
from ..scales.scheme import tails_of
from ..weights.sequential import gemm_input
from .document import Site


def sites_of(scales: Scales, groups: Mapping[str, Sequence[str]]) -> list[Site]:
    """List all tensors that `scales` quantize; `groups`: modules that receive the same tensor, by the first of them."""
    weights = [Site(module, "weight", (module,)) for module in scales.weights]
    read = [tuple(member for member in members if member in scales.activations) for members in groups.values()]
    activations = [Site(members[0], "activation", members) for members in read if members]
    return [*weights, *activations, *(Site(name, "kv_cache", (name,)) for name in scales.kv_cache)]


def input_with_tail(x: torch.Tensor, activation: TensorScale, tail: Tail) -> torch.Tensor:
    """Quantize and dequantize `x` under the scale `activation`: two terms for the rows of `tail`, and one for the rest.

    Rows of an expert that is not running are not known by their positions, and have two.
    """
    exact = gemm_input(x, activation)
    if tail.experts is not None and tail.experts.routing is None:
        return exact
    rows = tail.rows(x.flatten(0, -2))
    if rows is None:
        return exact
    first = gemm_input(x, activation.with_form(ONE)).flatten(0, -2)
    first[rows] = exact.flatten(0, -2)[rows]
    return first.view_as(x)


class Coded(Protocol):
    """A checkpoint that fp8q wrote: its GEMMs, and the scales of its cache."""

    @property
    def cache_scales(self) -> Mapping[str, torch.Tensor]:
        """The scales of the cache (`<module>.k`, `<module>.v`), as far as these are codes."""

    def layer(self, module: str) -> FP8Linear:
        """The GEMM of `module`, on codes."""


class LoadedGemms:
    """The GEMMs of a checkpoint of which only some are in memory at a time."""

    def __init__(self, stored: Coded):
        """Load nothing of `stored` yet."""
        self.stored = stored
        self.cache_scales = stored.cache_scales
        self._layers: dict[str, FP8Linear] = {}

    def layer(self, module: str) -> FP8Linear:
        """The GEMM of `module`, which must be in memory."""
        return self._layers[module]

    @contextmanager
    def holding(self, modules: Sequence[str]) -> Iterator[None]:
        """Hold `modules`, and no others, in memory in the block."""
        self._layers = {module: self.stored.layer(module) for module in modules}
        try:
            yield
        finally:
            self._layers = {}


class Quantizer:
    """The float model, and the effect of quantizing each site of its run."""

    def __init__(self, model: PreTrainedModel, coded: Coded, scales: Scales):
        """`model` in FP32; `coded` in mode `exact`, of the same run as `scales`."""
        self.model = model
        self.scales = scales
        self.gemms = {name: module for name, module in observed_gemms(model).items() if name in scales.weights}
        self.attention = attention_modules(model)
        self.coded = coded
        self.cache_scales = coded.cache_scales
        self.positions = 0
        self._experts = {name: experts_around(model, name) for name in tails_of(scales.forms)}

    def prompt(self, positions: int) -> int:
        """The tokens of a window of so many `positions` before the first that is scored: half of it where the run has
        a tail, which servers read as a prompt, and 1 else.
        """
        self.positions = positions
        if tails_of(self.scales.forms):
            return prompt_of(positions)
        return 1

    def input_error(self, module: str, x: torch.Tensor, form: Form | None = None) -> torch.Tensor:
        """Compute the error of rounding the input `x` of `module`; in `form`, by default the run's.

        Two codes take the power of two at or above the run's scale.
        """
        if form is None:
            return self.input(module, x) - x
        activation = self.scales.activations[module].with_form(form)
        if form == TWO:
            activation = activation.model_copy(update={"scale": float(power_of_two_ceil(activation.scale))})
        return gemm_input(x, activation) - x

    def input(self, module: str, x: torch.Tensor) -> torch.Tensor:
        """Round the input `x` of `module` as the run has it."""
        activation = self.scales.activations[module]
        tail = activation.form.tail
        if tail is None:
            return gemm_input(x, activation)
        call = CallPositions(self.positions, self.positions - self.prompt(self.positions))
        return input_with_tail(x, activation, Tail(tail, call, self._experts.get(module)))

    def output_error(self, module: str, x: torch.Tensor) -> torch.Tensor:
        """Compute the change of the output of `module` for the input `x` when its weight is rounded."""
        return nn.functional.linear(x, self.weight_error(module))

    def weight_error(self, module: str) -> torch.Tensor:
        """Compute the rounding error of the weight of `module`, float32 [out, in]."""
        layer = self.coded.layer(module)
        gemm = self.gemms[module]
        weight = gemm.weight
        assert isinstance(weight, torch.Tensor), "a GEMM has a weight"
        return layer.codes.float() * layer.weight_scale[:, None] - weight.movedim(output_channel_axis(gemm), 0)

    def cache_error(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Compute the rounding error of the cache tensor `name`."""
        return round_to_codes(x, self.cache_scales[name]) - x

    @contextmanager
    def alone(self, site: Site) -> Iterator[DynamicCache]:
        """The model with `site` quantized and nothing else, and the cache to run it with."""
        with ExitStack() as stack:
            if site.kind == "weight":
                hook = self.gemms[site.module].register_forward_hook(
                    lambda module, inputs, y: y + self.output_error(site.module, inputs[0])
                )
                stack.callback(hook.remove)
            if site.kind == "activation":
                for member in site.members:
                    hook = self.gemms[member].register_forward_pre_hook(
                        lambda module, inputs, member=member: (self.input(member, inputs[0]),)
                    )
                    stack.callback(hook.remove)
            scales = {site.module: self.cache_scales[site.module]} if site.kind == "kv_cache" else {}
            yield fp8_cache(scales, self.model)
