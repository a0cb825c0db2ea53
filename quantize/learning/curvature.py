"""Precondition the gradient of learned weights by the curvature of the model's distribution: K-FAC.

Next to its minimum the KL divergence from the float model has the Fisher information as its Hessian. Of a layer y = x̂
Wᵀ it is approximately A ⊗ B, with A = E[x̂ x̂ᵀ] of its input and B = E[g gᵀ] of the gradient of -log p at its output,
where labels are drawn from the model's own distribution (Martens and Grosse 2015, arXiv 1503.05671, sections 2 and 3).
A step is then

    W ← W - rate · (B + λ_B)⁻¹ G (A + λ_A)⁻¹,

so that `rate` is a share of Newton's step, whatever the layer, the model and the magnitude of its weights. Adam's step
has one size for every weight, and all weights that move together along the few directions of large curvature add up:
from the codes of `sequential` rounding it only gets worse. λ is the mean of the diagonal (times `DAMPING`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ...calibrate.ranks.world import World
from .linear import LearnedLinear, learned_layers

#: Damping, in means of a factor's diagonal.
DAMPING = 1.0
#: The share of the last direction that a step keeps.
MOMENTUM = 0.9


def inverse_factors(
    student: PreTrainedModel, windows: torch.Tensor, batch_size: int, seed: int, world: World | None = None
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Invert the damped factors of each learned layer: name -> ((A + λ)⁻¹ [in, in], (B + λ)⁻¹ [out, out]), float32.

    `windows`: token ids int64 [windows, seq_len], of which `batch_size` run at once; the ranks of `world` share the
    batches, and all of them return the same. `seed`: of the labels that are drawn, which do not depend on the batches.
    """
    world, layers = world or World(), learned_layers(student)
    inputs = {
        name: torch.zeros(layer.weight.shape[1:] * 2, device=layer.weight.device) for name, layer in layers.items()
    }
    outputs = {
        name: torch.zeros(layer.weight.shape[:1] * 2, device=layer.weight.device) for name, layer in layers.items()
    }
    tokens = torch.zeros((), dtype=torch.int64, device=windows.device)
    with _recorded(layers, inputs, outputs):
        for first in world.share(range(0, len(windows), batch_size)):
            ids = windows[first : first + batch_size]
            said = student(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
            if not bool(torch.isfinite(said).all()):
                continue  # the training ends at it, and names its step
            drawn = _labels(said.detach().exp().cpu(), first, seed).to(said.device)
            (-said.gather(-1, drawn).sum()).backward()
            tokens += ids.numel()
    student.zero_grad()
    for factor in (*inputs.values(), *outputs.values(), tokens):
        world.add_up(factor)
    count = max(int(tokens), 1)
    return {name: (_inverse(inputs[name] / count), _inverse(outputs[name] / count)) for name in layers}


def _labels(probabilities: torch.Tensor, first: int, seed: int) -> torch.Tensor:
    """Draw a label for each position from `probabilities` [windows, seq_len, vocabulary]: int64 [windows, seq_len, 1].

    Each window has a generator of its own, of `seed` and its index, `first` being that of the first window.
    """
    drawn = []
    for index, window in enumerate(probabilities, first):
        generator = torch.Generator().manual_seed(int(np.random.SeedSequence((seed, index)).generate_state(1)[0]))
        drawn.append(torch.multinomial(window, 1, generator=generator))
    return torch.stack(drawn)


@contextmanager
def _recorded(
    layers: Mapping[str, LearnedLinear], inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """Add up x xᵀ and g gᵀ of each layer's tokens in this block."""

    def recorder(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        def hook(layer: nn.Module, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            x = arguments[0].detach().flatten(0, -2).float()

            def backward(gradient: torch.Tensor) -> None:
                g = gradient.detach().flatten(0, -2).float()
                inputs[name].addmm_(x.T, x)
                outputs[name].addmm_(g.T, g)

            output.register_hook(backward)

        return hook

    hooks = [layer.register_forward_hook(recorder(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _inverse(factor: torch.Tensor) -> torch.Tensor:
    """Invert a factor after damping it; in FP64, since one direction can hold most of the energy."""
    mean = float(factor.diagonal().mean())
    damped = factor.double() + (DAMPING * mean or 1.0) * torch.eye(
        len(factor), dtype=torch.float64, device=factor.device
    )
    return torch.cholesky_inverse(torch.linalg.cholesky(damped)).float()


class CurvatureSteps(torch.optim.Optimizer):
    """Move learned weights against their gradient, preconditioned by the inverse factors of their layer."""

    def __init__(
        self, student: nn.Module, factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]], learning_rate: float
    ):
        """Take the learned layers of `student`, with their `factors` by name; `learning_rate`: a share of Newton's
        step.
        """
        self._layers = [(layer, *factors[name]) for name, layer in learned_layers(student).items()]
        super().__init__([layer.weight for layer, *_ in self._layers], {"lr": learning_rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step. `closure` is not used."""
        rate = self.param_groups[0]["lr"]
        for layer, inputs, outputs in self._layers:
            if layer.weight.grad is None:
                continue
            state = self.state[layer.weight]
            if "direction" not in state:
                state["direction"] = torch.zeros_like(layer.weight)
            direction = outputs @ layer.weight.grad @ inputs
            state["direction"].mul_(MOMENTUM).add_(direction, alpha=1 - MOMENTUM)
            layer.weight.sub_(state["direction"], alpha=rate)
