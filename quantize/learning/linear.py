"""A linear layer whose FP8 weight is learned: codes in the forward pass, straight-through gradients in the backward.

    y = x̂ · ŵᵀ + bias        ŵ = code(w / s_w) · s_w

The weight w before it is rounded is the parameter; it begins at the values of its codes, and half a spacing of the grid
changes a code. An optimizer moves it. The scales stay as they are, unless they are learned too: then

    ŵ = code(w / s_w) · s'_w        s'_w = bf16(g · s_w)

with a gain g for each output channel, 1 at first, which moves a whole channel where its codes may stay. The derivative
by s'_w is the code itself. LSQ's (arXiv 1902.08153, section 2.1), code - w / s, is of a scale that leaves w where it
is: from weights that lie on the grid it is zero.

Rounding has no useful derivative, so its gradient is that of the identity, and zero where a value lies beyond the
largest code: the straight-through estimator (Bengio et al., 2013, arXiv 1308.3432, section 4), with the clipped range
of PACT's quantizers (Choi et al., 2018, arXiv 1805.06085). It is held against NVIDIA ModelOpt's in the tests.

Adam moves the learned weights of a layer in steps of a share of their own magnitude:

    W ← W - rate · rms(W) · m̂ / (√v̂ + ε)

m̂ and v̂ are Adam's means of the gradient and of its square (Kingma and Ba 2014, arXiv 1412.6980, algorithm 1). The
root mean square of a layer's first weights makes one `rate` serve layers and models of any magnitude. A step is the
same for all weights of a layer: in spacings of the grid, which grow with a weight, it would leave small weights where
they are. A gain, which is 1 at first, moves a whole channel, and its scale by a spacing of BF16 at a time, 0.4 to 0.8
%: it has a part of the rate.

`distilled.safetensors`: `<module>.codes` F8_E4M3 [out, in] and `<module>.scale` F32 [out] of each learned module.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ...core.files import replacing
from ...options import LearningGradients
from ..codes.encoding import CODE, code_values, encode
from ..codes.formats import E4M3
from ..reference.fp8_model import StoredCodes
from ..reference.linear import replace_linears
from ..scales.decisions import TensorScale
from ..training.emulation import gradient_rounding, round_gradient
from ..weights.sequential import gemm_input
from .shards import gathered, local_part, part_of

Layer = TypeVar("Layer", bound=nn.Module)


class StraightThrough(torch.autograd.Function):
    """Round to the grid in the forward pass; pass the gradient on where a value is within the range of codes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, activation: TensorScale | None) -> torch.Tensor:
        """Return the values of the codes of `x` under `scale`, or under that of an `activation`, float32."""
        # under the scale of its own token nothing saturates
        dynamic = activation is not None and activation.form.at_run_time
        ctx.save_for_backward(torch.ones_like(x, dtype=torch.bool) if dynamic else x.abs() <= scale * E4M3.max)
        if activation is None:
            return code_values(x, scale) * scale
        return gemm_input(x, activation)

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


