"""The stage `measure`: run the float model on the calibration windows, in memory or streamed, in one process or several
ranks.

`measure_text` runs it on other text.

The stage `queries` measures the queries of attention, which only attention in FP8 needs, here or in vLLM. It runs once,
when an export or the scales first need it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from ..calibrate.measure.measurement import Measurement, measure_in_memory
from ..calibrate.measure.moments import SecondMoments, SpentMoments, gathering, store_alone
from ..calibrate.measure.observe import probe_groups
from ..calibrate.measure.queries import query_statistics
from ..calibrate.measure.statistics import Corpus, ModelIdentity, Statistics, load_record, save_arrays, save_statistics
from ..calibrate.measure.stream import measure_streamed
from ..calibrate.model.gemms import observed_gemms, output_channel_axis
from ..calibrate.model.memory import SHARE, available_bytes, weight_bytes
from ..calibrate.model.source import Source, combined_digest, load_model, meta_model
from ..calibrate.model.tokenizer import load_tokenizer
from ..calibrate.ranks.handed_moments import HandedMoments
from ..calibrate.ranks.world import World
from ..calibrate.text import corpus
from ..calibrate.text.evaluation import sha256_of
from ..calibrate.text.image_rows import ImageRow, digest
from ..calibrate.text.packing import Packing
from ..core.errors import InputError
from ..core.files import Strict, disk_errors, sha256_file
from ..core.output_folder import WorkFolder
from ..core.reporter import Reporter
from ..core.run import Run
from ..core.undo import scratch
from ..options import CalibrateOptions, MeasureOptions
from ..options.declare import Options
from ..quantize.scales.clip import no_scale
from ..quantize.scales.policy import ModelGemms
from .corpus import load_tokens
from .image_inputs import row_inputs
from .other_text import read_other
from .pipeline.stage import NO_FACTS, Key, Notes, arithmetic, device
from .pipeline.stages import CORPUS, MEASURE, QUERIES, CorpusFacts, MeasureFacts
from .shared.adapters import fingerprints
from .shared.run_images import load_image_rows
from .shared.sources import source_of
from .shared.texts import Tokens


class MeasureTask(Strict):
    """The measurement that rank 0 tells the others to make: their shares of `batches`.

    `moments`: second moments are gathered, to which ranks add in turn. `key`: the inputs and options that the result
    depends on.
    """

    model: ModelIdentity
    corpus: Corpus
    batches: list[int]
    stream: bool
    all_experts: bool
    moments: bool
    key: dict[str, str]


def check_batches(options: CalibrateOptions, windows: int, world: World) -> None:
    """Raise InputError when `options.batches` do not exist, when a rank would have none, and when they fill no interval
    of `delayed`.

    So also for rounding that cannot be measured in parts.
    """
    batches = -(-windows // options.batch_size)
    first, end = options.batches or (0, batches)
    if end > batches:
        raise InputError(
            f"--batches {first}:{end}",
            f"{windows:,} windows make {batches} batches of {options.batch_size}",
            f"end at {batches}, or ask for more --samples",
        )
    if end - first < world.size:
        raise InputError(
            f"{world.size} ranks and {end - first} {'batches' if end - first > 1 else 'batch'}",
            f"{world.size - (end - first)} of the ranks would have nothing to measure",
            f"start at most {end - first}, or ask for more --samples or a smaller --batch-size than "
            f"{options.batch_size}",
        )
    if options.weight_rounding == "sequential" and options.batches:
        raise InputError(
            "--weight-rounding sequential",
            "runs all batches through one layer after the other, and --batches measures some of them",
            "use `fp8q calibrate` without --batches, or leave it out",
        )
    if options.needs_moments and world.size > 1 and options.stream is False:
        raise InputError(
            "--no-stream",
            f"{world.size} ranks hand second moments on after each decoder layer",
            "leave it out, or start one process",
        )
    if options.clip.method == "delayed" and options.clip.interval > batches and not options.batches:
        raise no_scale(options.clip, batches)


def check_images(options: CalibrateOptions, world: World, rows: bool) -> None:
    """Raise InputError where there are `rows` with images and several processes or parts to measure them in, and where
    there are none for `--vision`.
    """
    if not rows:
        if options.vision:
            raise InputError(
                f"--vision {options.vision[0]}",
                "takes the inputs of rows with images, and --data has none",
                "give chats with images too, with --chat-template, or leave it out",
            )
        return
    if world.size > 1 or options.batches:
        how = f"{world.size} ranks" if world.size > 1 else "--batches"
        raise InputError(how, "rows with images are measured by one process, in one run", "leave the rows out")


def check_sequential_ranks(gemms: ModelGemms, options: CalibrateOptions, world: World) -> None:
    """Raise InputError where several ranks would round a model with experts layer by layer."""
    if options.weight_rounding == "sequential" and world.size > 1 and gemms.routers:
        raise InputError(
            "--weight-rounding sequential",
            f"the float model and the quantized one route tokens to other experts, and {world.size} ranks would add "
            "them in another order than one process",
            "start one process, or use --weight-rounding gptq",
        )


def check_experts(source: Source, gemms: ModelGemms, options: MeasureOptions) -> None:
    """Raise InputError for --all-experts of a model without experts."""
    if options.all_experts and not gemms.routers:
        raise InputError("--all-experts", f"{source.name} ({source.architecture}) has no experts", "leave it out")


class Spending(Protocol):
    """The work that takes the second moments of a step of a streamed model in the place of files."""

    @property
    def key(self) -> str:
        """A digest of everything that its results depend on, besides the measurement."""

    def spend(self, moments: Path, names: Sequence[str], statistics: Statistics) -> None:
        """Take those in the folder `moments`, of the tensors `names` of a step with these `statistics`."""


def measure_key(
    run: Run, source: Source, options: MeasureOptions, moments: bool = False
) -> Key[MeasureOptions, MeasureFacts]:
    """The key of a measurement; `moments`: second moments are stored."""
    inputs = {"model": source.fingerprint, "calibration.npz": sha256_file(run.require(run.calibration, "corpus"))}
    if load_image_rows(run):
        inputs[run.images.name] = sha256_file(run.images)
    facts = MeasureFacts(moments=moments, prefix=run.facts(CORPUS).prefix, adapters=fingerprints(source))
    return Key(inputs, options, facts)


#: The outputs and inputs of a GEMM.
Shape = tuple[int, int]


def observed_shapes(model: PreTrainedModel) -> tuple[dict[str, Shape], list[str]]:
    """Module -> [out, in] of each weight of `model` that is measured, and the first module of each input."""
    gemms = observed_gemms(model)
    shapes: dict[str, Shape] = {}
    for name, module in gemms.items():
        outputs, inputs = module.get_parameter("weight").movedim(output_channel_axis(module), 0).shape
        shapes[name] = (outputs, inputs)
    return shapes, [*probe_groups(model, gemms)]


def moments_bytes(source: Source) -> int:
    """The bytes of the second moments of all inputs."""
    shapes, inputs = observed_shapes(meta_model(source))
    return sum(4 * shapes[name][1] ** 2 for name in inputs)


def measure(
    run: Run,
    source: Source,
    options: MeasureOptions,
    notes: Notes,
    world: World | None = None,
    moments: bool | Spending = False,
) -> None:
    """Run the float model on the calibration windows, and write `statistics.*`.

    The statistics are the same streamed or not, by one rank or many. This runs in the first rank of `world`; the others
    call `take_part`. `moments`: gather second moments for GPTQ, or spend them layer by layer, which measures also what
    is measured, in one process and streamed.
    """
    world = world or World()
    images = load_image_rows(run)
    texts = run.facts(CORPUS)
    spending = None if isinstance(moments, bool) else moments
    stored = moments is True
    if source.adapters:
        notes.note(
            f"--adapter-mode beside: measures {len(source.variants)} times, the base alone and with "
            f"{', '.join(adapter.name for adapter in source.adapters)} on, for scales that serve all of them"
        )
    key = measure_key(run, source, options, stored)
    with_moments = replace(key, facts=key.facts.model_copy(update={"moments": True}))
    if spending is None and MEASURE.is_current(run, key, with_moments):
        world.gathered({})  # the other ranks have nothing to do
        return
    windows = load_tokens(run, run.calibration, source.text_config.vocab_size)
    rows = images.calibration if images else []
    in_turn = bool(moments) and world.size > 1
    stream = in_turn or spending is not None or streamed(source, options.stream, notes, world.process.local_ranks)
    gathered_as = spending.key if spending else str(stored)
    inputs = {**key.inputs, "moments": gathered_as, "all_experts": str(options.all_experts)}
    inputs |= {f"adapter {adapter.name}": adapter.fingerprint for adapter in source.adapters}
    inputs |= {f"vision {pattern}": "observed" for pattern in options.vision}
    task = task_of(source, windows, rows, texts, options, inputs)
    task = task.model_copy(update={"stream": stream, "moments": bool(moments)})
    if world.size > 1:
        notes.note(world.described())
    with MEASURE.writing(run, key, notes) as log:
        log.machine = world.machine()
        work = WorkFolder(run.root, MEASURE.name)
        with (
            work.opened(work_key(task, world), notes.note) as folder,
            gathering(run, stored, folder / "moments", partial(store_of, world)) as gathered,
        ):
            announce(task, windows, world)
            store = SpentMoments(folder / "moments", spending.spend) if spending else gathered
            share = measured_share(task, windows, world, store)
            if rows:
                share = replace(share, images=row_inputs(source, rows), vision=options.vision)
            statistics = world.added(run_model(source, share, notes, folder, stream))
        log.outputs += [*save_statistics(run, statistics), *sorted(run.moments.glob("*.npy"))]


def take_part(run: Run, source: Source, world: World, notes: Notes) -> None:
    """Measure, on a rank above 0, the share that rank 0 assigns.

    It writes nothing but the folder that a killed rank continues from.
    """
    sent = world.gathered({})[0]
    if not sent:
        return
    task = MeasureTask.model_validate(sent)
    windows = world.sent(None)
    work = WorkFolder(run.root, MEASURE.name, world.rank)
    with disk_errors(run.root), work.opened(work_key(task, world)) as folder:
        moments = store_of(world, folder / "moments") if task.moments else None
        world.added(run_model(source, measured_share(task, windows, world, moments), notes, folder, task.stream))


def store_of(world: World, folder: Path) -> SecondMoments:
    """The store of second moments in `folder`: of one process, or of one of the ranks of `world`, which all make it."""
    if world.size == 1:
        return store_alone(folder)
    return HandedMoments(world, folder)


def task_of(
    source: Source,
    windows: Tokens,
    rows: Sequence[ImageRow],
    texts: CorpusFacts,
    options: MeasureOptions,
    key: dict[str, str],
) -> MeasureTask:
    """The measurement of `windows` int64 [windows, seq_len], cut from `texts`, and of `rows` with images, by `options`,
    in memory, without second moments.
    """
    identity = ModelIdentity(
        name=source.title,
        revision=source.revision,
        architecture=source.architecture,
        fingerprint=source.fingerprint,
        tokenizer=source.tokenizer_fingerprint,
    )
    fingerprint = sha256_of(windows)
    if rows:
        fingerprint = combined_digest({"windows": fingerprint, "images": digest(rows)})
    corpus = Corpus(
        name=texts.data,
        fingerprint=fingerprint,
        windows=len(windows),
        seq_len=windows.shape[1],
        batch_size=options.batch_size,
        sources=texts.sources,
        prefix=texts.prefix,
        images=len(rows) or None,
    )
    return MeasureTask(
        model=identity,
        corpus=corpus,
        batches=list(range(*(options.batches or (0, corpus.batches)))),
        stream=False,
        all_experts=options.all_experts,
        moments=False,
        key=key,
    )


def announce(task: MeasureTask, windows: Tokens, world: World) -> None:
    """Tell the other ranks what to measure."""
    world.gathered(task.model_dump())
    world.sent(windows)


def work_key(task: MeasureTask, world: World) -> dict[str, object]:
    """Return all that a rank's share, and each of its last bits, depends on."""
    return {
        **task.key,
        "stream": task.stream,
        "batch_size": task.corpus.batch_size,
        "batches": world.share(task.batches, task.moments),
        "rank": world.rank,
        **arithmetic(),
    }


