"""`fp8q calibrate`: from model and text to checkpoint and graphs, in one process or several ranks."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..calibrate.measure.statistics import load_record
from ..calibrate.model.expert_modules import experts_of
from ..calibrate.model.memory import weight_bytes
from ..calibrate.model.source import Source, meta_model
from ..calibrate.model.tokenizer import load_tokenizer
from ..calibrate.ranks.world import World, joined_ranks
from ..calibrate.text import mixture
from ..core.columns import size as size_text
from ..core.errors import InputError
from ..core.output_folder import WorkFolder
from ..core.reporter import SILENT
from ..core.run import Run
from ..core.run_writer import RunWriter
from ..options import ONE, ExportOptions, RescaleOptions, RunOptions, ScaleOptions, Server
from ..quantize.checkpoint.tokenizer_files import calibrated_remark, difference_in_vllm
from ..quantize.scales.policy import ModelGemms, check_patterns, few_tokens_note
from ..quantize.scales.servers import ONE_CODE_IN_EXPERTS
from . import preflight
from .corpus import Collected, collect, write_corpus
from .costliest import choose_and_quantize, is_chosen
from .export import export_or_note
from .gradients import check_outputs, idle_notes, run_gradients
from .image_inputs import with_image_rows
from .measure import (
    check_batches,
    check_experts,
    check_images,
    check_sequential_ranks,
    measure,
    measure_key,
    moments_bytes,
    streamed,
    take_part,
)
from .pipeline.stage import Notes
from .pipeline.stages import MEASURE
from .quantize import (
    KnownCodes,
    LayerRounding,
    codes_key,
    is_quantized,
    rescaled,
    rounded_without_moments,
    take_part_in_rounding,
)
from .shared import sources
from .shared.adapters import adapters_of, check_attention
from .shared.model_files import export_options
from .shared.texts import check_there

#: The bytes of second moments for a byte of the model in BF16, about; and the share of the free disk that they may take
#: where nobody asked for them.
MOMENTS_BYTES = 2
DISK_SHARE = 0.1


@dataclass(frozen=True)
class Calibration:
    """The model, texts and options of a calibration; `later`: the stages that follow in the same call."""

    model: str
    data: str | Sequence[str]
    eval_data: str | None
    options: RunOptions
    later: preflight.LaterStages | None = None


def calibration_of(
    model: str | Path, data: str | Path | Sequence[str], eval_data: str | Path | None, options: RunOptions
) -> Calibration:
    """Make a calibration of a model and texts, each a name or a path."""
    texts = str(data) if isinstance(data, str | Path) else [str(text) for text in data]
    return Calibration(str(model), texts, None if eval_data is None else str(eval_data), options)


def without_idle_graph(what: Calibration, notes: Notes) -> Calibration:
    """Leave out the graph where the server reads none, with a note."""
    options = what.options.without_idle_graph()
    if options == what.options:
        return what
    notes.note(f"--for {options.server}: reads the checkpoint; no graph, engine and Triton repository are made")
    return replace(what, options=options)


def calibrate(run: Run, notes: Notes, what: Calibration) -> Run:
    """Measure, choose scales, and write checkpoint and graphs into `run`.

    In several processes that torchrun started, all measure and round, and the first alone does the rest.
    """
    what = without_idle_graph(what, notes)
    options = what.options.calibrate
    with joined_ranks() as world:
        if world.rank:
            _take_part(run, what, notes, world)
        else:
            source, gemms = _measured(run, what, notes, world)
            if not options.batches:
                _chosen_and_quantized(run, what, (source, gemms), notes, world)
            world.gathered({})  # the other ranks have nothing more to round
    if world.rank:
        WorkFolder(run.root, MEASURE.name, world.rank).leave()
    elif options.batches:
        first, end = options.batches
        notes.note(
            f"--batches {first}:{end}: these are measured, and no scales are chosen; `fp8q merge` adds them to the "
            "other batches and goes on"
        )
    else:
        export_or_note(run, what.options.export, notes)
    return run


def _chosen_and_quantized(
    run: Run, what: Calibration, model: tuple[Source, ModelGemms], notes: Notes, world: World
) -> None:
    """Choose scales and write the checkpoint, with the options that later stages have found."""
    source, gemms = model
    options = what.options.calibrate
    chosen = what.later.chosen_options(run) if what.later else options
    held = tuple(f"{layer}." for layer in load_record(run).experts or {})
    experts = [module for module in check_patterns(chosen, gemms) if module.startswith(held)]
    chosen = experts_as_served(chosen, options.server, experts, notes)
    if chosen != options:
        gemms = sources.gemms_of(source, chosen)
    _rounded(run, (source, gemms), chosen, notes, options.stream, world)


def _codes_folder(run: Run) -> WorkFolder:
    """The folder of codes that are rounded while `run` is measured, until its checkpoint has them."""
    return WorkFolder(run.root, "codes")


def experts_as_served(
    options: ScaleOptions, server: Server | None, experts: Sequence[str], notes: Notes
) -> ScaleOptions:
    """Let `experts`, the quantized GEMMs of experts, take one code where one form was asked for every module, and the
    `server` that was named computes no other for them.
    """
    form = options.form_of_all
    if not experts or server not in ONE_CODE_IN_EXPERTS or form == ONE or form.at_run_time:
        return options
    if not all(rule.every for rule in options.form_rules):
        return options
    notes.note(f"--for {server}: experts take one code, since it has no GEMM of experts for {form.words}")
    return replace(options, form=(*options.form, f"*.experts.*={ONE}"))


def _take_part(run: Run, what: Calibration, notes: Notes, world: World) -> None:
    """Measure and round, as a rank above 0, the shares that rank 0 assigns."""
    source = sources.opened(what.model, what.options.calibrate, fingerprinted=world.process.local_rank == 0)
    sources.check_same(source, world)
    take_part(run, source, world, notes)
    take_part_in_rounding(run, source, world)


def _measured(run: Run, what: Calibration, notes: Notes, world: World) -> tuple[Source, ModelGemms]:
    """Check everything, write the corpus and measure, as rank 0 of the stages that ranks share."""
    options = what.options.calibrate
    preflight.check_out(run)
    with notes.held():
        source, gemms, collected = _checked(run, what, notes, world)
    moments = options.needs_moments or _for_later(run, what, source, world)
    spent = _spends_moments(run, what, source, notes, world)
    if what.later:
        what.later.plan(run, source, collected, moments, spent)
    with preflight.nothing_left(run):
        write_corpus(run, source, collected, notes)
        if spent:
            _measure_and_round(run, source, gemms, what, notes)
        else:
            measure(run, source, options, notes, world, moments)
    return source, gemms


def _spends_moments(run: Run, what: Calibration, source: Source, notes: Notes, world: World) -> bool:
    """Tell whether each layer is rounded by GPTQ once it has run, so that no second moments are stored: as the options
    say, as the run was made before, or where the disk has no room for them, with a note.

    Raises InputError where that was asked for and cannot be.
    """
    asked = what.options.calibrate.keep_moments
    if asked:
        return False
    needed_later = _needs_all_moments(what, source, world)
    if asked is False:
        if needed_later:
            raise InputError("--no-keep-moments", *needed_later)
        return True
    if needed_later or rounded_without_moments(run) or _codes_folder(run).path.is_dir():
        return not needed_later
    if run.moments.is_dir() or (WorkFolder(run.root, MEASURE.name).path / run.moments.name).is_dir():
        return False  # their room is taken already
    needed = moments_bytes(source)
    free: int = shutil.disk_usage(preflight.directory_above(run)).free
    if needed > free:
        notes.note(
            f"--no-keep-moments: second moments take {size_text(needed)} on the disk of {run.root}, which has "
            f"{size_text(free)} free: each layer is rounded once it has run, and none are stored"
        )
    return needed > free


def _needs_all_moments(what: Calibration, source: Source, world: World) -> tuple[str, str] | None:
    """Explain why the second moments of all layers are needed together, or none are: fault and remedy of
    --no-keep-moments; None where one layer's suffice.
    """
    options = what.options.calibrate
    if not options.needs_moments:
        return f"--weight-rounding {options.weight_rounding} stores none", "leave it out"
    if what.later and what.options.finds_form:
        return "the search of a form rounds by them again", "give --form FORM, or leave it out"
    if options.batches:
        return "`fp8q merge` adds those of parts", "leave it out"
    if world.size > 1:
        return f"{world.size} ranks round when all of them are measured", "start one process, or leave it out"
    if experts_of(meta_model(source)):
        return "what experts are rounded by depends on other layers", "leave it out"
    if not streamed(source, options.stream, Notes(SILENT)):
        return "a model in memory has those of all layers at once", "give --stream, or leave it out"
    return None


def _measure_and_round(run: Run, source: Source, gemms: ModelGemms, what: Calibration, notes: Notes) -> None:
    """Measure `run` and round each layer once it has run, unless the checkpoint or all codes are there."""
    options = what.options.calibrate
    run_gradients(run, source, options, notes, options.stream)
    work = _codes_folder(run)
    key = codes_key(run, source, options)
    measured = MEASURE.is_current(run, measure_key(run, source, options))
    done = measured and is_chosen(run, source, options) and is_quantized(run, source, options, notes)
    if done or (measured and work.left(key)):
        return
    RunWriter(run).forget(MEASURE.name)  # codes that a killed call left are not taken for those of all layers
    with work.blamed(), work.opened(key, notes.note) as folder:
        measure(run, source, options, notes, moments=LayerRounding(run, source, gemms, options, folder))


def _for_later(run: Run, what: Calibration, source: Source, world: World) -> bool:
    """Tell whether second moments are gathered at once, for forms that may be tried: where one process measures for the
    first time, and they take little of the free disk.
    """
    if what.later is None or not what.options.finds_form:
        return False
    if world.size > 1 or MEASURE.name in run.record().stages or what.options.calibrate.asks("weight_rounding"):
        return False
    free: int = shutil.disk_usage(preflight.directory_above(run)).free
    return MOMENTS_BYTES * weight_bytes(source) <= DISK_SHARE * free


def _checked(run: Run, what: Calibration, notes: Notes, world: World) -> tuple[Source, ModelGemms, Collected]:
    """Check model, texts and options, before any file is written."""
    options = what.options.calibrate
    later = what.later
    before = run.record().model
    if later:
        later.check_options(run)
    for text in (*(part.spec for part in mixture.parse(what.data)), *filter(None, [what.eval_data])):
        check_there(text)
    source = sources.opened(what.model, options, notes)
    sources.check_same(source, world)
    sources.check_model(run, before, source)
    gemms = sources.gemms_of(source, options)
    check_experts(source, gemms, options)
    if later:
        later.check_graph(run, gemms.no_graph)
    if gemms.no_graph is not None:
        notes.note(f"{gemms.no_graph}: no ONNX graph can be made of it, and what is written is the checkpoint, model/")
    preflight.check_calibrate(source, options, what.options.export)
    if options.tokenizer is None and (what.options.server != "tensorrt" or gemms.no_graph):
        source = replace(source, tokenizer="auto")
    remaining = difference_in_vllm(source)
    if remaining:
        notes.note(calibrated_remark(source.name, remaining))
    tokenizer = load_tokenizer(source, SILENT if remaining else notes)
    collected = collect(source, tokenizer, what.data, what.eval_data, options, notes)
    collected = replace(collected, other_tokens=remaining.kinds if remaining else ())
    check_batches(options, len(collected.windows), world)
    check_sequential_ranks(gemms, options, world)
    check_outputs(options, len(collected.windows))
    if not (later and what.options.finds_form):  # which may choose GPTQ yet
        for line in idle_notes(options):
            notes.note(line)
    if remark := few_tokens_note(gemms, options, *collected.windows.shape):
        notes.note(remark)
    if later:
        later.check_fit(source, collected)
    check_images(options, world, bool(collected.image_chats))
    collected = with_image_rows(source, tokenizer, collected, options.samples, notes)
    sources.check_weights(run, source, notes)
    return source, gemms, collected


def scales(run: Run, notes: Notes, options: RescaleOptions) -> Run:
    """Choose all scales of `run` again, from its statistics, and write its checkpoint and graphs anew."""
    chosen = rescaled(run, options)
    graph = export_options(run)
    source = sources.source_of(run)
    check_attention(adapters_of(run), ExportOptions(), chosen)
    gemms = sources.gemms_of(source, chosen)
    measured = load_record(run).corpus
    check_outputs(chosen, measured.windows)
    for remark in (few_tokens_note(gemms, chosen, measured.windows, measured.seq_len), *idle_notes(chosen)):
        if remark:
            notes.note(remark)
    _rounded(run, (source, gemms), chosen, notes)
    export_or_note(run, graph, notes)
    return run


def _rounded(
    run: Run, model: tuple[Source, ModelGemms], options: ScaleOptions, notes: Notes, stream: bool | None = None,
    world: World | None = None,
) -> None:  # fmt: skip
    """Measure all that `options` need to be known before scales are chosen, and write the checkpoint.

    Codes that were rounded while `run` was measured are taken.
    """
    source, gemms = model
    if options.needs_moments:
        run_gradients(run, source, options, notes, stream)
    left = _codes_folder(run).left(codes_key(run, source, options)) if options.needs_moments else None
    choose_and_quantize(run, source, gemms, options, notes, KnownCodes(world=world, rounded=left))
    _codes_folder(run).remove()
