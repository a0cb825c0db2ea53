"""The stage `quantize`: scales from statistics, and the checkpoint they make. The model is not run."""

from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..files import replacing, write_document
from ..options import RescaleOptions, ScaleOptions
from ..run import Run
from .corpora import load_tokens
from .graphs import has_graphs
from .steps import Notes, device, stage

if TYPE_CHECKING:
    from ..calibrate.measure.statistics import Statistics
    from ..calibrate.model.source import Source
    from ..quantize.policy import Products
    from ..quantize.scales import Scales
    from ..quantize.sequential import Rounded


def quantize(run: Run, source: "Source", products: "Products", options: ScaleOptions, notes: Notes) -> None:
    """The stage `quantize`: choose scales, write `model/` and `scales.json`."""
    from ..calibrate.measure.statistics import load_statistics
    from ..export.graph.carry import carry_graphs
    from ..quantize.checkpoint import quantize_checkpoint
    from ..quantize.policy import parted
    from ..quantize.scales import group_of
    from ..quantize.weight_rounding import Compensations
    from ..quantize.weights import Rounding

    compensated, sequential = (options.weight_rounding == method for method in ("gptq", "sequential"))
    measured = run.record().stages["measure"].outputs
    inputs = {name: digest for name, digest in measured.items() if compensated or not name.startswith("moments/")}
    chosen = asdict(options.clip) | {
        "weight_method": options.weight_method,
        "kv_cache": options.kv_cache,
        "skip": list(options.skip),
        "only": list(options.only),
        "weight_rounding": options.weight_rounding,
    }
    if sequential:
        inputs |= {run.calibration.name: run.record().stages["corpus"].outputs[run.calibration.name]}
        chosen |= {"batch_size": run.record().stages["measure"].options["batch_size"]}
    if run.is_current("quantize", inputs, chosen):
        return
    for name in inputs:
        run.require(run.root / name, "measure")
    statistics = load_statistics(run)
    scales, exported = choose_scales(statistics, products, options), has_graphs(run)
    compensations = Compensations(run.moments, group_of(statistics.record.groups)) if compensated else None
    with stage(run, "quantize", inputs, chosen, notes) as log:
        with ExitStack() as held:
            rounding = Rounding(options.weight_method, compensations)
            if sequential:
                folder = held.enter_context(run.work("quantize", {"inputs": inputs, "options": chosen}))
                rounding = replace(rounding, made=round_layers(run, source, scales, options, folder, notes))
            partial = held.enter_context(replacing(run.model))
            scales = quantize_checkpoint(source, partial, scales, rounding, notes)
            if exported:
                carry_graphs(run, partial)
        write_document(run.scales, scales)
        for module, decision in scales.skipped.items():
            if decision.samples is not None:
                notes.note(f"{module}: stays in BF16: {decision.reason}")
        if warning := parted(statistics.record.groups.values(), scales):
            notes.note(warning)
        graphs = {run.onnx, run.onnx_fp32}
        log.outputs += [
            run.scales,
            *sorted(path for path in run.model.rglob("*") if path.is_file() and path not in graphs),
        ]


def round_layers(
    run: Run, source: "Source", scales: "Scales", options: ScaleOptions, folder: Path, notes: Notes
) -> "Rounded":
    """The codes of `--weight-rounding sequential`, made in `folder`: the model runs on its windows again."""
    from ..calibrate.measure.statistics import load_record
    from ..quantize.sequential import Sequence

    size, windows = load_record(run).corpus.batch_size, load_tokens(run, run.calibration)
    batches = {batch: windows[start : start + size] for batch, start in enumerate(range(0, len(windows), size))}
    return Sequence(source, scales, options.weight_method, batches, folder, device()).run(notes)


def rescaled(run: Run, options: RescaleOptions) -> ScaleOptions:
    """What to choose the run's scales by: what `options` are not given stays as it was, or takes the default where a
    killed run does not tell.

    Raises InputError when the run was not measured, and for rounding that runs the model.
    """
    run.require(run.statistics, "measure")
    run.refuse_stale("measure")
    before = run.record().stages.get("quantize")
    recorded = before.options if before else {}
    names = ScaleOptions.declared().keys() & recorded.keys()
    kept: dict[str, Any] = {
        name: tuple(value) if isinstance(value := recorded[name], list) else value for name in names
    }
    chosen = options.over(ScaleOptions(**kept))
    if chosen.weight_rounding == "sequential":
        raise InputError(
            "--weight-rounding sequential: runs the model, and scales are chosen again without it; use `fp8q "
            "calibrate` with the options of the run and those that are to change"
        )
    return chosen


def choose_scales(statistics: "Statistics", products: "Products", options: ScaleOptions) -> "Scales":
    """Decide every tensor of `products`; the weights' part is filled in when they are written."""
    from ..quantize.policy import select
    from ..quantize.scales import CACHE_PARTS, Scales, activation_scales, kv_cache_scales

    chosen, skipped = select(products, options.skip, options.only)
    activations, unfit = activation_scales(statistics, chosen, options.clip)
    cache = kv_cache_scales(statistics, options.clip, CACHE_PARTS[options.kv_cache])
    return Scales(weights={}, activations=activations, kv_cache=cache, skipped=skipped | unfit)
