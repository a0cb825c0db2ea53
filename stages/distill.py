"""The stage `distill`: learn the codes of weights from the float model, then write checkpoint and graphs with them."""

import math
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..core.errors import InputError
from ..core.files import remove, write_document
from ..core.run import Run
from ..options import DistillOptions
from ..quantize.scales.decisions import load_scales
from .corpus import digest, load_tokens, opening_of
from .distill_blocks import learn_blocks
from .export import export_or_note
from .measure import beyond
from .other_text import read_other
from .pipeline.stage import Key
from .pipeline.stages import CORPUS, DISTILL, DistillFacts
from .pipeline.steps import Notes, device
from .quantize import identity, quantize, rounding_key, scale_options
from .shared.adapters import note_base_alone
from .shared.model_files import checked_model, export_options
from .shared.opening import command
from .shared.sources import products_of, source_of
from .shared.texts import LearningText, Tokens

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from ..calibrate.model.source import Source
    from ..quantize.learning.document import Distillation

#: One of so many windows is held out, and no more than so many.
HELD_OUT, MOST_HELD_OUT = 10, 64
#: Bytes of a learned weight: the teacher's in FP32; of the student the weight it began with, its spacing, its steps,
#: their gradient and the last direction, all in FP32; the rounded weight in the forward pass, and the inverse factors.
BYTES_A_WEIGHT = 36
#: The float model finds other text than the calibration text this much harder, nats a token, before that is noted.
OTHER_DOMAIN = 1.0
#: Windows of each text on which that is measured.
SAMPLED = 4


@command()
def distill(run: Run, notes: Notes, data: str | None, options: DistillOptions) -> "Distillation":
    """Learn the codes of the weights of `run` from its float model, unless that is done; then write checkpoint and
    graphs with them.
    """
    from ..quantize.learning.document import load_distillation

    run.refuse_stale("measure", "quantize")
    checked_model(run)
    note_base_alone(run, "weights are learned by", notes)
    source, scales, graph = source_of(run), scale_options(run), export_options(run)
    text, start = _text(run, source, data, options, notes), rounding_key(run, source, scales)
    inputs = {**start.inputs, "windows": digest(text.windows), "held out": digest(text.held_out)}
    key = Key(inputs, options, DistillFacts(data=text.name, start=identity(start)))
    products = products_of(source, scales)
    if not DISTILL.is_current(run, key):
        if not options.stream:
            _check_memory(source)
        quantize(run, source, products, scales, notes, learned=False)  # the codes to begin with
        with DISTILL.writing(run, key, notes) as log, DISTILL.working(run, key, notes) as folder:
            _note_one_code(run, notes)
            learned = learn_blocks if options.stream else _learn
            found = learned(run, source, text, options, folder, notes)
            write_document(run.distillation, found)
            log.outputs.append(run.distillation)
            if found.best.step > 0:
                log.outputs.append(run.distilled)
            else:
                remove(run.distilled)
            notes.note(f"distill: {found.conclusion}")
    quantize(run, source, products, scales, notes)
    export_or_note(run, graph, notes)
    return load_distillation(run)


def _check_memory(source: "Source") -> None:
    """Raise InputError for a model that cannot be learned in memory."""
    from ..calibrate.model.memory import weight_bytes

    size = weight_bytes(source) // 2 * BYTES_A_WEIGHT
    if too_much := beyond(size):
        raise InputError(
            f"{source.name}: learning its weights takes {size / 1e9:,.3g} GB, {too_much}; --stream learns layer by "
            "layer"
        )


def _text(run: Run, source: "Source", data: str | None, options: DistillOptions, notes: Notes) -> LearningText:
    """The windows to learn from: of the run's calibration text, or of the text `data`, cut as the run's are.

    Raises InputError for text that the run evaluates on, and for too little to hold anything out.
    """
    from ..calibrate.model.tokenizer import load_tokenizer
    from ..calibrate.text.overlap import measure_overlap
    from ..calibrate.text.packing import Packing

    windows, name = load_tokens(run, run.calibration), run.facts(CORPUS).data
    if data is not None:
        tokenizer, packing = load_tokenizer(source), Packing(windows.shape[1], tuple(opening_of(run).prefix))
        text = read_other(run, data, tokenizer, source.text_config.vocab_size, notes)
        evaluated = tokenizer.decode(load_tokens(run, run.evaluation))
        found = measure_overlap(text.documents.texts, [str(evaluated)], windows.shape[1])
        if found.too_much and not options.allow_overlap:
            raise InputError(
                f"--data {data}: {found.shown} of the text that {run.root} is evaluated on is in it, or the other way "
                "round; learn from other text, or give --allow-overlap"
            )
        windows, name = packing.windows(text.ids, packing.starts(text.ids)), text.name
    if options.samples is not None and options.samples < len(windows):
        chosen = np.linspace(0, len(windows) - 1, options.samples).round().astype(np.int64)
        windows = windows[chosen]
    if len(windows) < HELD_OUT:
        raise InputError(
            f"{name}: fills {len(windows)} windows of {windows.shape[1]} tokens, of which none can be held out; give "
            f"text for {HELD_OUT} windows or more with --data"
        )
    every = max(HELD_OUT, math.ceil(len(windows) / MOST_HELD_OUT))
    held_out = np.arange(len(windows)) % every == every - 1
    return LearningText(name, windows[~held_out], windows[held_out])


