"""Train one decoder layer of the FP8 model toward the output of the float layer on the same tokens.

Of each token t the loss is the squared error of the layer's output over the square of the float one,

    loss = mean_t ‖y_t - ŷ_t‖² / ‖y_t‖²,

since the norm of the next layer divides each token's hidden states by their size: an error counts by its share of it.
The mean over all squares instead would be that of the few tokens whose hidden states are hundreds of times as large.

Steps are preconditioned as those of the whole model are (`curvature`). B is the curvature of this loss at the output of
a product, E[Jᵀ J / ‖y‖²] with J the derivative of the layer's output: the mean of g gᵀ over the gradients g of outputs
weighted by normal numbers. It is exact for the layer, and needs no more passes than the Fisher information.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from .curvature import DAMPING, CurvatureSteps
from .linear import LearnedLinear, learned_layers

#: How often the held-out batches are scored in the training of a layer.
EVALUATIONS = 5
#: The share of steps in which the learning rate rises.
WARM_UP = 0.05
#: A layer that got worse learns anew, at most so often in all, each time in steps so many times smaller.
ATTEMPTS, SMALLER = 3, 3.0
#: Batches from which the curvature is measured, at most.
CURVATURE_BATCHES = 8


@dataclass(frozen=True)
class BlockSchedule:
    """Say how long, and how fast, each layer learns: `steps` of a batch each, the peak `learning_rate` as a share of
    Newton's step, and the `seed` of the order of batches.
    """

    steps: int
    learning_rate: float
    seed: int

    def rate(self, step: int) -> float:
        """The learning rate of a step, the first being 0: it rises first, and then follows a cosine to zero."""
        rising = math.ceil(WARM_UP * self.steps)
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, self.steps - rising)))

    def order(self, batches: Sequence[int]) -> Iterator[int]:
        """Yield the batch of each step; all batches come by, in another order each time."""
        draw, left = np.random.default_rng(self.seed), list[int]()
        for _ in range(self.steps):
            left = left or draw.permutation(batches).tolist()
            yield left.pop()


@dataclass(frozen=True)
class LearningBlock:
    """A decoder layer with learned products.

    `output` computes its output on a batch, `target` reads that of the float layer, both float32
    [windows, seq_len, width]; `groups`: the first of the learned products that read the same tensor -> all of them.
    """

    layer: nn.Module
    output: Callable[[int], torch.Tensor]
    target: Callable[[int], torch.Tensor]
    groups: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class BlockResult:
    """The held-out loss of a layer when it began, at its best moment, and the step of that moment; 0 where nothing was
    better. `stopped`: the step at which the loss was not finite, 0 for the beginning; `worse`: the last training ended
    since the layer was worse than at the beginning.
    """

    before: float
    after: float
    step: int
    stopped: int | None = None
    worse: bool = False


def output_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The squared error of `output` [..., width] over the square of `target`, the mean over tokens."""
    return ((output - target).square().sum(-1) / _squares(target)).mean()


def _squares(target: torch.Tensor) -> torch.Tensor:
    return target.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)


def learn_block(
    block: LearningBlock,
    batches: tuple[Sequence[int], Sequence[int]],
    schedule: BlockSchedule,
    advance: Callable[[int], None],
) -> tuple[BlockResult, dict[str, torch.Tensor]]:
    """Train the learned products of `block`; return its losses and the codes of its best moment, by product.

    `batches`: the numbers of those to train on, and of those held out. `advance` is told of each step. A training that
    made the layer worse begins anew with smaller steps. A loss that is not finite ends it; the best moment before that
    counts.
    """
    train, held_out = batches
    codes = {name: layer.codes() for name, layer in learned_layers(block.layer).items()}
    before = held_out_error(block, held_out)
    result = BlockResult(before, before, 0, None if math.isfinite(before) else 0)
    if result.stopped is not None:
        return result, codes
    factors, told = block_factors(block, train[:CURVATURE_BATCHES], schedule.seed), 0

    def tell(step: int) -> None:
        nonlocal told
        if step > told:  # the steps of a training that begins anew are told once
            told = step
            advance(1)

    for attempt in range(ATTEMPTS):
        rate = schedule.learning_rate / SMALLER**attempt
        optimizer = CurvatureSteps(block.layer, factors, rate)
        found, own = _attempt(block, batches, replace(schedule, learning_rate=rate), optimizer, before, tell)
        if found.after < result.after:
            result, codes = found, own
        if not found.worse:
            return replace(result, stopped=found.stopped, worse=False), codes
        for layer in learned_layers(block.layer).values():
            layer.restore()
    return result, codes


