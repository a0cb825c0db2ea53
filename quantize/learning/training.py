"""Train the FP8 model toward its float original, by transformers' Trainer.

The loss is the forward KL divergence from the float model's distribution at temperature 1, in nats a token, over all
positions (`divergence`; ModelOpt's quantization-aware distillation has the same loss). Steps are Adam's (`steps`), or
those of the `Schedule`'s own optimizer; their size rises first and then follows a cosine to zero. The held-out windows
are scored as often as `EVALUATIONS` says, and the weights of the best of these moments win, if they are better than
those at the beginning. Where one is much worse, steps are too large for this model, and the training begins anew with
smaller ones.

Several ranks train together by torch's DistributedDataParallel: each takes its share of the windows of a step, and
gradients are averaged, so that the result is that of one process but for the order of sums. The optimizer has the
layers themselves, not their wrapper: every rank takes the same step. Where the models are sharded (`sharded_model`),
each rank takes the step of its parts, and saves those alone: the same number of ranks goes on with them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...calibrate.model.gemms import routers
from ...calibrate.ranks.world import World
from ...core.memory import release_memory
from ...options import LearningGradients
from .divergence import forward_kl
from .document import Moment
from .linear import ATTEMPTS, SMALLER, WARM_UP, learned_layers, round_gradients, weight_steps
from .progress import (
    METRIC,
    EndWhereItRises,
    PaceTimer,
    Progress,
    StepPace,
    Watching,
    has_risen,
    moment_checkpoint,
    moments_of,
)
from .sharded_model import ShardedModel, is_sharded
from .shards import load_local_state, local_part, local_state

#: How often the held-out windows are scored, and the state is saved, over the whole training.
EVALUATIONS = 10
#: The learned parameters in a checkpoint of the Trainer.
PARAMETERS_NAME = "model.safetensors"


@dataclass(frozen=True)
class Schedule:
    """Say how long, and how fast, to train: `epochs` over the windows, `batch_size` windows a step of all ranks, the
    peak `learning_rate` in the unit of the optimizer, and the `seed` of the windows' order.

    `gradients`: the format that gradients of the layers' outputs are rounded to. `optimizer`: makes the optimizer of a
    student at a learning rate.
    """

    epochs: float
    batch_size: int
    learning_rate: float
    seed: int
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer] = weight_steps
    gradients: LearningGradients = "fp32"


@dataclass(frozen=True)
class Listener:
    """The functions that a training calls.

    `advance`: with the number of steps since it was called last; `blame`: to name, at the end of a sentence, the module
    that gives the first number that is not finite, of token ids; `pace`: once, as soon as the pace is known; `anew`:
    with the learning rate of a training that begins anew; `scored`: with each held-out divergence. `log`: the directory
    of the log of the training, and at which steps it is written; None: there is none.
    """

    advance: Callable[[int], None]
    blame: Callable[[torch.Tensor], str]
    pace: Callable[[StepPace], None] = lambda pace: None
    anew: Callable[[float], None] = lambda learning_rate: None
    scored: Callable[[Moment], None] = lambda moment: None
    log: tuple[Path, int] | None = None


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


class DistillationTrainer(Trainer):
    """transformers' Trainer with the divergence from a teacher as its loss."""

    def __init__(self, teacher: PreTrainedModel, blame: Callable[[torch.Tensor], str], world: World, **named: Any):
        """Train toward `teacher`, together with all ranks of `world`; the other arguments are the Trainer's.

        `blame`: names the module that gives the first number that is not finite, of token ids; it ends a sentence.
        """
        super().__init__(**named)
        self.teacher = teacher
        self.blame = blame
        self.world = world
        self.latest = math.nan
        assert self.model is not None, "a Trainer has its model"
        self.sharded = ShardedModel(self.model) if is_sharded(self.model) else None

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The divergence of `model` on `inputs`.

        Raises LossIsNotFiniteError, naming the step, on all ranks where it is not finite on one.
        """
        model.eval()  # with the dropout of a model's configuration the student would be another than is served
        ids = inputs["input_ids"]
        with torch.no_grad():
            wanted = self.teacher(input_ids=ids, use_cache=False).logits
        outputs = model(input_ids=ids, use_cache=False)
        loss = forward_kl(wanted, outputs.logits)
        self.latest = float(loss.detach())
        finite = [rank["finite"] for rank in self.world.gathered({"finite": math.isfinite(self.latest)})]
        if not all(finite):  # all ranks look for the module: a sharded model runs on all of them, or on none
            messages = [rank["message"] for rank in self.world.gathered({"message": self._not_finite(ids)})]
            raise LossIsNotFiniteError(messages[finite.index(False)])
        if return_outputs:
            return (loss, {"loss": loss.detach()[None]})
        return loss

    def _not_finite(self, ids: torch.Tensor) -> str:
        step = self.state.global_step + 1
        return f"the loss is {self.latest} at step {step} of {self.state.max_steps}{self.blame(ids)}"

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """All held-out windows, one by one: the ranks' last share is filled up, and what fills it is not counted."""
        assert isinstance(self.eval_dataset, WindowDataset), "held-out windows are always there"
        loader: DataLoader[Any] = self.accelerator.prepare(DataLoader(self.eval_dataset, batch_size=1))
        return loader

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

    def _wrap_model(
        self, model: torch.nn.Module, training: bool = True, dataloader: DataLoader[Any] | None = None
    ) -> torch.nn.Module:
        """A sharded model stands for itself; accelerate would wrap it in DDP, which has no use for parts."""
        return self.sharded or super()._wrap_model(model, training, dataloader)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the parameters that are learned, and nothing that does not change: rank 0 all of them, or each rank its
        parts.
        """
        if self.sharded is None and not self.args.should_save:
            return
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        assert self.model is not None, "a Trainer has its model"
        save_file(steps_of(self.model), folder / self._file(PARAMETERS_NAME), metadata={"format": "pt"})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        self.load_steps(Path(resume_from_checkpoint))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save them; where ranks have parts, each saves its own, and none goes on before all have."""
        if self.sharded is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        assert self.optimizer is not None, "it is there while the model is trained"
        assert self.lr_scheduler is not None, "it is there while the model is trained"
        torch.save(local_state(self.optimizer), Path(output_dir) / self._file(OPTIMIZER_NAME))
        torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / self._file(SCHEDULER_NAME))
        self.world.gathered({})  # the state that rank 0 writes last says that the checkpoint is whole

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.sharded is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert self.optimizer is not None, "it is there while the model is trained"
        assert self.lr_scheduler is not None, "it is there while the model is trained"
        moved, rates = (
            torch.load(Path(checkpoint) / self._file(name), map_location="cpu", weights_only=True)
            for name in (OPTIMIZER_NAME, SCHEDULER_NAME)
        )
        load_local_state(self.optimizer, moved)
        self.lr_scheduler.load_state_dict(rates)

    def load_steps(self, checkpoint: Path) -> None:
        """Read the learned parameters from a checkpoint of this Trainer."""
        assert self.model is not None, "a Trainer has its model"
        load_steps(self.model, checkpoint / self._file(PARAMETERS_NAME))

    def last_checkpoint(self) -> str | None:
        """The name of the last checkpoint that was written to its end, by as many ranks as there are now."""
        return last_checkpoint(Path(str(self.args.output_dir)), self._file(PARAMETERS_NAME))

    def _file(self, name: str) -> str:
        """Return the name of the file of this rank that has what is in `name` where one rank has all."""
        if self.sharded is None:
            return name
        return f"rank-{self.world.rank}-of-{self.world.size}-{name}"


