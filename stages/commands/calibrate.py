"""`fp8q calibrate`: from model and text to checkpoint and graphs, in one process or several ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...calibrate.model.source import Source
from ...calibrate.model.tokenizer import load_tokenizer
from ...calibrate.ranks.world import World, joined_ranks
from ...core.run import Run
from ...options import ExportOptions, RescaleOptions, RunOptions
from ...quantize.scales.policy import Products
from ..corpus import Collected, collect, write_corpus
from ..export import export_or_note
from ..measure import check_batches, check_experts, measure, take_part
from ..pipeline.stages import MEASURE
from ..pipeline.steps import Notes
from ..quantize import quantize, rescaled
from ..shared import sources
from ..shared.adapters import adapters_of, check_attention
from ..shared.model_files import export_options
from . import preflight


@dataclass(frozen=True)
class Calibration:
    """The model, texts and options of a calibration; `whole_run`: the stages after it follow in the same call."""

    model: str
    data: str | Sequence[str]
    eval_data: str | None
    options: RunOptions
    whole_run: bool = False


def calibrate(run: Run, notes: Notes, what: Calibration) -> Run:
    """Measure, choose scales, and write checkpoint and graphs into `run`.

    In several processes that torchrun started, all measure and the first alone does the rest.
    """
    options = what.options.calibrate
    with joined_ranks() as world:
        if world.rank:
            _take_part(run, what, notes, world)
        else:
            source, products = _measured(run, what, notes, world)
    if world.rank:
        run.leave_work(MEASURE.name, world.rank)
    elif options.batches:
        first, end = options.batches
        notes.note(
            f"--batches {first}:{end}: these are measured, and no scales are chosen; `fp8q merge` adds them to the "
            "other batches and goes on"
        )
    else:
        quantize(run, source, products, options, notes)
        export_or_note(run, what.options.export, notes)
    return run


def _take_part(run: Run, what: Calibration, notes: Notes, world: World) -> None:
    """Measure, as a rank above 0, the share that rank 0 assigns."""
    source = sources.opened(what.model, what.options.calibrate, fingerprinted=world.process.local_rank == 0)
    sources.check_same(source, world)
    take_part(run, source, world, notes)


def _measured(run: Run, what: Calibration, notes: Notes, world: World) -> tuple[Source, Products]:
    """Check everything, write the corpus and measure, as rank 0 of the stages that ranks share."""
    options = what.options.calibrate
    preflight.check_out(run)
    with notes.held():
        source, products, collected = _checked(run, what, notes, world)
    with preflight.nothing_left(run):
        write_corpus(run, source, collected, notes)
        measure(run, source, options, notes, world, moments=options.needs_moments)
    return source, products


def _checked(run: Run, what: Calibration, notes: Notes, world: World) -> tuple[Source, Products, Collected]:
    """Check model, texts and options, before any file is written."""
    options, later = what.options.calibrate, what.options if what.whole_run else None
    before = run.record().model
    if later:
        preflight.check_later(run, later)
    source = sources.opened(what.model, options, notes)
    sources.check_same(source, world)
    sources.check_model(run, before, source)
    products = sources.products_of(source, options)
    check_experts(source, products, options)
    preflight.check_graph(run, products, later, notes)
    preflight.check_calibrate(source, options, what.options.export)
    collected = collect(source, load_tokenizer(source, notes), what.data, what.eval_data, options, notes)
    check_batches(options, len(collected.windows), world)
    if later:
        preflight.check_fit(source, collected, later)
    sources.check_weights(run, source, notes)
    return source, products, collected


def scales(run: Run, notes: Notes, options: RescaleOptions) -> Run:
    """Choose all scales of `run` again, from its statistics, and write its checkpoint and graphs anew."""
    chosen, graph, source = rescaled(run, options), export_options(run), sources.source_of(run)
    check_attention(adapters_of(run), ExportOptions(), chosen)
    quantize(run, source, sources.products_of(source, chosen), chosen, notes)
    export_or_note(run, graph, notes)
    return run
