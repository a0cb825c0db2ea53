"""The stage `distill`: learn the codes of weights from the float model, then write checkpoint and graphs with them.

Several processes that torchrun started learn together; the first alone reads the text, hands the task to the others,
and writes the run.

With `--stream` it learns decoder layer by decoder layer, and compares the whole model before and after.
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from ..calibrate.input.silence import quiet_transformers
from ..calibrate.model.decoder import NoChainError
from ..calibrate.model.memory import weight_bytes
from ..calibrate.model.source import Source, load_model
from ..calibrate.model.tokenizer import load_tokenizer
from ..calibrate.ranks.world import World, joined_ranks
from ..calibrate.text.evaluation import sha256_of
from ..calibrate.text.overlap import measure_overlap
from ..calibrate.text.packing import Packing
from ..core.columns import duration
from ..core.commands import name_in_commands
from ..core.errors import InputError
from ..core.files import remove, write_document
from ..core.memory import return_freed_blocks
from ..core.run import Run
from ..options import BLOCK, DistillOptions
from ..options.distill import LearnedScales, LearningOptions, WeightLearningOptions
from ..quantize.learning.block_training import BlockSchedule
from ..quantize.learning.blocks import BlockLearning, BlockText
from ..quantize.learning.document import BlockLoss, Distillation, Moment, load_distillation
from ..quantize.learning.linear import LearnedLinear, gathered_codes, save_codes, student_of
from ..quantize.learning.progress import StepPace
from ..quantize.learning.sharded_model import shard_model
from ..quantize.learning.training import Listener, LossIsNotFiniteError, Schedule, learn, planned_steps
from ..quantize.reference.fp8_model import open_codes
from ..quantize.scales.decisions import load_scales
from ..quantize.weights.code_sources import LearnedCodes
from ..validate.accuracy.nonfinite import culprit
from .corpus import load_tokens, opening_of
from .distill_ranks import check_no_experts, check_ranks, receive_task, send_nothing, send_task
from .export import export_or_note
from .measure import beyond
from .other_text import read_other
from .pipeline.stage import Key, Notes, device
from .pipeline.stages import CORPUS, DISTILL, DistillFacts
from .quantize import KnownCodes, identity, quantize, rounding_key, scale_options
from .shared.adapters import note_base_alone
from .shared.model_files import checked_model, export_options
from .shared.sources import gemms_of, source_of
from .shared.texts import LearningText, Tokens


def learn_blocks(
    run: Run, source: Source, text: LearningText, options: DistillOptions, folder: Path, notes: Notes
) -> Distillation:
    """Learn the layers of the run's checkpoint one after the other, and write their codes to `distilled.safetensors`.

    `folder` holds the hidden states and the layers that have learned, with which a killed call goes on.

    Raises InputError for a model that is no chain of layers.
    """
    begun = time.monotonic()
    seed = options.seed
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
    learning.done.save_codes(run.distilled, learning.outside_codes())
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
    stopped = next((loss for loss in losses if loss.stopped is not None), None)
    if stopped is None:
        return None
    return f"the loss of layer {stopped.layer} is not finite at step {stopped.stopped} of {steps}"


#: Bytes of a learned weight: in FP32 the teacher's, the student's, its gradient, Adam's two means and the weight that
#: the forward pass rounds to; a byte each for its first code and its range.
BYTES_A_WEIGHT = 26
#: Bytes that ranks share with --shard, the first five of these; of the others the first code alone is kept then.
SHARED_BYTES = 20
UNSHARED_BYTES = 1
#: Tensors of the size of a step's logits, in FP32: the teacher's, the student's, and a gradient.
LOGITS = 3
#: Bytes while the student is loaded: the teacher's are shared by then, the student's weight and first code are not yet.
TEACHER_BYTES = 4
LOADED_BYTES = 5


def bytes_a_weight(options: DistillOptions, world: World) -> float:
    """Return the bytes a weight that learning takes on each rank of `world`."""
    if not options.shard:
        return BYTES_A_WEIGHT
    return max(SHARED_BYTES / world.size + UNSHARED_BYTES, TEACHER_BYTES / world.size + LOADED_BYTES)


#: One of so many windows is held out, and no more than so many.
HELD_OUT = 10
MOST_HELD_OUT = 64
#: The float model finds other text than the calibration text this much harder, nats a token, before that is noted.
OTHER_DOMAIN = 1.0
#: Windows of each text on which that is measured.
SAMPLED = 4
#: What a message says of learning in less memory.
LESS_MEMORY = "--stream learns weights layer by layer, and --shard shares them between the ranks of torchrun"


LearnedBy = TypeVar("LearnedBy", bound=LearningOptions)


@dataclass(frozen=True)
class Learning(Generic[LearnedBy]):
    """A run that learns: its float model, the text, the options, and what is `learned`, in words."""

    run: Run
    source: Source
    text: LearningText
    options: LearnedBy
    learned: str = "weights"


def distill(run: Run, notes: Notes, data: str | None, options: DistillOptions) -> Distillation:
    """Learn the codes of the weights of `run` from its float model, unless that is done; then write checkpoint and
    graphs with them.
    """
    with joined_ranks() as world:
        if world.rank:
            _take_part(run, world)
        else:
            source = _learn_unless_done(run, notes, data, options, world)
    if world.rank == 0:
        scales = scale_options(run)
        quantize(run, source, gemms_of(source, scales), scales, notes)
        export_or_note(run, export_options(run), notes)
    return load_distillation(run)


def _learn_unless_done(run: Run, notes: Notes, data: str | None, options: DistillOptions, world: World) -> Source:
    """Check everything, and learn, as rank 0 of those that learn together; return the float model's checkpoint."""
    check_ranks(options, world)
    run.refuse_stale("measure", "quantize")
    checked_model(run)
    note_base_alone(run, "weights are learned by", notes)
    check_no_blocks(run)
    check_no_vision(run)
    source = source_of(run)
    scales = scale_options(run)
    if options.scales == "learned" and scales.weight_scale == "tensor":
        raise InputError(
            "--scales learned",
            "lets each output channel have its own scale, and the run has one for each weight",
            "leave it out, or choose `fp8q scales --weight-scale channel` before",
        )
    text = learning_text(run, source, data, options, notes)
    start = rounding_key(run, source, scales)
    inputs = {**start.inputs, "windows": sha256_of(text.windows), "held out": sha256_of(text.held_out)}
    key = Key(inputs, options, DistillFacts(data=text.name, start=identity(start)))
    if DISTILL.is_current(run, key):
        send_nothing(world)
        return source
    if options.end_to_end or not options.stream:
        if options.shard:
            check_no_experts(source)
        other = "leave --end-to-end out" if options.stream else LESS_MEMORY
        learning = Learning(run, source, text, options, "its weights")
        check_memory(learning, bytes_a_weight(options, world), world.size, world.process.local_ranks, other)
    quantize(run, source, gemms_of(source, scales), scales, notes, KnownCodes(learned=False))  # to begin with
    with DISTILL.writing(run, key, notes) as log, DISTILL.working(run, key, notes) as folder:
        log.machine = world.machine()
        _note_one_code(run, notes)
        distillation: Distillation | None = None
        if options.stream:
            distillation = learn_blocks(run, source, text, options, folder, notes)
        if distillation is None or options.end_to_end:
            send_task(run, options, folder, (text.windows, text.held_out), world)
            end_to_end = _learn(Learning(run, source, text, options), folder, notes, world, distillation)
            distillation = end_to_end if distillation is None else distillation.followed_by(end_to_end)
        write_document(run.distillation, distillation)
        log.outputs.append(run.distillation)
        if distillation.best.step > 0:
            log.outputs.append(run.distilled)
        else:
            remove(run.distilled)
        notes.note(f"distill: {distillation.conclusion}")
    return source