def steps_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The learned parameters of `model` by name, or the parts of them that this rank has, and the amax histories of
    rounded gradients.
    """
    histories = {name: tensor for name, tensor in model.named_buffers() if name.endswith("of_gradient.amax")}
    return histories | {
        name: local_part(tensor.detach()).contiguous()
        for name, tensor in model.named_parameters()
        if tensor.requires_grad
    }


def load_steps(model: torch.nn.Module, file: Path) -> None:
    """Read what `steps_of` has of `model` from the `file` of a checkpoint of the Trainer."""
    stored = load_file(file)
    model_tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in stored.items():
            local_part(model_tensors[name]).copy_(tensor)


def learn(
    models: tuple[PreTrainedModel, PreTrainedModel],
    windows: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    schedule: Schedule,
    folder: Path,
    listener: Listener,
    world: World | None = None,
) -> list[Moment]:
    """Train the learned parameters of the student toward the teacher, the two `models`; leave those of the best moment
    in them, or those of the beginning (an adapter of zeros), where none is better.

    `windows`: to train on and held out, int64 [windows, seq_len] each. `folder`: the Trainer's checkpoints, with which
    a killed call goes on to the same bytes. `world`: the ranks that train together, each of which calls this function;
    rank 0's student alone is left as said, or every rank's part of a sharded one. Returns the held-out divergence at
    the beginning and at every evaluation.

    Raises LossIsNotFiniteError for a NaN or infinite loss; the weights of the best moment are in `student` then.
    """
    world = world or World()
    student = models[1]
    first = {} if learned_layers(student) else {name: tensor.clone() for name, tensor in steps_of(student).items()}
    callbacks = [Progress(listener.advance, listener.scored), PaceTimer(listener.pace), EndWhereItRises()]
    for attempt in range(ATTEMPTS):
        smaller = replace(schedule, learning_rate=schedule.learning_rate / SMALLER**attempt)
        if attempt:
            release_memory()  # the optimizer of the training before, which its Trainer holds in a circle
            listener.anew(smaller.learning_rate)
            begin_again(student, first)
        moments = _attempt(models, windows, smaller, folder / f"attempt-{attempt}", (listener, callbacks), world)
        if not has_risen(moments):
            break
    return moments


def _attempt(
    models: tuple[PreTrainedModel, PreTrainedModel],
    windows: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    schedule: Schedule,
    folder: Path,
    listening: tuple[Listener, list[TrainerCallback]],
    world: World,
) -> list[Moment]:
    """Train once, from what the student has now, until the end or until its divergence has risen."""
    (teacher, student), (train, held_out), (listener, callbacks) = models, windows, listening
    optimizer = schedule.optimizer(student, schedule.learning_rate)
    round_gradients(student, schedule.gradients)
    arguments = _arguments(len(train), schedule, folder, world, sparse=bool(routers(teacher)))
    trainer = DistillationTrainer(
        teacher, listener.blame, world, model=student, args=arguments, train_dataset=WindowDataset(train),
        eval_dataset=WindowDataset(held_out), optimizers=(optimizer, None), callbacks=[*callbacks],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    watching = Watching(listener.log, lambda: trainer.latest)
    trainer.add_callback(watching)
    begun = world.gathered({"checkpoint": trainer.last_checkpoint()})[0]["checkpoint"]
    if begun:  # by a call that was killed, maybe after this training
        trainer.state = TrainerState.load_from_json(str(folder / begun / TRAINER_STATE_NAME))
        if has_risen(moments_of(trainer.state)):
            _take_best(trainer, student)
            return moments_of(trainer.state)
    try:
        with world.explaining():
            trainer.train(resume_from_checkpoint=str(folder / begun) if begun else None)
    except LossIsNotFiniteError as error:
        error.moments = moments_of(trainer.state)
        _take_best(trainer, student)
        raise
    finally:
        watching.close()
    _take_best(trainer, student)
    return moments_of(trainer.state)


def last_checkpoint(folder: Path, file: str = TRAINER_STATE_NAME) -> str | None:
    """The name of the last checkpoint in `folder` that has the `file` and was written to its end; None: there is none.

    The Trainer's own search would take one that a kill left half-written. Its state is the last file that is written.
    """
    states = folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")
    complete = [state.parent.name for state in states if (state.parent / file).exists()]
    return max(complete, key=lambda name: int(name.rpartition("-")[2]), default=None)


def _arguments(windows: int, schedule: Schedule, folder: Path, world: World, sparse: bool) -> TrainingArguments:
    """Arguments of the Trainer for a training on so many `windows`; `sparse`: the model has experts.

    The last windows of a pass, which do not fill a step, are left out: shared out, they would be filled up with others.
    """
    steps = planned_steps(windows, schedule)
    every = max(1, math.ceil(steps / EVALUATIONS))
    return TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=schedule.batch_size // world.size,
        per_device_eval_batch_size=1, dataloader_drop_last=windows >= schedule.batch_size,
        learning_rate=schedule.learning_rate, lr_scheduler_type="cosine", warmup_steps=math.ceil(WARM_UP * steps),
        max_grad_norm=0.0, seed=schedule.seed, data_seed=schedule.seed, eval_strategy="steps", eval_steps=every,
        eval_on_start=True, save_strategy="steps", save_steps=every, save_total_limit=2, metric_for_best_model=METRIC,
        greater_is_better=False, logging_steps=every, report_to=[], disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(), remove_unused_columns=False, ddp_broadcast_buffers=False,
        ddp_find_unused_parameters=sparse,  # experts that no token of a rank is routed to have no gradient there
    )  # fmt: skip


def planned_steps(windows: int, schedule: Schedule) -> int:
    """The steps of `schedule` over so many windows."""
    return math.ceil(windows / schedule.batch_size * schedule.epochs)


@torch.no_grad()
def begin_again(student: PreTrainedModel, first: Mapping[str, torch.Tensor] | None = None) -> None:
    """Take the learned weights of `student` back to the codes that they began with, and an adapter to zeros, or to the
    `first` values of its parameters by name.
    """
    if layers := learned_layers(student):
        for layer in layers.values():
            layer.restore()
        return
    for name, parameter in student.named_parameters():
        if parameter.requires_grad and first:
            parameter.copy_(first[name])
        elif parameter.requires_grad:
            parameter.zero_()


def _take_best(trainer: DistillationTrainer, student: PreTrainedModel) -> None:
    """Put the learned parameters of the best moment into `student`; those of the beginning where none is better.

    Ranks above 0 take their parts of a sharded student, and leave a whole one as it is.
    """
    if trainer.sharded is None and trainer.world.rank:
        return
    best = min(moments_of(trainer.state), key=lambda moment: moment.kl, default=None)
    if best is None or best.step == 0:
        begin_again(student)
    else:
        trainer.load_steps(moment_checkpoint(best, Path(str(trainer.args.output_dir))))