def measured_share(
    task: MeasureTask, windows: Tokens, world: World, moments: SecondMoments | None = None
) -> Measurement:
    """Return the part that this rank measures."""
    batches = world.share(task.batches, task.moments)
    return Measurement(windows, task.model, task.corpus, batches, moments, task.all_experts)


def run_model(source: Source, what: Measurement, notes: Notes, folder: Path, stream: bool) -> Statistics:
    """Run the float model on the windows of `what`, alone and then with each adapter, and add all statistics.

    It runs decoder layer by decoder layer (`stream`) or in memory, with the progress in `folder`. Second moments are
    those of the base alone, whose weights they are for.
    """
    measured = measure_streamed if stream else _measured_in_memory
    statistics = measured(source, what, notes, folder, device())
    for variant in source.variants[1:]:
        assert variant.on, "what is beside the base is an adapter"
        inside = folder / f"adapter-{variant.on.name}"
        inside.mkdir(exist_ok=True)
        of_variant = measured(variant, replace(what, moments=None), notes, inside, device())
        statistics = statistics.with_variant(variant.on, of_variant)
    return statistics


def _measured_in_memory(source: Source, what: Measurement, notes: Notes, folder: Path, device: str) -> Statistics:
    return measure_in_memory(load_model(source, torch.bfloat16, device), what, notes, folder)


