"""Options of `fp8q distill`."""

from dataclasses import dataclass
from typing import Annotated

from .declare import MEASUREMENT, MODEL, TEXT, Options, between, option
from .serve import above_zero


@dataclass(frozen=True)
class DistillOptions(Options):
    """Options of `fp8q distill`: how long and how fast weights are learned, and in which order the windows come.

    `stream`: each decoder layer learns by itself, toward the output of the float layer, in steps five times as large.
    """

    samples: Annotated[
        int | None, option(TEXT, "Windows to learn from and to hold out, evenly spaced.", "N", "all"), between(1)
    ] = None
    allow_overlap: Annotated[
        bool, option(TEXT, "Learn from text that is in the text for evaluation too.", negative=())
    ] = False
    epochs: Annotated[float, option(MEASUREMENT, "Passes over the text.", "N"), above_zero] = 2.0
    batch_size: Annotated[int, option(MEASUREMENT, "Windows a step.", "N"), between(1)] = 4
    learning_rate: Annotated[
        float,
        option(MEASUREMENT, "The highest step, as a share of Newton's by the model's curvature.", "X"),
        above_zero,
    ] = 0.004
    seed: Annotated[int, option(MEASUREMENT, "Of the order of the windows.", "N"), between(0)] = 0
    stream: Annotated[
        bool,
        option(MODEL, "Learn one decoder layer at a time, for models larger than memory.", negative=()),
    ] = False
