"""The stages `export-bf16` and `export-int8`: export the source model in the precisions that FP8 is compared with."""

from collections.abc import Mapping

from ..core.files import replacing
from ..core.run import Run
from ..options import Baseline
from ..quantize.reading.run_checkpoint import checkpoint_of
from .export import say
from .pipeline.stage import NO_FACTS, Key
from .pipeline.stages import EXPORT_BASELINE, QUANTIZE
from .pipeline.steps import Notes
from .shared.sources import source_of

#: The rules of the lint that apply without FP8: of the graph's form, and of its external data.
APPLYING = ("F3", "F4")


def export_baseline(run: Run, precision: Baseline, notes: Notes) -> None:
    """Write `baselines/<precision>/` of the run: weights and two graphs, which compute in BF16 and in FP32 outside the
    products.

    Raises InputError when the source checkpoint is missing or has changed: neither precision can be made of FP8 codes.
    """
    from ..calibrate.measure.statistics import load_statistics
    from ..export.graph.trace import export_baseline_graphs, promised_groups
    from ..export.lint.check import lint_file
    from ..quantize.checkpoint.baselines import write_bf16, write_int8
    from ..quantize.scales.decisions import load_scales

    run.refuse_without_graph()
    scales, record = load_scales(run), run.record()
    clip = run.options(QUANTIZE).clip
    inputs: dict[str, str] = {"model": record.model["fingerprint"]}
    if precision == "int8":
        for path, by in ((run.statistics, "measure"), (run.statistics_json, "measure"), (run.scales, "quantize")):
            inputs[path.name] = record.stages[by].outputs[run.require(path, by).name]
    stage, directory = EXPORT_BASELINE[precision], checkpoint_of(run, precision)
    key = Key(inputs, clip, NO_FACTS)  # BF16 has no clip
    if stage.is_current(run, key):
        return
    source = source_of(run)
    with stage.writing(run, key, notes) as log:
        with replacing(directory) as partial:
            groups: Mapping[str, list[str]] = {}
            if precision == "int8":
                statistics = load_statistics(run)
                groups = promised_groups(
                    statistics.record.groups, write_int8(source, partial, statistics, scales, clip, notes)
                )
            else:
                write_bf16(source, partial, notes)
            for path in export_baseline_graphs(partial, groups, notes):
                say(path, [finding for finding in lint_file(path, {}) if finding.rule.startswith(APPLYING)], notes)
        log.outputs += sorted(path for path in directory.iterdir() if path.is_file())