def streamed(source: Source, asked: bool | None, notes: Notes, ranks: int = 1) -> bool:
    """Tell whether to stream: as the option says, or where the weights exceed the available memory, with a note.
    `ranks` on a CPU share the memory.
    """
    need = LayersNeed(weight_bytes(source), "the weights take {} in BF16", "calibrating")
    return streams_layers(asked, need, notes, ranks)


@dataclass(frozen=True)
class LayersNeed:
    """The `bytes` of memory that some work needs with whole models; `sentence`: what takes them, with `{}` for their
    number; `doing`: the work.
    """

    bytes: int
    sentence: str
    doing: str

    @property
    def words(self) -> str:
        """The sentence with its number."""
        return self.sentence.format(f"{self.bytes / 1e9:,.3g} GB")


def streams_layers(asked: bool | None, need: LayersNeed, report: Reporter, ranks: int = 1) -> bool:
    """Tell whether to go layer by layer: as was `asked` for, or where memory does not hold what is needed, with a note.

    `ranks` on a CPU share the memory.
    """
    if asked is not None:
        return asked
    too_much = beyond(need.bytes, ranks)
    if too_much:
        report.note(f"--stream: {need.words}, {too_much}: {need.doing} layer by layer")
    return bool(too_much)


def beyond(size: int, ranks: int = 1) -> str:
    """Explain that `size` bytes are more than the usable share of the available memory; empty where they fit.

    On a CPU several `ranks` share the memory.
    """
    available = available_bytes(device())
    if available is not None and device() == "cpu":
        available //= ranks
    if available is None or size <= SHARE * available:
        return ""
    return f"and {SHARE:.0%} of the memory available is {SHARE * available / 1e9:,.3g} GB"


