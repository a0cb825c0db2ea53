"""Callbacks of transformers' Trainer: steps and the held-out divergence, which may end a training; the time that is
left; the log of what inputs, weights and gradients of learned layers would lose in FP8.

The time left follows from one step, timed as it is: both models' forward passes, the backward pass, the sum over ranks
and the optimizer. The second step counts, since the first one allocates. The evaluation before the first step counts
for all that follow.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...options import WatchOptions
from ..training.training_log import FILE_NAME
from ..training.watch import TrainingRecorder
from .document import Moment
from .linear import learned_layers

#: The name by which the Trainer logs the held-out divergence.
METRIC = "eval_loss"
#: A divergence that lies so many times above that at the beginning says that steps are too large.
RISEN = 1.05


def moments_of(state: TrainerState) -> list[Moment]:
    """The held-out divergence by step, as the Trainer logged it; of a step that it logged twice the first, by which it
    chose the checkpoints that it keeps.
    """
    scored: dict[int, float] = {}
    for line in state.log_history:
        if METRIC in line:
            scored.setdefault(int(line["step"]), float(line[METRIC]))
    return [Moment(step=step, kl=kl) for step, kl in sorted(scored.items())]


class Progress(TrainerCallback):
    """Tells of every step, and of every held-out divergence."""

    def __init__(self, advance: Callable[[int], None], scored: Callable[[Moment], None]):
        """Call `advance` with the number of steps since it was called last, and `scored` with each divergence."""
        self.advance = advance
        self.scored = scored
        self.step = 0

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Tell of the divergence that this evaluation found."""
        self.scored(moments_of(state)[-1])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Tell of the steps that ended; those of a training that begins anew are told of once."""
        if state.global_step > self.step:
            self.advance(state.global_step - self.step)
            self.step = state.global_step


def moment_checkpoint(moment: Moment, folder: Path) -> Path:
    """The Trainer's checkpoint of a `moment` after the beginning, in its `folder`."""
    return folder / f"{PREFIX_CHECKPOINT_DIR}-{moment.step}"


class EndWhereItRises(TrainerCallback):
    """Ends a training that made the student much worse."""

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """End it after this evaluation, if it is so."""
        control.should_training_stop = control.should_training_stop or has_risen(moments_of(state))


def has_risen(moments: list[Moment]) -> bool:
    """Tell whether the last of `moments` is far above the first."""
    return bool(moments) and moments[-1].kl > RISEN * moments[0].kl


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
        self.tell = tell
        self.step = 0
        self.begun = 0.0
        self.evaluation = math.nan

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
        done = state.global_step
        every = int(args.eval_steps or 1)
        if self.step == TIMED or (self.step < TIMED and done == state.max_steps):
            left = math.ceil(state.max_steps / every) - (done - 1) // every
            seconds = time.perf_counter() - self.begun
            self.tell(StepPace(seconds, self.evaluation, state.max_steps - done, left))


class Watching(TrainerCallback):
    """Records the learned layers of the Trainer's model; a training that is resumed goes on with its log.

    Invariant: there is a recorder from the beginning of a training until its end, if there is a log.
    """

    def __init__(self, log: tuple[Path, int] | None, loss: Callable[[], float]):
        """Write to the directory of `log`, at every so many steps; None: write nothing. `loss`: of the step's batch."""
        self.log = log
        self.loss = loss
        self.recorder: TrainingRecorder | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """Begin the log, or go on with that of the step that the training goes on with."""
        if self.log is None:
            return
        folder, every = self.log
        if state.global_step == 0:
            (folder / FILE_NAME).unlink(missing_ok=True)
        model: torch.nn.Module = named["model"]
        layers: dict[str, torch.nn.Module] = {**learned_layers(model)}
        self.recorder = TrainingRecorder(model, folder, WatchOptions(every), layers, state.global_step)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **named: Any
    ) -> None:
        """End a step: its backward pass is done."""
        if self.recorder is not None:
            self.recorder.step(self.loss())

    def close(self) -> None:
        """Remove the hooks."""
        if self.recorder is not None:
            self.recorder.close()