def _learn(
    run: Run, source: "Source", text: LearningText, options: DistillOptions, folder: Path, notes: Notes
) -> "Distillation":
    """Learn the weights of the run's checkpoint, and write the codes of the best moment to `distilled.safetensors`."""
    import torch

    from ..calibrate.input.silence import quiet_transformers
    from ..calibrate.model.source import load_model
    from ..quantize.learning.codes import save_codes
    from ..quantize.learning.document import Distillation
    from ..quantize.learning.linear import student_of
    from ..quantize.learning.training import LossIsNotFiniteError, Schedule, learn, planned_steps
    from ..quantize.reference.fp8_model import open_codes

    begun, scales, where = time.monotonic(), load_scales(run), device()
    teacher, other = (load_model(source, torch.float32, where).requires_grad_(False) for _ in range(2))
    stored = open_codes(run.model, "exact", torch.float32, where)
    student, layers = student_of(other, stored, scales.activations)
    schedule = Schedule(options.epochs, options.batch_size, options.learning_rate, options.seed)
    steps, stopped = planned_steps(len(text.windows), schedule), None
    _tell(run, teacher, text, schedule.epochs, notes)
    with notes.track("Learning weights", steps, "steps") as advance, quiet_transformers():
        try:
            moments = learn(
                (teacher, student), (text.windows, text.held_out), schedule, folder, advance, partial(_blamed, student)
            )
        except LossIsNotFiniteError as error:
            moments, stopped = error.moments, str(error)
            notes.note(f"distill: {stopped}; the weights of the best moment before it stay")
    save_codes(run.distilled, layers)
    changed = sum(layer.changed() * layer.steps.numel() for layer in layers.values())
    total = sum(layer.steps.numel() for layer in layers.values())
    return Distillation(
        data=text.name,
        tokens=text.windows.size,
        held_out=text.held_out.size,
        steps=steps,
        seconds=round(time.monotonic() - begun, 1),
        moments=moments,
        changed=changed / total,
        stopped=stopped,
    )


def _note_one_code(run: Run, notes: Notes) -> None:
    """Note that little is gained where activations have one code."""
    if any(scale.terms == 1 for scale in load_scales(run).activations.values()):
        notes.note(
            "distill: activations with one code lose what weights cannot learn away, since the rounding of an input is "
            "noise to them; little is gained unless they have two (--activation-terms tail, or 2)"
        )


def _tell(run: Run, teacher: "PreTrainedModel", text: LearningText, epochs: float, notes: Notes) -> None:
    """Note what learning takes, by a timed forward pass of the float model, and text that is of another domain."""
    import torch

    def loss(windows: Tokens) -> float:
        ids = torch.from_numpy(windows).to(teacher.device)
        with torch.inference_mode():
            return float(teacher(input_ids=ids, labels=ids, use_cache=False).loss)

    begun = time.perf_counter()
    theirs = loss(text.windows[:SAMPLED])
    forward = (time.perf_counter() - begun) / min(SAMPLED, len(text.windows))
    # the teacher's pass, and the student's with a backward pass of twice its work
    seconds = 4 * forward * len(text.windows) * epochs
    notes.note(
        f"distill: {text.windows.size:,} tokens of {text.name}, {epochs:g} passes, {text.held_out.size:,} held "
        f"out; some {seconds:,.0f} s here"
    )
    own = loss(load_tokens(run, run.calibration)[:SAMPLED])
    if theirs > own + OTHER_DOMAIN:
        notes.note(
            f"--data {text.name}: is harder for the float model than the calibration text, {theirs:.2f} against "
            f"{own:.2f} nats a token: it may be of another domain than the model is for"
        )


def _blamed(student: "PreTrainedModel", ids: "torch.Tensor") -> str:
    """Name the first module of `student` whose output is not finite on `ids`, as the end of a sentence."""
    from ..validate.accuracy.nonfinite import culprit

    first = culprit(student, lambda: student(input_ids=ids, use_cache=False), ids.shape[1])
    return f", first by the output of {first.module}" if first else ""