def measure_text(run: Run, text: str, notes: Notes) -> Statistics:
    """Run the run's float model on other text: windows of the calibration's length and prefix, at most as many.

    Raises InputError for a text that fills no window.
    """
    record = load_record(run)
    source = source_of(run)
    size = record.corpus.seq_len
    ids = read_other(run, text, load_tokenizer(source), source.text_config.vocab_size, notes).ids
    packing = Packing(size, tuple(record.corpus.prefix))
    available = len(packing.starts(ids))
    if not available:
        raise InputError(
            f"--against {text}",
            f"has {len(ids):,} tokens, less than one window of {size:,}, in which the run was calibrated",
            "give more text",
        )
    windows = corpus.windows(ids, size, min(available, record.corpus.windows), prefix=packing.prefix)
    new = {"name": text, "fingerprint": sha256_of(windows), "windows": len(windows)}
    new |= dict.fromkeys(("sources", "texts", "images"))
    measured = record.corpus.model_copy(update=new)
    what = Measurement(windows, record.model, measured)
    with scratch() as folder:
        return run_model(source, what, notes, folder, streamed(source, None, notes))


def check_queries(source: Source, option: str, notes: Notes) -> None:
    """Raise InputError, naming the `option` that asks for queries, where memory does not hold the model."""
    if streamed(source, None, notes):
        raise InputError(
            option,
            f"queries are measured with the whole of {source.name} in memory, which does not hold it",
            "leave it out",
        )


def measure_queries(run: Run, option: str, notes: Notes) -> None:
    """Run the float model on the calibration windows once more, and write `queries.safetensors`; `option` asks for it.

    Raises InputError when the source checkpoint is missing, and when it does not fit in memory: queries are not
    streamed.
    """
    inputs = {
        "model": run.record().model["fingerprint"],
        "calibration.npz": sha256_file(run.require(run.calibration, "corpus")),
    }
    key = Key(inputs, Options(), NO_FACTS)
    if QUERIES.is_current(run, key):
        return
    source = source_of(run)
    check_queries(source, option, Notes(notes.report))
    corpus = load_record(run).corpus
    with QUERIES.writing(run, key, notes) as log:
        measured = query_statistics(
            load_model(source, torch.bfloat16, device()), load_tokens(run, run.calibration), corpus.batch_size, notes
        )
        save_arrays(run.queries, measured, {})
        log.outputs.append(run.queries)
