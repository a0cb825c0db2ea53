"""Follow a training of transformers' Trainer: its steps, and the held-out divergence, which may end it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .document import Moment

#: The name by which the Trainer logs the held-out divergence.
METRIC = "eval_loss"
#: A divergence that lies so many times above that at the beginning says that steps are too large.
RISEN = 1.05


def moments_of(state: TrainerState) -> list[Moment]:
    """The held-out divergence by step, as the Trainer logged it; of a step that it logged twice the first, by which it
    chose the checkpoints that it keeps.
    """
    scored = dict[int, float]()
    for line in state.log_history:
        if METRIC in line:
            scored.setdefault(int(line["step"]), float(line[METRIC]))
    return [Moment(step=step, kl=kl) for step, kl in sorted(scored.items())]


class Progress(TrainerCallback):
    """Tells of every step, and of every held-out divergence."""

    def __init__(self, advance: Callable[[int], None], scored: Callable[[Moment], None]):
        """Call `advance` with the number of steps since it was called last, and `scored` with each divergence."""
        self.advance, self.scored, self.step = advance, scored, 0

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
