"""A training log: `fp8q.api.watch` writes it, `fp8q inspect LOG` and `fp8q report LOG` judge and draw it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...options import GradientFormat, WatchOptions
from ...quantize.training.training_log import TrainingLog, read_log
from ..pipeline.steps import needs

if TYPE_CHECKING:
    from torch import nn

    from ...quantize.training.watch import TrainingRecorder
    from ...validate.advice.training_checks import TrainingCheckup


@dataclass(frozen=True)
class TrainingInspection:
    """A training log, and the checklist's verdicts."""

    log: TrainingLog
    checkup: "TrainingCheckup"


@contextmanager
def watch(
    model: "nn.Module",
    out: Path,
    options: WatchOptions = WatchOptions(),
    modules: "Mapping[str, nn.Module] | None" = None,
    first_step: int = 0,
) -> "Iterator[TrainingRecorder]":
    """Record what the training of `model` would lose in FP8, in `out`/training.jsonl, while this block runs.

        with fp8q.api.watch(model, "logs/run-1") as log:
            for batch in batches:
                loss = model(**batch).loss
                loss.backward()
                log.step(loss)
                optimizer.step()
                optimizer.zero_grad()

    At every `options.every`th step the exact histogram of each linear layer's input, weight and output gradient is
    taken, and of it the amax, the shares that saturate, become zero and are lost in E4M3 and in E5M2, under a scale
    that follows from the records before (Transformer Engine's delayed scaling). `step` is called once after each
    backward pass; several of them before an optimizer's step are one step if `step` is called after the last. Nothing
    of the model changes. `modules`: name -> the layers to watch (None: every linear layer but a transformers model's
    output head). `first_step`: the step that a resumed training begins with; the log's records before it stay.

    `inspect_training` and `fp8q inspect` read the log. Raises InputError for a model without a linear layer, for a log
    that is there already, and at a recorded step in which no layer ran.
    """
    from ...quantize.training.watch import TrainingRecorder

    recorder = TrainingRecorder(model, Path(out), options, modules, first_step)
    try:
        yield recorder
    finally:
        recorder.close()


def inspect_training(path: Path, gradients: GradientFormat = "e5m2") -> TrainingInspection:
    """Read the training log at `path`, a file or its directory, and judge it, with `gradients` in E5M2 or in E4M3.

    Raises InputError where there is no log, or no record in it yet.
    """
    from ...validate.advice.training_checks import training_checkup

    log = read_log(Path(path))
    return TrainingInspection(log, training_checkup(log, gradients))


def report_training(path: Path, gradients: GradientFormat = "e5m2") -> Path:
    """Write `training.html`, the page of the training log at `path`, beside it; return its path.

    Raises InputError where there is no log, BackendError where the extra `report` is not installed.
    """
    from ...validate.report.training_page import write_training_page

    needs("report", ("matplotlib",))
    found = inspect_training(path, gradients)
    return write_training_page(found.log, found.checkup)
