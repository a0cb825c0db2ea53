"""`fp8q calibrate`: from model and text to checkpoint and graphs, in one process or several ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.reporter import Reporter
from ...core.run import Run
from ...options import RunOptions
from ..corpus import Collected, collect, write_corpus
from ..export import export_or_note
from ..measure import check_batches, check_experts, measure, take_part
from ..pipeline.stages import MEASURE
from ..pipeline.steps import CALIBRATE_MODULES, Notes, alone, needs
from ..quantize import quantize
from ..shared import sources
from ..shared.opening import naming
from . import preflight

if TYPE_CHECKING:
    from ...calibrate.model.source import Source
    from ...calibrate.ranks.world import World
    from ...quantize.scales.policy import Products


@dataclass(frozen=True)
class Calibration:
    """The model, texts and options of a calibration; `whole_run`: the stages after it follow in the same call."""

    model: str
    data: str | Sequence[str]
    eval_data: str | None
    options: RunOptions
    whole_run: bool = False


def calibrate(out: Path, what: Calibration, progress: Reporter) -> Run:
    """Measure, choose scales, and write checkpoint and graphs into the run directory `out`, under its lock.

    In several processes that torchrun started, all measure and the first alone does the rest.
    """
    run, notes, options = Run(Path(out)), Notes(progress), what.options.calibrate
    with naming(out), alone(run):
        needs("calibrate", CALIBRATE_MODULES)
        from ...calibrate.ranks.world import joined_ranks

        with joined_ranks() as world:
            if world.rank:
                _take_part(run, what, notes, world)
            else:
                source, products = _measured(run, what, notes, world)
        if world.rank:
            run.leave_work(MEASURE.name, world.rank)
        elif options.batches:
            first, end = options.batches
            progress.note(
                f"--batches {first}:{end}: these are measured, and no scales are chosen; `fp8q merge` adds them to the "
                "other batches and goes on"
            )
        else:
            quantize(run, source, products, options, notes)
            export_or_note(run, what.options.export, notes)
    return run


def _take_part(run: Run, what: Calibration, notes: Notes, world: "World") -> None:
    """Measure, as a rank above 0, the share that rank 0 assigns."""
    source = sources.opened(what.model, what.options.calibrate, fingerprinted=world.process.local_rank == 0)
    sources.check_same(source, world)
    take_part(run, source, world, notes)


def _measured(run: Run, what: Calibration, notes: Notes, world: "World") -> "tuple[Source, Products]":
    """Check everything, write the corpus and measure, as rank 0 of the stages that ranks share."""
    options = what.options.calibrate
    preflight.check_out(run)
    with notes.held():
        source, products, collected = _checked(run, what, notes, world)
    with preflight.nothing_left(run):
        write_corpus(run, source, collected, notes)
        measure(run, source, options, notes, world, moments=options.needs_moments)
    return source, products


def _checked(run: Run, what: Calibration, notes: Notes, world: "World") -> "tuple[Source, Products, Collected]":
    """Check model, texts and options, before any file is written."""
    from ...calibrate.model.tokenizer import load_tokenizer

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
