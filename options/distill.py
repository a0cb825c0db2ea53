"""Options of `fp8q distill`: those of its two modes, which learn weights or an adapter, and those of both.

Options of a training log are here too: those of `fp8q.api.watch`, and of `fp8q inspect` of a log.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from ..core.errors import InputError
from .declare import MEASUREMENT, MODEL, TEXT, Of, Options, between, first_changed, option
from .serve import above_zero

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


Trained = Literal["weights", "adapter"]
LearnedScales = Literal["fixed", "learned"]
#: The largest rank of an adapter that vLLM serves.
LARGEST_RANK = 512


@dataclass(frozen=True)
class LearningOptions(Options):
    """Options of both modes: how long is learned, and in which order the windows come."""

    samples: Annotated[
        int | None, option(TEXT, "Windows to learn from and to hold out, evenly spaced.", "N", "all"), between(1)
    ] = None
    allow_overlap: Annotated[
        bool, option(TEXT, "Learn from text that is in the text for evaluation too.", negative=())
    ] = False
    epochs: Annotated[float, option(MEASUREMENT, "Passes over the text.", "N"), above_zero] = 2.0
    batch_size: Annotated[int, option(MEASUREMENT, "Windows a step.", "N"), between(1)] = 4
    seed: Annotated[
        int, option(MEASUREMENT, "Of the order of the windows, and of an adapter's beginning.", "N"), between(0)
    ] = 0


@dataclass(frozen=True)
class WeightLearningOptions(LearningOptions):
    """Options of learned weights: how fast they move.

    `stream`: each decoder layer learns by itself, toward the output of the float layer; with `end_to_end` the whole
    model learns after that. `shard`: the ranks of torchrun have a part of both models each.
    """

    learning_rate: Annotated[
        float,
        option(MEASUREMENT, "Of weights: Adam's highest step, as a share of a layer's root mean square.", "X"),
        Of("weights"),
        above_zero,
    ] = 0.001
    stream: Annotated[
        bool,
        option(MODEL, "Of weights: learn one decoder layer at a time, for models larger than memory.", negative=()),
        Of("weights"),
    ] = False
    end_to_end: Annotated[
        bool,
        option(MODEL, "Of weights: after --stream learn the whole model too; memory must hold it.", negative=()),
        Of("weights"),
    ] = False
    shard: Annotated[
        bool,
        option(MODEL, "Of weights: share the models between the ranks of torchrun, which need less each.", negative=()),
        Of("weights"),
    ] = False
    scales: Annotated[
        LearnedScales,
        option(MEASUREMENT, "Of weights: let the scale of each output channel learn too, or leave it."),
        Of("weights"),
    ] = "fixed"
    gradients: Annotated[
        LearningGradients,
        option(MEASUREMENT, "Of weights: round gradients to it, each by the amax of 16 steps before."),
        Of("weights"),
    ] = "fp32"
    watch: Annotated[
        int | None,
        option(MEASUREMENT, "Of weights: record every Nth step, for `fp8q inspect RUN/training`.", "N"),
        Of("weights"),
        between(1),
    ] = None


@dataclass(frozen=True)
class AdapterLearningOptions(LearningOptions):
    """Options of a learned adapter: its size, its factor alpha / rank, and how fast it moves."""

    rank: Annotated[
        int,
        option(MEASUREMENT, "Of an adapter: its rank.", "N"),
        Of("adapter"),
        between(1, LARGEST_RANK),
    ] = 16
    alpha: Annotated[
        int, option(MEASUREMENT, "Of an adapter: its factor is alpha / rank.", "N"), Of("adapter"), between(1)
    ] = 32
    adapter_rate: Annotated[
        float, option(MEASUREMENT, "Of an adapter: Adam's highest step.", "X"), Of("adapter"), above_zero
    ] = 0.0001


@dataclass(frozen=True)
class DistillOptions(WeightLearningOptions, AdapterLearningOptions):
    """Options of `fp8q distill`: learn weights or an adapter, how long and how fast, and the order of the windows."""

    train: Annotated[
        Trained, option(MEASUREMENT, "Learn the codes of weights, or a LoRA adapter beside the FP8 model.")
    ] = "weights"

    def __post_init__(self) -> None:
        """Refuse also options of the other mode."""
        super().__post_init__()
        for name, field in self.declared().items():
            if field.of not in (None, self.train) and (option := first_changed(self, [name])):
                raise InputError(
                    option,
                    f"is for --train {field.of}, and this is --train {self.train}",
                    "choose that one, or leave this out",
                )
        if self.end_to_end and not self.stream:
            raise InputError("--end-to-end", "comes after --stream, without which all is learned so", "leave it out")
        if self.stream and not self.end_to_end and (option := first_changed(self, ["gradients", "watch"])):
            raise InputError(
                option,
                "is for learning end to end, and --stream learns layer by layer",
                "leave one out, or let --end-to-end follow",
            )
        if self.shard and self.stream:
            raise InputError(
                "--stream",
                "learns layer by layer in one process, and --shard shares both models between several",
                "leave one out",
            )
        if self.shard and (option := first_changed(self, ["watch"])):
            raise InputError(option, "is for whole models, of which --shard has a part on each rank", "leave one out")
