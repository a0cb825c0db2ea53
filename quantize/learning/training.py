"""Train the FP8 model toward its float original, by transformers' Trainer.

The loss is the forward KL divergence from the float model's distribution at temperature 1, in nats a token, over all
positions (Hinton et al., 2015, arXiv 1503.02531; ModelOpt's quantization-aware distillation has the same loss). Steps
are preconditioned by the curvature (`curvature`), or those of the `Schedule`'s own optimizer; their size rises first
and then follows a cosine to zero. The held-out windows are scored as often as `EVALUATIONS` says, and the weights of
the best of these moments win, if they are better than those at the beginning.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

from .curvature import CurvatureSteps, inverse_factors
from .document import Moment

#: How often the held-out windows are scored, and the state is saved, over the whole training.
EVALUATIONS = 10
#: The share of steps in which the learning rate rises.
WARM_UP = 0.05
#: Windows from which the curvature is measured, at most.
CURVATURE_WINDOWS = 32
METRIC = "eval_loss"


def curvature_steps(
    student: PreTrainedModel, batches: Iterator[torch.Tensor], schedule: "Schedule"
) -> torch.optim.Optimizer:
    """Measure the curvature of the learned layers of `student` on `batches`, and make their optimizer of it."""
    factors = inverse_factors(student, batches, schedule.seed)
    return CurvatureSteps(student, factors, schedule.learning_rate)


@dataclass(frozen=True)
class Schedule:
    """Say how long, and how fast, to train: `epochs` over the windows, `batch_size` windows a step, the peak
    `learning_rate` in the unit of the optimizer (a share of Newton's step), and the `seed` of the windows' order.

    `optimizer`: makes the optimizer of a student, given batches of token ids from which it may measure.
    """

    epochs: float
    batch_size: int
    learning_rate: float
    seed: int
    optimizer: "Callable[[PreTrainedModel, Iterator[torch.Tensor], Schedule], torch.optim.Optimizer]" = curvature_steps


class WindowDataset(Dataset[dict[str, torch.Tensor]]):
    """Token windows int64 [windows, seq_len] as a dataset."""

    def __init__(self, ids: npt.NDArray[np.int64]):
        """Serve the rows of `ids`."""
        self.ids = torch.from_numpy(ids)

    def __len__(self) -> int:
        """The number of windows."""
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One window, as the arguments of a model."""
        return {"input_ids": self.ids[index]}


class LossIsNotFiniteError(Exception):
    """Ends a training whose loss is NaN or infinite. `moments`: the held-out divergences until then."""

    moments: list[Moment]


def forward_kl(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """KL(teacher || student) of logits [..., vocabulary], in nats, the mean over positions."""
    wanted, had = teacher.float().log_softmax(-1), student.float().log_softmax(-1)
    return (wanted.exp() * (wanted - had)).sum(-1).mean()


class DistillationTrainer(Trainer):
    """transformers' Trainer with the divergence from a teacher as its loss."""

    def __init__(self, teacher: PreTrainedModel, blame: Callable[[torch.Tensor], str], **named: Any):
        """Train toward `teacher`; the other arguments are the Trainer's.

        `blame`: says which module gives the first number that is not finite, of token ids; it ends a sentence.
        """
        super().__init__(**named)
        self.teacher, self.blame = teacher, blame

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The divergence of `model` on `inputs`.

        Raises LossIsNotFiniteError, naming the step.
        """
        model.eval()  # with the dropout of a model's configuration the student would be another than is served
        ids = inputs["input_ids"]
        with torch.no_grad():
            wanted = self.teacher(input_ids=ids, use_cache=False).logits
        outputs = model(input_ids=ids, use_cache=False)
        loss = forward_kl(wanted, outputs.logits)
        if not math.isfinite(float(loss.detach())):
            raise LossIsNotFiniteError(
                f"the loss is {float(loss.detach())} at step {self.state.global_step + 1} of "
                f"{self.state.max_steps}{self.blame(ids)}"
            )
        return (loss, {"loss": loss.detach()[None]}) if return_outputs else loss

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, None, None]:
        """The divergence on a batch of held-out windows; logits are let go of."""
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the parameters that are learned, and nothing that does not change."""
        from safetensors.torch import save_file

        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        assert self.model is not None, "a Trainer has its model"
        save_file(steps_of(self.model), folder / "model.safetensors", metadata={"format": "pt"})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        trained = model or self.model
        assert trained is not None, "a Trainer has its model"
        load_steps(trained, Path(resume_from_checkpoint))


class Progress(TrainerCallback):
    """Tells `advance` of every step."""

    def __init__(self, advance: Callable[[int], None]):
        """Call `advance` with the number of steps since it was called last."""
        self.advance, self.step = advance, 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Tell of the steps that ended."""
        self.advance(state.global_step - self.step)
        self.step = state.global_step


def steps_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The learned parameters of `model` by name."""
    return {name: each.detach().contiguous() for name, each in model.named_parameters() if each.requires_grad}


def load_steps(model: torch.nn.Module, checkpoint: Path) -> None:
    """Read the learned parameters of `model` from a checkpoint of the Trainer."""
    stored, own = load_file(checkpoint / "model.safetensors"), dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in stored.items():
            own[name].copy_(tensor)


def learn(
    models: tuple[PreTrainedModel, PreTrainedModel],
    windows: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    schedule: Schedule,
    folder: Path,
    advance: Callable[[int], None],
    blame: Callable[[torch.Tensor], str],
) -> list[Moment]:
    """Train the learned parameters of the student toward the teacher, the two `models`; leave those of the best moment
    in them, or zeros, which change nothing, where none is better.

    `windows`: to train on and held out, int64 [windows, seq_len] each. `folder`: the Trainer's checkpoints, with which
    a killed call goes on to the same bytes. Returns the held-out divergence at the beginning and at every evaluation.

    Raises LossIsNotFiniteError for a NaN or infinite loss; the weights of the best moment are in `student` then.
    """
    teacher, student = models
    train, held_out = windows
    steps = planned_steps(len(train), schedule)
    every = max(1, math.ceil(steps / EVALUATIONS))
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=schedule.batch_size,
        per_device_eval_batch_size=schedule.batch_size, learning_rate=schedule.learning_rate,
        lr_scheduler_type="cosine", warmup_steps=math.ceil(WARM_UP * steps), max_grad_norm=0.0, seed=schedule.seed,
        data_seed=schedule.seed, eval_strategy="steps", eval_steps=every, eval_on_start=True, save_strategy="steps",
        save_steps=every, save_total_limit=2, metric_for_best_model=METRIC, greater_is_better=False,
        logging_steps=every, report_to=[], disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False,
    )  # fmt: skip
    sample = torch.from_numpy(train[:: max(1, len(train) // CURVATURE_WINDOWS)]).to(teacher.device)
    optimizer = schedule.optimizer(student, iter(sample.split(schedule.batch_size)), schedule)
    trainer = DistillationTrainer(
        teacher, blame, model=student, args=arguments, train_dataset=WindowDataset(train),
        eval_dataset=WindowDataset(held_out), callbacks=[Progress(advance)], optimizers=(optimizer, None),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    try:
        trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    except LossIsNotFiniteError as error:
        error.moments = _moments(trainer.state)
        raise
    finally:
        _take_best(trainer, student)
    return _moments(trainer.state)


def planned_steps(windows: int, schedule: Schedule) -> int:
    """The steps of `schedule` over so many windows."""
    return math.ceil(windows / schedule.batch_size * schedule.epochs)


def _moments(state: TrainerState) -> list[Moment]:
    """The held-out divergence by step, as the Trainer logged it; a step that it logged twice counts once."""
    scored = {int(line["step"]): float(line[METRIC]) for line in state.log_history if METRIC in line}
    return [Moment(step=step, kl=kl) for step, kl in sorted(scored.items())]


def _take_best(trainer: Trainer, student: PreTrainedModel) -> None:
    """Put the learned parameters of the best moment into `student`; zeros where none is better."""
    best = min(_moments(trainer.state), key=lambda moment: moment.kl, default=None)
    if best is None or best.step == 0:
        with torch.no_grad():
            for parameter in student.parameters():
                if parameter.requires_grad:
                    parameter.zero_()
    elif trainer.state.best_model_checkpoint is not None:
        load_steps(student, Path(trainer.state.best_model_checkpoint))
