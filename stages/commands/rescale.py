"""`fp8q scales` and `fp8q export`: make the checkpoint or the graphs of a run again."""

from ...core.errors import InputError
from ...core.run import Run
from ...options import ExportOptions, RescaleOptions
from ..export import export, export_or_note
from ..export_baseline import export_baseline
from ..pipeline.steps import Notes
from ..quantize import quantize, rescaled
from ..shared.adapters import adapters_of, check_attention
from ..shared.model_files import export_options
from ..shared.opening import command
from ..shared.sources import products_of, source_of


@command()
def scales(run: Run, notes: Notes, options: RescaleOptions) -> Run:
    """Choose all scales of `run` again, from its statistics, and write its checkpoint and graphs anew."""
    chosen, graph, source = rescaled(run, options), export_options(run), source_of(run)
    check_attention(adapters_of(run), ExportOptions(), chosen)
    quantize(run, source, products_of(source, chosen), chosen, notes)
    export_or_note(run, graph, notes)
    return run


@command()
def export_precision(run: Run, notes: Notes, options: ExportOptions) -> Run:
    """Write the graphs of `run` in the precision asked for. Raises InputError for `options` without a graph."""
    if not options.graph:
        raise InputError("--no-graph", "the graphs are all that `fp8q export` makes", "leave it out")
    if options.precision == "fp8":
        export(run, options, notes)
    else:
        export_baseline(run, options.precision, notes)
    return run
