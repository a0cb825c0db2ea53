"""`fp8q distill --stream`: learn decoder layer by decoder layer, and compare the whole model before and after."""

import time
from pathlib import Path

import torch

from ..calibrate.model.decoder import NoChainError
from ..calibrate.model.source import Source
from ..core.errors import InputError
from ..core.run import Run
from ..options import DistillOptions
from ..quantize.learning.block_training import BlockSchedule
from ..quantize.learning.blocks import BlockLearning, BlockText
from ..quantize.learning.document import BlockLoss, Distillation, Moment
from ..quantize.reference.fp8_model import open_codes
from ..quantize.scales.decisions import load_scales
from .pipeline.steps import Notes, device
from .shared.texts import LearningText


def learn_blocks(
    run: Run, source: Source, text: LearningText, options: DistillOptions, folder: Path, notes: Notes
) -> Distillation:
    """Learn the layers of the run's checkpoint one after the other, and write their codes to `distilled.safetensors`.

    `folder` holds the hidden states and the layers that have learned, with which a killed call goes on.

    Raises InputError for a model that is no chain of layers.
    """
    begun, seed = time.monotonic(), options.seed
    windows = BlockText.cut(text.windows, text.held_out, options.batch_size, seed)
    steps = max(1, round(len(windows.train) * options.epochs))
    notes.note(
        f"distill: {text.windows.size:,} tokens of {text.name}, {options.epochs:g} passes in each layer, "
        f"{text.held_out.size:,} held out"
    )
    stored = open_codes(run.model, "exact", torch.float32, device())
    try:
        learning = BlockLearning(source, stored, load_scales(run).activations, windows, folder)
        learning.run(BlockSchedule(steps, options.learning_rate, seed, options.scales == "learned"), notes)
    except NoChainError as error:
        raise InputError(
            error.subject,
            f"{error.reason}, so it cannot learn layer by layer",
            "give `fp8q distill` memory for the whole of it, without --stream",
        ) from error
    before, after = learning.divergences()
    losses = learning.done.losses
    learning.done.save(run.distilled, learning.outside_codes())
    if stopped := _stopped(losses, steps):
        notes.note(f"distill: {stopped}; the weights of the best moment before it stay")
    return Distillation(
        data=text.name,
        tokens=text.windows.size,
        held_out=text.held_out.size,
        steps=steps * len(losses),
        seconds=round(time.monotonic() - begun, 1),
        moments=[Moment(step=0, kl=before), Moment(step=steps * len(losses), kl=after)],
        changed=sum(loss.changed for loss in losses) / max(1, sum(loss.codes for loss in losses)),
        stopped=stopped,
        blocks=losses,
    )


def _stopped(losses: list[BlockLoss], steps: int) -> str | None:
    """Name the first layer and step whose loss was not finite; None where all were."""
    found = next((loss for loss in losses if loss.stopped is not None), None)
    if found is None:
        return None
    return f"the loss of layer {found.layer} is not finite at step {found.stopped} of {steps}"