def _take_part(run: Run, world: World) -> None:
    """Learn, as a rank above 0, from the share of the windows that the Trainer assigns; write nothing to the run."""
    if (received := receive_task(run, world)) is None:
        return
    task, windows = received
    schedule = Schedule(task.epochs, task.batch_size, task.learning_rate, task.seed, gradients=task.gradients)
    teacher, student, layers = _models(run, source_of(run), task.scales, world if task.shard else None)
    with quiet_transformers(), suppress(LossIsNotFiniteError):  # rank 0 tells of it
        listener = Listener(lambda steps: None, partial(_blamed, student))
        learn((teacher, student), windows, schedule, run.root / task.folder, listener, world)
    if task.shard:
        gathered_codes(layers)  # rank 0 has a part of them only, and writes all


def check_memory(
    what: Learning[LearnedBy], bytes_a_weight: float, ranks: int = 1, ranks_here: int = 1, other: str = LESS_MEMORY
) -> None:
    """Raise InputError, naming `other` ways, where there is no memory to learn; each of `ranks_here` on a machine needs
    its own, and `ranks` in all share the windows of a step.
    """
    source, options = what.source, what.options
    weights = round(weight_bytes(source) // 2 * bytes_a_weight)
    windows = options.batch_size // ranks
    values = windows * what.text.windows.shape[1] * source.text_config.vocab_size
    size = weights + 4 * LOGITS * values
    if not (too_much := beyond(size, ranks_here)):
        return
    of_logits = ""
    if windows > 1 and not beyond(weights + 4 * LOGITS * values // windows, ranks_here):
        of_logits = f", {4 * LOGITS * values / 1e9:,.3g} GB of it for the logits of a step"
        other = f"--batch-size {ranks} takes fewer windows a step"
    raise InputError(source.name, f"learning {what.learned} takes {size / 1e9:,.3g} GB{of_logits}, {too_much}", other)


def learning_text(run: Run, source: Source, data: str | None, options: LearningOptions, notes: Notes) -> LearningText:
    """The windows to learn from: of the run's calibration text, or of the text `data`, cut as the run's are.

    Raises InputError for text that the run evaluates on, and for too little to hold anything out.
    """
    windows = load_tokens(run, run.calibration)
    name = run.facts(CORPUS).data
    if data is not None:
        tokenizer = load_tokenizer(source)
        packing = Packing(windows.shape[1], tuple(opening_of(run).prefix))
        text = read_other(run, data, tokenizer, source.text_config.vocab_size, notes)
        evaluated = tokenizer.decode(load_tokens(run, run.evaluation))
        overlap = measure_overlap(text.documents.texts, [str(evaluated)], windows.shape[1])
        if overlap.too_much and not options.allow_overlap:
            raise InputError(
                f"--data {data}",
                f"{overlap.shown} of the text that {run.root} is evaluated on is in it, or the other way round",
                "learn from other text, or give --allow-overlap",
            )
        windows = packing.windows(text.ids, packing.starts(text.ids))
        name = text.name
    if options.samples is not None and options.samples < len(windows):
        chosen = np.linspace(0, len(windows) - 1, options.samples).round().astype(np.int64)
        windows = windows[chosen]
    if len(windows) < HELD_OUT:
        raise InputError(
            name,
            f"fills {len(windows)} windows of {windows.shape[1]} tokens, of which none can be held out",
            f"give text for {HELD_OUT} windows or more with --data",
        )
    every = max(HELD_OUT, math.ceil(len(windows) / MOST_HELD_OUT))
    held_out = np.arange(len(windows)) % every == every - 1
    return LearningText(name, windows[~held_out], windows[held_out])


def _learn(
    what: Learning[DistillOptions], folder: Path, notes: Notes, world: World, before: Distillation | None = None
) -> Distillation:
    """Learn the weights of the run's checkpoint, and write the codes of the best moment to `distilled.safetensors`.

    `before`: the outcome of layers that learned one by one; the model begins with their codes, where these are better.
    """
    begun = time.monotonic()
    options = what.options
    text = what.text
    schedule = Schedule(
        options.epochs, options.batch_size, options.learning_rate, options.seed, gradients=options.gradients
    )
    teacher, student, layers = _models(
        what.run,
        what.source,
        options.scales,
        world if options.shard else None,
        lambda model: note_domain(what, model, notes),
    )
    rounded = {name: layer.start.cpu() for name, layer in layers.items()}
    if before is not None and before.best.step > 0:
        learned = LearnedCodes(what.run.distilled)
        for name, layer in layers.items():
            layer.settle(*learned[name])
    moments, stopped = train(what, (teacher, student), schedule, folder, notes, world)
    if options.watch:
        notes.note(f"distill: `fp8q inspect {what.run.training}` shows what the training would lose in FP8")
    codes = gathered_codes(layers)
    save_codes(what.run.distilled, codes)
    changed = sum(int((codes[name][0].float() != start.float()).sum()) for name, start in rounded.items())
    return Distillation(
        data=text.name,
        tokens=text.windows.size,
        held_out=text.held_out.size,
        steps=planned_steps(len(text.windows), schedule),
        seconds=round(time.monotonic() - begun, 1),
        moments=moments,
        changed=changed / sum(start.numel() for start in rounded.values()),
        stopped=stopped,
    )


def _models(
    run: Run,
    source: Source,
    scales: LearnedScales,
    sharing: World | None,
    judge: Callable[[PreTrainedModel], None] = lambda model: None,
) -> tuple[PreTrainedModel, PreTrainedModel, dict[str, LearnedLinear]]:
    """Load the float model of `run` and its FP8 model, with the layers of the latter that learn, and whose `scales` may
    too, by name.

    `sharing`: the ranks that have a part of both each; None: they are whole. `judge` gets the float model while it is.
    """
    if sharing is not None:
        return_freed_blocks()
    teacher = load_model(source, torch.float32, device()).requires_grad_(False)
    judge(teacher)
    if sharing is not None:
        shard_model(teacher, sharing)
    other = load_model(source, torch.float32, device())
    stored = open_codes(run.model, "exact", torch.float32, device())
    kind = partial(LearnedLinear, learn_scale=scales == "learned")
    student, layers = student_of(other, stored, load_scales(run).activations, kind)
    if sharing is not None:
        shard_model(student, sharing)
    return teacher, student, layers


def train(
    what: Learning[LearnedBy],
    models: tuple[PreTrainedModel, PreTrainedModel],
    schedule: Schedule,
    folder: Path,
    notes: Notes,
    world: World | None = None,
) -> tuple[list[Moment], str | None]:
    """Train the second of `models` toward the first.

    Returns the held-out divergences, and why it ended early: the loss was not finite (None: it did not).
    """
    windows = (what.text.windows, what.text.held_out)
    steps = planned_steps(len(what.text.windows), schedule)
    scored: list[Moment] = []

    def standing() -> str:
        if scored:
            return f"held-out KL {scored[-1].kl:.3e} nats"
        return ""

    with notes.track(f"Learning {what.learned}", steps, "steps", standing) as advance, quiet_transformers():
        listener = Listener(
            advance,
            partial(_blamed, models[1]),
            lambda pace: notes.note(_cost(what, pace)),
            lambda rate: notes.note(f"distill: the held-out KL rose; learning begins anew at a rate of {rate:.2g}"),
            scored.append,
            _log_of(what),
        )
        try:
            return learn(models, windows, schedule, folder, listener, world), None
        except LossIsNotFiniteError as error:
            if not error.moments:
                raise InputError("distill", f"{error}: the model is broken before anything is learned") from error
            notes.note(f"distill: {error}; the weights of the best moment before it stay")
            return error.moments, str(error)


def check_no_blocks(run: Run) -> None:
    """Raise InputError for a run with GEMMs in block form."""
    if load_scales(run).in_form(BLOCK):
        raise InputError(
            run.root,
            "has GEMMs in block form, of which nothing is learned",
            f"`fp8q scales {name_in_commands(run.root)} --form dynamic` gives each output channel a scale",
        )


def check_no_vision(run: Run) -> None:
    """Raise InputError for a run with modules in FP8 that text does not reach."""
    if load_scales(run).vision:
        raise InputError(
            run.root,
            "has modules in FP8 by --vision, and what is learned from text would leave them rounded to nearest",
            f"`fp8q scales {name_in_commands(run.root)} --vision ''` keeps them in BF16",
        )


def _note_one_code(run: Run, notes: Notes) -> None:
    """Note that little is gained where activations have one code."""
    if any(form.terms == 1 for form in load_scales(run).forms.values()):
        notes.note(
            "distill: activations with one code lose what weights cannot learn away, since the rounding of an input is "
            "noise to them; little is gained unless they have two (--activation-terms tail, or 2)"
        )


def _log_of(what: Learning[LearnedBy]) -> tuple[Path, int] | None:
    """Return the directory of the training's log and the steps from one record to the next; None without --watch."""
    options = what.options
    if not isinstance(options, WeightLearningOptions) or options.watch is None:
        return None
    return what.run.training, options.watch


def note_domain(what: Learning[LearnedBy], teacher: PreTrainedModel, notes: Notes) -> None:
    """Note text that is of another domain than the calibration text, by the float model's own loss."""

    def loss(windows: Tokens) -> float:
        losses = []
        for ids in torch.from_numpy(windows).to(teacher.device).split(1):  # the logits of one window at a time
            with torch.inference_mode():
                losses.append(float(teacher(input_ids=ids, labels=ids, use_cache=False).loss))
        return sum(losses) / len(losses)

    theirs = loss(what.text.windows[:SAMPLED])
    calibration_loss = loss(load_tokens(what.run, what.run.calibration)[:SAMPLED])
    if theirs > calibration_loss + OTHER_DOMAIN:
        notes.note(
            f"--data {what.text.name}: is harder for the float model than the calibration text, {theirs:.2f} against "
            f"{calibration_loss:.2f} nats a token: it may be of another domain than the model is for"
        )


def _cost(what: Learning[LearnedBy], pace: StepPace) -> str:
    """Tell what learning takes: tokens, passes, and the time by the `pace` of a real step."""
    text = what.text
    epochs = what.options.epochs
    return (
        f"distill: {text.windows.size:,} tokens of {text.name}, {epochs:g} {'pass' if epochs == 1 else 'passes'}, "
        f"{text.held_out.size:,} held out: a step takes {duration(pace.step_seconds)}, an evaluation "
        f"{duration(pace.evaluation_seconds)}; about {duration(pace.seconds_left)} left"
    )


def _blamed(student: PreTrainedModel, ids: torch.Tensor) -> str:
    """Name the first module of `student` whose output is not finite on `ids`, as the end of a sentence."""
    first = culprit(student, lambda: student(input_ids=ids, use_cache=False), ids.shape[1])
    if first:
        return f", first by the output of {first.module}"
    return ""
