"""Options of a training log: `fp8q.api.watch`, and `fp8q inspect` of a log."""

from dataclasses import dataclass
from typing import Annotated, Literal

from .declare import MEASUREMENT, Options, between, option

#: The format of gradients in training.
GradientFormat = Literal["e5m2", "e4m3"]
#: The format of gradients in `fp8q distill`.
LearningGradients = Literal["fp32", "bf16", "e5m2", "e4m3"]
#: Where the scale of a step comes from: Transformer Engine's DelayedScaling (the amax of steps before),
#: Float8CurrentScaling (its own amax), or nowhere: it is 1.
Scaling = Literal["delayed", "current", "none"]


@dataclass(frozen=True)
class WatchOptions(Options):
    """Options of a training log: how often a step is recorded, and from how many records a scale follows.

    Transformer Engine's history counts every step; this one counts records. `scaling`: `delayed` (its DelayedScaling),
    `current` (its Float8CurrentScaling) or `none`, a scale of 1.
    """

    every: Annotated[int, option(MEASUREMENT, "Record every Nth step.", "N"), between(1)] = 10
    history: Annotated[
        int, option(MEASUREMENT, "Records whose amax the next one's scale is made from.", "N"), between(1)
    ] = 16
    scaling: Annotated[
        Scaling, option(MEASUREMENT, "Where scales come from: the amax before, the own, or nowhere.")
    ] = "delayed"
