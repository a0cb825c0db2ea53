"""Train one decoder layer of the FP8 model toward the output of the float layer on the same tokens.

Of each token t the loss is the squared error of the layer's output over the square of the float one,

    loss = mean_t ‖y_t - ŷ_t‖² / ‖y_t‖²,

since the norm of the next layer divides each token's hidden states by their size: an error counts by its share of it.
The mean over all squares instead would be that of the few tokens whose hidden states are hundreds of times as large.

Steps are those of the whole model (`steps`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from transformers import get_cosine_schedule_with_warmup

from .linear import ATTEMPTS, SMALLER, WARM_UP, learned_layers, weight_steps

#: Codes float8_e4m3fn [out, in] and scale float32 [out].
Learned = tuple[torch.Tensor, torch.Tensor]
#: How often the held-out batches are scored in the training of a layer.
EVALUATIONS = 5


@dataclass(frozen=True)
class BlockSchedule:
    """Say how long, and how fast, each layer learns: `steps` of a batch each, the peak `learning_rate` as a share of a
    GEMM's root mean square, and the `seed` of the order of batches. `scales`: weight scales learn too.
    """

    steps: int
    learning_rate: float
    seed: int
    scales: bool = False

    def order(self, batches: Sequence[int]) -> Iterator[int]:
        """Yield the batch of each step; all batches come by, in another order each time."""
        draw = np.random.default_rng(self.seed)
        left: list[int] = []
        for _ in range(self.steps):
            left = left or draw.permutation(batches).tolist()
            yield left.pop()


@dataclass(frozen=True)
class LearningBlock:
    """A decoder layer with learned GEMMs.

    `output` computes its output on a batch, `target` reads that of the float layer, both float32
    [windows, seq_len, width].
    """

    layer: nn.Module
    output: Callable[[int], torch.Tensor]
    target: Callable[[int], torch.Tensor]


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
) -> tuple[BlockResult, dict[str, Learned]]:
    """Train the learned GEMMs of `block`; return its losses and the codes and scales of its best moment, by GEMM.

    `batches`: the numbers of those to train on, and of those held out. `advance` is told of each step. A training that
    made the layer worse begins anew with smaller steps. A loss that is not finite ends it; the best moment before that
    counts.
    """
    _, held_out = batches
    codes = {name: layer.learned() for name, layer in learned_layers(block.layer).items()}
    before = held_out_error(block, held_out)
    result = BlockResult(before, before, 0, None if math.isfinite(before) else 0)
    if result.stopped is not None:
        return result, codes
    reported = 0

    def tell(step: int) -> None:
        nonlocal reported
        if step > reported:  # the steps of a training that begins anew are told once
            reported = step
            advance(1)

    for attempt in range(ATTEMPTS):
        rate = schedule.learning_rate / SMALLER**attempt
        outcome, learned = _attempt(block, batches, replace(schedule, learning_rate=rate), before, tell)
        if outcome.after < result.after:
            result = outcome
            codes = learned
        if not outcome.worse:
            return replace(result, stopped=outcome.stopped, worse=False), codes
        for layer in learned_layers(block.layer).values():
            layer.restore()
    return result, codes


def _attempt(
    block: LearningBlock,
    batches: tuple[Sequence[int], Sequence[int]],
    schedule: BlockSchedule,
    before: float,
    tell: Callable[[int], None],
) -> tuple[BlockResult, dict[str, Learned]]:
    """Train once, from the codes that the layer began with, until the held-out error is above the one `before`; return
    the losses and the codes of the best moment.
    """
    train, held_out = batches
    every = math.ceil(schedule.steps / EVALUATIONS)
    codes: dict[str, Learned] = {}
    result = BlockResult(before, before, 0)
    optimizer = weight_steps(block.layer, schedule.learning_rate)
    size = get_cosine_schedule_with_warmup(optimizer, math.ceil(WARM_UP * schedule.steps), schedule.steps)
    for step, batch in enumerate(schedule.order(train)):
        loss = output_error(block.output(batch), block.target(batch))
        if not math.isfinite(float(loss.detach())):
            return replace(result, stopped=step + 1), codes
        loss.backward()
        optimizer.step()
        size.step()
        optimizer.zero_grad()
        tell(step + 1)
        if (step + 1) % every == 0 or step + 1 == schedule.steps:
            error = held_out_error(block, held_out)
            if error > before:
                return replace(result, worse=True), codes
            if error < result.after:
                result = replace(result, after=error, step=step + 1)
                codes = {name: layer.learned() for name, layer in learned_layers(block.layer).items()}
    return result, codes


@torch.no_grad()
def held_out_error(block: LearningBlock, batches: Sequence[int]) -> float:
    """The relative error of `block` on `batches`, the mean over their tokens."""
    total = 0.0
    tokens = 0
    for batch in batches:
        target = block.target(batch)
        count = target.shape[:-1].numel()
        total += float(output_error(block.output(batch), target)) * count
        tokens += count
    return total / tokens