class LearnedLinear(nn.Module):
    """A linear layer on E4M3 codes whose weight is learned; all arithmetic is FP32, but for gradients that are rounded.

    Invariant: `start` has the codes of the weight that the layer began with, and `scale` the scales.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        weight_scale: torch.Tensor,
        activation: TensorScale | None,
        bias: torch.Tensor | None,
        learn_scale: bool = False,
    ):
        """Begin with `codes` float8_e4m3fn [out, in] under `weight_scale` float32 [out]; `activation`: the scale of the
        input, None for one that is not quantized; `bias` [out] or None. `learn_scale`: the weight's scales are learned
        too, on the grid of BF16 numbers, or of FP32 numbers where they are no BF16 numbers.
        """
        super().__init__()
        scale = weight_scale.float()[:, None]
        self.activation = activation
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("start", codes, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.float(), persistent=False)
        input_scale = torch.tensor(1.0 if activation is None else activation.scale)
        self.register_buffer("input_scale", input_scale, persistent=False)
        self.weight = nn.Parameter(codes.float() * scale)
        self.gain = nn.Parameter(torch.ones_like(scale)) if learn_scale else None
        self.scale_on_bf16 = torch.equal(scale, scale.bfloat16().float())
        #: Rounds the gradient of the output (`round_gradients`); None: it stays in FP32.
        self.of_gradient: nn.Module | None = None
        #: Rounds input and weight once more for the backward pass, and keeps neither for it (`sharded_model`).
        self.rounds_again = False

    scale: torch.Tensor
    start: torch.Tensor
    bias: torch.Tensor | None
    input_scale: torch.Tensor

    @torch.no_grad()
    def learned(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes that were learned, float8_e4m3fn [out, in], and their scales, float32 [out]; all ranks call this
        where they share the weight.
        """
        return encode(gathered(self.weight.detach()), self.scale), self._learned_scale()[:, 0].contiguous()

    def _learned_scale(self) -> torch.Tensor:
        """The learned scale, float32 [out, 1]."""
        if self.gain is None:
            return self.scale
        learned = self.scale * gathered(self.gain.detach())
        if self.scale_on_bf16:
            return learned.bfloat16().float()
        return learned

    def first_weight(self) -> torch.Tensor:
        """The values of the codes that the layer began with, float32 [out, in]."""
        return self.start.float().mul_(self.scale)

    @torch.no_grad()
    def restore(self) -> None:
        """Take the weight, and the gain, back to what the layer began with."""
        local_part(self.weight).copy_(part_of(self.first_weight(), self.weight))
        if self.gain is not None:
            local_part(self.gain).fill_(1)

    @torch.no_grad()
    def settle(self, codes: torch.Tensor, scale: torch.Tensor) -> int:
        """Begin anew with `codes` float8_e4m3fn [out, in] under `scale` float32 [out]; return how many of the codes are
        others than before.
        """
        codes = codes.to(self.start.device)
        scale = scale.to(self.start.device)
        changed = int((codes.float() != self.start.float()).sum())
        # those before may be mapped from a file
        self.start = codes
        self.scale = scale[:, None].clone()
        self.restore()
        return changed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., in] to [..., out], in x's type."""
        y: torch.Tensor
        if self.rounds_again and torch.is_grad_enabled():
            y = checkpoint(self._gemm, x, use_reentrant=False, preserve_rng_state=False)
        else:
            y = self._gemm(x)
        return (y if self.of_gradient is None else round_gradient(y, self.of_gradient)).to(x.dtype)

    def _gemm(self, x: torch.Tensor) -> torch.Tensor:
        rounded: torch.Tensor = x.float()
        if self.activation is not None:
            rounded = on_grid(rounded, self.input_scale, self.activation)
        weight = on_grid(self.weight, self.scale)
        if self.gain is not None:
            rounding = self._learned_scale() / self.scale - self.gain.detach()
            weight = weight * (self.gain + rounding)  # straight through the rounding of the scale
        return nn.functional.linear(rounded, weight, self.bias)


def student_of(
    teacher: PreTrainedModel,
    stored: StoredCodes,
    activations: Mapping[str, TensorScale],
    kind: Callable[[torch.Tensor, torch.Tensor, TensorScale | None, torch.Tensor | None], Layer],
) -> tuple[PreTrainedModel, dict[str, Layer]]:
    """Return the float model `teacher`, changed in place to the FP8 model of `stored`, and its layers on codes by name.

    `activations`: GEMM -> the scale of its input. `kind`: makes a layer, of the arguments of `LearnedLinear`.
    Everything else is frozen.
    """
    layers: dict[str, Layer] = {}
    teacher.requires_grad_(False)
    for module in stored.modules:
        codes, scale = stored.weight(module)
        bias = stored.read(f"{module}.bias") if stored.has(f"{module}.bias") else None
        layers[module] = kind(codes.to(CODE), scale, activations.get(module), bias)
        replace_linears(teacher, {module: layers[module]})  # its float weight is let go of before the next is made
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


#: Far below the gradients of a divergence near zero, so that a step does not depend on their magnitude.
EPSILON = 1e-15
#: A gain's part of the rate. By hand, the demo in two codes comes from 371 × 10⁻⁶ to 356 with all of it, to 331 with a
#: fourth, and to 328 with less or none, from 184,320 tokens.
GAIN_RATE = 0.25
#: The share of steps in which the learning rate rises.
WARM_UP = 0.05
#: A training that made the model worse begins anew, at most so often in all, each time in steps so many times smaller.
ATTEMPTS = 3
SMALLER = 3.0


def weight_steps(student: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Make the optimizer of the learned layers of `student`, in the weights that they begin with; `learning_rate`: the
    step as a share of the root mean square of a layer's weights.
    """
    groups: list[dict[str, Any]] = []
    for layer in learned_layers(student).values():
        weight = layer.first_weight()
        groups.append({"params": [layer.weight], "lr": learning_rate * float(weight.square().mean().sqrt())})
        if layer.gain is not None:
            groups.append({"params": [layer.gain], "lr": GAIN_RATE * learning_rate})
    return torch.optim.Adam(groups, eps=EPSILON)


def gathered_codes(layers: Mapping[str, LearnedLinear]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Collect the codes that `layers` learned, and their scales; all ranks call this where they share weights."""
    learned = {name: layer.learned() for name, layer in layers.items()}
    return {name: (codes.cpu(), scale.cpu()) for name, (codes, scale) in learned.items()}


def save_codes(file: Path, codes: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write learned codes and their scales to `file`."""
    tensors = {
        f"{name}.{part}": tensor
        for name, both in codes.items()
        for part, tensor in zip(("codes", "scale"), both, strict=True)
    }
    with replacing(file) as partial:
        save_file(tensors, partial, metadata={"format": "pt"})
