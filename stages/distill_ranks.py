"""The ranks of torchrun that `fp8q distill` learns on: the refusal of what they cannot share, and the task that rank 0
hands to the others.
"""

import os
from pathlib import Path

from ..calibrate.model.gemms import routers
from ..calibrate.model.source import Source, meta_model
from ..calibrate.ranks.world import World
from ..core.errors import InputError
from ..core.files import Strict
from ..core.run import Run
from ..options import DistillOptions, LearningGradients
from ..options.distill import LearnedScales
from .pipeline.stages import QUANTIZE
from .shared.texts import Tokens

#: Variables by which `accelerate launch` asks for a training in which no rank has a whole weight.
SHARDED = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")


class LearningTask(Strict):
    """The training that rank 0 tells the others to take part in, with the windows that follow it.

    `start`: file of the checkpoint to begin with -> its SHA-256; `folder`: of the Trainer's checkpoints, in the run.
    """

    start: dict[str, str]
    folder: str
    epochs: float
    batch_size: int
    learning_rate: float
    seed: int
    scales: LearnedScales
    gradients: LearningGradients
    shard: bool


def check_ranks(options: DistillOptions, world: World) -> None:
    """Raise InputError where ranks cannot share windows or weights, or where a launcher would split the weights."""
    if options.stream and world.size > 1:
        raise InputError("--stream", "layers learn one after the other, in one process", "start it without torchrun")
    if options.gradients in ("e5m2", "e4m3") and world.size > 1:
        raise InputError(
            f"--gradients {options.gradients}",
            "scales by the amax of the steps before, which each rank would have of its own windows",
            "start it without torchrun",
        )
    if options.batch_size % world.size:
        raise InputError(
            f"--batch-size {options.batch_size}",
            f"is the number of windows a step of all {world.size} ranks, which cannot have as many each",
            f"give a multiple of {world.size}",
        )
    if options.shard and world.size == 1:
        raise InputError(
            "--shard",
            "shares the models between the ranks of torchrun, and this is one process",
            "start it with torchrun --nproc-per-node N -m fp8q distill",
        )
    for name in SHARDED:
        if os.environ.get(name, "false").lower() in {"1", "true", "yes", "on"}:
            raise InputError(
                "",
                f"{name} is set: fp8q shares a model between ranks itself, by torch's FSDP2",
                "unset it, start the ranks with torchrun, and give --shard",
            )


def check_no_experts(source: Source) -> None:
    """Raise InputError for a model with experts: FSDP2 adds up gradients that all ranks have, and a rank whose tokens
    leave an expert out has none of it.
    """
    if routers(meta_model(source)):
        raise InputError(
            "--shard",
            f"{source.name} has experts, and tokens of one rank may reach others than those of the next",
            "leave --shard out, or learn layer by layer with --stream in one process",
        )


def send_task(run: Run, options: DistillOptions, folder: Path, windows: tuple[Tokens, Tokens], world: World) -> None:
    """Tell the other ranks what to learn: from `windows`, to train on and held out, int64 [windows, seq_len] each."""
    task = LearningTask(
        start=run.record().stages[QUANTIZE.name].outputs,
        folder=str(folder.relative_to(run.root)),
        epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        seed=options.seed,
        scales=options.scales,
        gradients=options.gradients,
        shard=options.shard,
    )
    world.gathered(task.model_dump())
    for part in windows:
        world.sent(part)


def send_nothing(world: World) -> None:
    """Tell the other ranks that nothing is to be learned."""
    world.gathered({})


def receive_task(run: Run, world: World) -> tuple[LearningTask, tuple[Tokens, Tokens]] | None:
    """Receive the task of rank 0 and its windows; None where nothing is to be learned.

    Raises InputError where the directory `run` of this rank is not that of rank 0.
    """
    sent = world.gathered({})[0]
    if not sent:
        return None
    task = LearningTask.model_validate(sent)
    windows = (world.sent(None), world.sent(None))
    recorded = run.record().stages.get(QUANTIZE.name)
    if recorded is None or recorded.outputs != task.start:
        raise InputError(
            run.root,
            "holds another checkpoint here than rank 0's",
            "the ranks of `fp8q distill` share the directory of the run: name one that all machines have",
        )
    return task, windows
