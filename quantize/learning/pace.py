"""Time the first steps of a training, and tell from them how long the rest takes.

A step is timed as it is: both models' forward passes, the backward pass, the sum over ranks and the optimizer. The
second step counts, since the first one allocates. The evaluation before the first step counts for all that follow.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

#: The step that is timed, counted from the first of this call.
TIMED = 2


@dataclass(frozen=True)
class StepPace:
    """Seconds of a step and of an evaluation, and how many of each are left."""

    step_seconds: float
    evaluation_seconds: float
    steps: int
    evaluations: int

    @property
    def seconds_left(self) -> float:
        """The time that the rest of the training takes."""
        return self.steps * self.step_seconds + self.evaluations * self.evaluation_seconds


class PaceTimer(TrainerCallback):
    """Measures the pace of a training, and tells it once."""

    def __init__(self, tell: Callable[[StepPace], None]):
        """Call `tell` after the second step of this call, or after its only one."""
        self.tell, self.step, self.begun, self.evaluation = tell, 0, 0.0, math.nan

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start the clock of the evaluation that comes before the first step."""
        self.begun = time.perf_counter()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop the clock of that evaluation."""
        if math.isnan(self.evaluation):
            self.evaluation = time.perf_counter() - self.begun

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start the clock of a step."""
        self.step += 1
        self.begun = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop the clock of the step, and tell the pace if this is the step to tell it by."""
        done, every = state.global_step, int(args.eval_steps or 1)
        if self.step == TIMED or (self.step < TIMED and done == state.max_steps):
            left = math.ceil(state.max_steps / every) - (done - 1) // every
            seconds = time.perf_counter() - self.begun
            self.tell(StepPace(seconds, self.evaluation, state.max_steps - done, left))
