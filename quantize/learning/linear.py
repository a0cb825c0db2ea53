"""A linear layer whose FP8 weight is learned: codes in the forward pass, straight-through gradients in the backward.

    w = base + steps · spacing        y = x̂ · ŵᵀ + bias        ŵ = code(w / s_w) · s_w

The scales stay as they are. `steps` is the only parameter: how far a weight has moved, in spacings of the grid at its
code, so that zero stands for the codes that the layer began with. Half a spacing changes the code. `curvature` takes
the steps, in units of the weights themselves.

Rounding has no useful derivative, so its gradient is that of the identity, and zero where a value lies beyond the
largest code: the straight-through estimator (Bengio et al., 2013, arXiv 1308.3432, section 4), with the clipped range
of PACT's quantizers (Choi et al., 2018, arXiv 1805.06085). It is held against NVIDIA ModelOpt's in the tests.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ...calibrate.model.products import output_channel_axis
from ...options import LearningGradients
from ..codes.encoding import CODE, code_values, encode
from ..codes.formats import E4M3
from ..reference.fp8_model import StoredCodes
from ..reference.linear import replace_linears
from ..scales.decisions import TensorScale
from ..training.emulation import gradient_rounding, round_gradient
from ..weights.sequential import product_input

Layer = TypeVar("Layer", bound=nn.Module)
#: The least binade of E4M3's normal numbers, below which the grid's spacing is constant.
SMALLEST_NORMAL = 2.0 ** (1 - E4M3.bias)


class StraightThrough(torch.autograd.Function):
    """Round to the grid in the forward pass; pass the gradient on where a value is within the range of codes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, activation: TensorScale | None) -> torch.Tensor:
        """Return the values of the codes of `x` under `scale`, or under that of an `activation`, float32."""
        ctx.save_for_backward(x.abs() <= scale * E4M3.max)
        return code_values(x, scale) * scale if activation is None else product_input(x, activation)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of `x`: that of the result, zero where `x` saturates."""
        (inside,) = ctx.saved_tensors
        return gradients[0] * inside, None, None


def on_grid(x: torch.Tensor, scale: torch.Tensor, activation: TensorScale | None = None) -> torch.Tensor:
    """The values of the codes of `x` under `scale`, or under that of an `activation`, with straight-through gradients.

    float32 of the shape of `x`; `scale` float32 broadcastable to it.
    """
    rounded: torch.Tensor = StraightThrough.apply(x, scale, activation)  # type: ignore[no-untyped-call]
    return rounded


def spacing(values: torch.Tensor) -> torch.Tensor:
    """The distance of each of `values`, which are E4M3 numbers, to the next larger magnitude, float32."""
    binade = torch.exp2(torch.floor(torch.log2(values.abs().clamp_min(SMALLEST_NORMAL))))
    return binade * 2.0**-E4M3.mantissa_bits


class LearnedLinear(nn.Module):
    """A linear layer on E4M3 codes whose weight is learned; all arithmetic is FP32, but for gradients that are rounded.

    Invariant: with `steps` of zero the codes are those that the layer began with.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        weight_scale: torch.Tensor,
        activation: TensorScale | None,
        bias: torch.Tensor | None,
    ):
        """Begin with `codes` float8_e4m3fn [out, in] under `weight_scale` float32 [out]; `activation`: the scale of the
        input, None for one that is not quantized; `bias` [out] or None.
        """
        super().__init__()
        scale, values = weight_scale.float()[:, None], codes.float()
        self.activation = activation
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("base", values * scale, persistent=False)
        self.register_buffer("spacing", spacing(values) * scale, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.float(), persistent=False)
        input_scale = torch.tensor(1.0 if activation is None else activation.scale)
        self.register_buffer("input_scale", input_scale, persistent=False)
        self.steps = nn.Parameter(torch.zeros_like(values))
        #: Rounds the gradient of the output (`round_gradients`); None: it stays in FP32.
        self.of_gradient: nn.Module | None = None

    scale: torch.Tensor
    base: torch.Tensor
    spacing: torch.Tensor
    bias: torch.Tensor | None
    input_scale: torch.Tensor

    def master_weight(self) -> torch.Tensor:
        """The weight before it is rounded, float32 [out, in]."""
        return self.base + self.steps * self.spacing

    @property
    def weight(self) -> torch.Tensor:
        """The weight before it is rounded, under the name that other linear layers have for theirs."""
        return self.master_weight()

    def codes(self) -> torch.Tensor:
        """The codes that were learned, float8_e4m3fn [out, in]."""
        return encode(self.master_weight().detach(), self.scale)

    @torch.no_grad()
    def settle(self, codes: torch.Tensor) -> int:
        """Begin anew with `codes` float8_e4m3fn [out, in]; return how many of them are others than before."""
        values = codes.float()
        self.spacing.copy_(spacing(values)).mul_(self.scale)
        values.mul_(self.scale)
        changed = int((values != self.base).sum())
        self.base.copy_(values)
        self.steps.zero_()
        return changed

    def changed(self) -> float:
        """The share of codes that are others than at the beginning."""
        return float((self.codes().float() * self.scale != self.base).float().mean())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., in] to [..., out], in x's type."""
        rounded: torch.Tensor = x.float()
        if self.activation is not None:
            rounded = on_grid(rounded, self.input_scale, self.activation)
        weight = on_grid(self.master_weight(), self.scale)
        y = nn.functional.linear(rounded, weight, self.bias)
        return (y if self.of_gradient is None else round_gradient(y, self.of_gradient)).to(x.dtype)


def student_of(
    teacher: PreTrainedModel,
    stored: StoredCodes,
    activations: Mapping[str, TensorScale],
    kind: Callable[[torch.Tensor, torch.Tensor, TensorScale | None, torch.Tensor | None], Layer],
) -> tuple[PreTrainedModel, dict[str, Layer]]:
    """Return the float model `teacher`, changed in place to the FP8 model of `stored`, and its layers on codes by name.

    `activations`: product -> the scale of its input. `kind`: makes a layer, of the arguments of `LearnedLinear`.
    Everything else is frozen.
    """
    layers: dict[str, Layer] = {}
    for module in stored.modules:
        axis = output_channel_axis(stored.model.get_submodule(module))
        codes = stored.read(f"{module}.weight").movedim(axis, 0).contiguous()
        scale = stored.read(f"{module}.weight_scale").movedim(axis, 0)[:, 0]
        bias = stored.read(f"{module}.bias") if stored.has(f"{module}.bias") else None
        layers[module] = kind(codes.to(CODE), scale, activations.get(module), bias)
    teacher.requires_grad_(False)
    replace_linears(teacher, layers)
    return teacher, layers


def learned_layers(model: nn.Module) -> dict[str, LearnedLinear]:
    """The learned layers of `model` by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LearnedLinear)}


def round_gradients(model: nn.Module, gradients: LearningGradients) -> None:
    """Let the output gradients of the learned layers of `model` be in the format `gradients` from now on, each under a
    scale by its own history.
    """
    for layer in learned_layers(model).values():
        layer.of_gradient = gradient_rounding(gradients)
