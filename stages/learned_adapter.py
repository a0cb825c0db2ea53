"""The stage `adapter`: learn a LoRA adapter on the frozen checkpoint, toward the float model.

The checkpoint is read and not written: an adapter corrects it, and whoever leaves it out has the model as it was.
"""

import time
from pathlib import Path

import torch

from ..calibrate.model.source import load_model
from ..calibrate.text.evaluation import sha256_of
from ..core.errors import InputError
from ..core.files import remove, write_document
from ..core.run import Run
from ..options import AdapterLearningOptions
from ..quantize.learning.adapter import FrozenLinear, adam, adaptable, add_adapter, save_adapter
from ..quantize.learning.document import AdapterLearning, load_adapter_learning
from ..quantize.learning.linear import student_of
from ..quantize.learning.training import Schedule, planned_steps
from ..quantize.reading.run_checkpoint import LEARNED
from ..quantize.reference.fp8_model import open_codes
from ..quantize.scales.decisions import load_scales
from .distill import Learning, check_memory, check_no_blocks, learning_text, note_domain, train
from .pipeline.stage import Key, Notes, device
from .pipeline.stages import ADAPTER, AdapterFacts
from .shared.adapters import adapters_of, note_base_alone
from .shared.model_files import checked_model
from .shared.sources import source_of

#: Bytes of a weight: the teacher's and the student's in FP32, and while it is loaded another float model's.
BYTES_A_WEIGHT = 12


def learn_adapter(run: Run, notes: Notes, data: str | None, options: AdapterLearningOptions) -> AdapterLearning:
    """Learn an adapter on the checkpoint of `run` from its float model, unless that is done, and write `adapter/`.

    Where the held-out divergence does not fall, no adapter is written.
    """
    run.refuse_stale("measure", "quantize")
    checkpoint = checked_model(run)
    check_no_blocks(run)
    if LEARNED in adapters_of(run):
        raise InputError(
            "--train adapter",
            f"an adapter beside the model in {run.root} is called {LEARNED}, as the learned one would be",
            "rename its directory, and calibrate again",
        )
    note_base_alone(run, "an adapter is learned on", notes)
    source = source_of(run)
    text = learning_text(run, source, data, options, notes)
    inputs = {**checkpoint, "windows": sha256_of(text.windows), "held out": sha256_of(text.held_out)}
    key = Key(inputs, options, AdapterFacts(data=text.name))
    if not ADAPTER.is_current(run, key):
        what = Learning(run, source, text, options, "an adapter")
        check_memory(what, BYTES_A_WEIGHT)
        with ADAPTER.writing(run, key, notes) as log, ADAPTER.working(run, key, notes) as folder:
            remove(run.adapter)
            learning, log.outputs = _learn(what, folder, notes)
            write_document(run.adapter_learning, learning)
            log.outputs.append(run.adapter_learning)
            notes.note(f"distill: {learning.conclusion}")
    return load_adapter_learning(run)


def _learn(what: Learning[AdapterLearningOptions], folder: Path, notes: Notes) -> tuple[AdapterLearning, list[Path]]:
    """Learn the adapter, and write that of the best moment; returns the outcome and the files, none where nothing got
    better.
    """
    begun = time.monotonic()
    where = device()
    run = what.run
    options = what.options
    text = what.text
    teacher, other = (load_model(what.source, torch.float32, where).requires_grad_(False) for _ in range(2))
    stored = open_codes(run.model, "exact", torch.float32, where)
    student, layers = student_of(other, stored, load_scales(run).of_text.activations, FrozenLinear)
    modules = adaptable(student, list(layers))
    if not modules:
        raise InputError(
            run.model, "has no FP8 layer beside which an adapter has a place, since all are layers of experts"
        )
    config = add_adapter(student, modules, options.rank, options.alpha, options.seed)
    schedule = Schedule(options.epochs, options.batch_size, options.adapter_rate, options.seed, adam)
    note_domain(what, teacher, notes)
    moments, stopped = train(what, (teacher, student), schedule, folder, notes)
    learning = AdapterLearning(
        data=text.name,
        tokens=text.windows.size,
        held_out=text.held_out.size,
        steps=planned_steps(len(text.windows), schedule),
        seconds=round(time.monotonic() - begun, 1),
        moments=moments,
        modules=len(modules),
        parameters=sum(parameter.numel() for parameter in student.parameters() if parameter.requires_grad),
        stopped=stopped,
    )
    return learning, save_adapter(run.adapter, student, config, what.source.title) if learning.best.step > 0 else []
