"""The stage `quantize`: scales from statistics, and the checkpoint they make. The model is not run."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..files import replacing, write_document
from ..options import RescaleOptions, ScaleOptions
from ..run import Run
from .graphs import has_graphs
from .steps import Notes, stage

if TYPE_CHECKING:
    from ..calibrate.measure.statistics import Statistics
    from ..calibrate.model.source import Source
    from ..quantize.policy import Products
    from ..quantize.scales import Scales


def quantize(run: Run, source: "Source", products: "Products", options: ScaleOptions, notes: Notes) -> None:
    """The stage `quantize`: choose scales, write `model/` and `scales.json`."""
    from ..calibrate.measure.statistics import load_statistics
    from ..export.graph.carry import carry_graphs
    from ..quantize.checkpoint import quantize_checkpoint
    from ..quantize.policy import parted, taken_along
    from ..quantize.scales import group_of
    from ..quantize.weight_rounding import Compensations
    from ..quantize.weights import Rounding

    compensated = options.weight_rounding == "gptq"
    measured = run.record().stages["measure"].outputs
    inputs = {name: digest for name, digest in measured.items() if compensated or not name.startswith("moments/")}
    chosen = asdict(options.clip) | {
        "weight_method": options.weight_method,
        "kv_cache": options.kv_cache,
        "skip": list(options.skip),
        "only": list(options.only),
        "weight_rounding": options.weight_rounding,
        "activation_terms": options.activation_terms,
        "two_terms": list(options.two_terms),
    }
    if run.is_current("quantize", inputs, chosen):
        return
    for name in inputs:
        run.require(run.root / name, "measure")
    statistics = load_statistics(run)
    scales, exported = choose_scales(statistics, products, options), has_graphs(run)
    compensations = Compensations(run.moments, group_of(statistics.record.groups)) if compensated else None
    with stage(run, "quantize", inputs, chosen, notes) as log:
        with replacing(run.model) as partial:
            scales = quantize_checkpoint(source, partial, scales, Rounding(options.weight_method, compensations), notes)
            if exported:
                carry_graphs(run, partial)
        write_document(run.scales, scales)
        for module, decision in scales.skipped.items():
            if decision.samples is not None:
                notes.note(f"{module}: stays in BF16: {decision.reason}")
        if beside := taken_along(options.two_terms, scales.two_terms):
            notes.note(
                f"--two-terms: {beside[0]}{f' and {len(beside) - 1} more' if len(beside) > 1 else ''} read the same "
                "tensor as a module that it names, and take two terms with it"
            )
        if warning := parted(statistics.record.groups.values(), scales):
            notes.note(warning)
        graphs = {run.onnx, run.onnx_fp32}
        log.outputs += [
            run.scales,
            *sorted(path for path in run.model.rglob("*") if path.is_file() and path not in graphs),
        ]


def rescaled(run: Run, options: RescaleOptions) -> ScaleOptions:
    """What to choose the run's scales by: what `options` are not given stays as it was, or takes the default where a
    killed run does not tell.

    Raises InputError when the run was not measured.
    """
    run.require(run.statistics, "measure")
    run.refuse_stale("measure")
    before = run.record().stages.get("quantize")
    recorded = before.options if before else {}
    names = ScaleOptions.declared().keys() & recorded.keys()
    kept: dict[str, Any] = {
        name: tuple(value) if isinstance(value := recorded[name], list) else value for name in names
    }
    return options.over(ScaleOptions(**kept))


def choose_scales(statistics: "Statistics", products: "Products", options: ScaleOptions) -> "Scales":
    """Decide every tensor of `products`; the weights' part is filled in when they are written."""
    from ..quantize.policy import match_terms, select, whole_groups
    from ..quantize.scales import CACHE_PARTS, Scales, activation_scales, kv_cache_scales

    chosen, skipped = select(products, options.skip, options.only)
    named = match_terms(options.two_terms, products, chosen)
    two_terms = chosen if options.activation_terms == 2 else whole_groups(named, statistics.record.groups.values())
    activations, unfit = activation_scales(statistics, chosen, options.clip, two_terms=frozenset(two_terms))
    cache = kv_cache_scales(statistics, options.clip, CACHE_PARTS[options.kv_cache])
    return Scales(weights={}, activations=activations, kv_cache=cache, skipped=skipped | unfit)