def _attempt(
    block: LearningBlock,
    batches: tuple[Sequence[int], Sequence[int]],
    schedule: BlockSchedule,
    optimizer: CurvatureSteps,
    before: float,
    tell: Callable[[int], None],
) -> tuple[BlockResult, dict[str, torch.Tensor]]:
    """Train once, from the codes that the layer began with, until the held-out error is above the one `before`; return
    the losses and the codes of the best moment.
    """
    train, held_out = batches
    every, codes = math.ceil(schedule.steps / EVALUATIONS), dict[str, torch.Tensor]()
    result = BlockResult(before, before, 0)
    for step, batch in enumerate(schedule.order(train)):
        loss = output_error(block.output(batch), block.target(batch))
        if not math.isfinite(float(loss.detach())):
            return replace(result, stopped=step + 1), codes
        loss.backward()
        optimizer.param_groups[0]["lr"] = schedule.rate(step)
        optimizer.step()
        optimizer.zero_grad()
        tell(step + 1)
        if (step + 1) % every == 0 or step + 1 == schedule.steps:
            error = held_out_error(block, held_out)
            if error > before:
                return replace(result, worse=True), codes
            if error < result.after:
                result = replace(result, after=error, step=step + 1)
                codes = {name: layer.codes() for name, layer in learned_layers(block.layer).items()}
    return result, codes


@torch.no_grad()
def held_out_error(block: LearningBlock, batches: Sequence[int]) -> float:
    """The relative error of `block` on `batches`, the mean over their tokens."""
    total, tokens = 0.0, 0
    for batch in batches:
        target = block.target(batch)
        count = target.shape[:-1].numel()
        total += float(output_error(block.output(batch), target)) * count
        tokens += count
    return total / tokens


def block_factors(
    block: LearningBlock, batches: Sequence[int], seed: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Invert the damped factors of each learned product of `block`: name -> ((A + λ)⁻¹ [in, in], (B + λ)⁻¹ [out, out]),
    float32; products that read the same tensor share A.
    """
    layers, draw, tokens = learned_layers(block.layer), torch.Generator().manual_seed(seed), 0
    moments = _Moments(layers, block.groups)
    with moments.recorded():
        for batch in batches:
            target, output = block.target(batch), block.output(batch)
            drawn = torch.randn(output.shape, generator=draw).to(output.device) / _squares(target).sqrt()[..., None]
            weighted = (output * drawn).sum()
            if math.isfinite(float(weighted.detach())):  # else the training ends at it, and names its step
                weighted.backward()
                tokens += target.shape[:-1].numel()
    for layer in layers.values():
        layer.weight.grad = None
    return moments.inverted(max(tokens, 1))


class _Moments:
    """The sums of x xᵀ of each group's input, and of g gᵀ of each product's output."""

    def __init__(self, layers: Mapping[str, LearnedLinear], groups: Mapping[str, Sequence[str]]):
        """Begin with zeros for `layers`."""
        self.layers, self.groups = layers, groups

        def zeros(name: str, axis: int) -> torch.Tensor:
            weight = layers[name].weight
            return torch.zeros(weight.shape[axis], weight.shape[axis], device=weight.device)

        self.inputs = {first: zeros(first, 1) for first in groups}
        self.outputs = {name: zeros(name, 0) for name in layers}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Add up the tokens that pass, forward and back, in this block."""

        def recorder(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
            def hook(layer: nn.Module, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
                if name in self.inputs:
                    x = arguments[0].detach().flatten(0, -2).float()
                    self.inputs[name].addmm_(x.T, x)
                output.register_hook(backward)

            def backward(gradient: torch.Tensor) -> None:
                g = gradient.flatten(0, -2).float()
                self.outputs[name].addmm_(g.T, g)

            return hook

        hooks = [layer.register_forward_hook(recorder(name)) for name, layer in self.layers.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def inverted(self, tokens: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The inverses of the factors, as the means over `tokens`; the sums are used up."""
        inputs = {first: _inverse(self.inputs.pop(first), tokens) for first in self.groups}
        return {
            name: (inputs[first], _inverse(self.outputs.pop(name), tokens))
            for first, members in self.groups.items()
            for name in members
        }


def _inverse(sums: torch.Tensor, tokens: int) -> torch.Tensor:
    """Invert a factor after damping it, in FP64, in place."""
    factor = sums.double().div_(tokens)
    factor.diagonal().add_(DAMPING * float(factor.diagonal().mean()) or 1.0)
    torch.linalg.cholesky(factor, out=factor)
    torch.cholesky_inverse(factor, out=factor)
    return factor.float()
