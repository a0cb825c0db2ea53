"""The log of a training of learned layers: what their inputs, weights and gradients would lose in FP8."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ...options import WatchOptions
from ..training.training_log import FILE_NAME
from ..training.watch import TrainingRecorder
from .linear import learned_layers


class Watching(TrainerCallback):
    """Records the learned layers of the Trainer's model; a training that is resumed goes on with its log.

    Invariant: there is a recorder from the beginning of a training until its end, if there is a log.
    """

    def __init__(self, log: tuple[Path, int] | None, loss: Callable[[], float]):
        """Write to the directory of `log`, at every so many steps; None: write nothing. `loss`: of the step's batch."""
        self.log, self.loss = log, loss
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
