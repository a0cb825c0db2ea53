"""The stages `export`, `export-bf16` and `export-int8`: write the ONNX graphs of the checkpoint.

The last two write those of the source model, in the precisions that FP8 is compared with.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from ..calibrate.measure.statistics import load_arrays, load_record, load_statistics
from ..core.errors import Fp8qError, InputError, NoGraphError
from ..core.files import replacing, write_document
from ..core.findings import Finding
from ..core.run import Run
from ..export.graph.trace import (
    UntraceableError,
    empty_model,
    export_baseline_graphs,
    export_model,
    fp8_groups,
    graph_plan,
)
from ..export.graph.weight_scale_form import write_form
from ..export.lint.check import lint_file, lint_graph, run_expectation
from ..export.modules.support import unsupported
from ..export.onnx_file.loading import load_graph
from ..options import Baseline, ExportOptions, WeightScale
from ..quantize.checkpoint.baselines import write_bf16, write_int8
from ..quantize.reading.run_checkpoint import ATTENTION_SCALES, checkpoint_of, stored_scales
from ..quantize.reference.attention import attention_scales, save_scales
from ..quantize.reference.fp8_model import written_config
from ..quantize.scales.decisions import SMALLEST_FP16_SCALE, AttentionScales, TensorScale, load_scales
from ..quantize.scales.servers import graph_refusal
from .measure import measure_queries
from .pipeline.stage import Key, Notes
from .pipeline.stages import EXPORT, EXPORT_BASELINE, QUANTIZE, GraphFacts
from .shared.adapters import adapters_of, check_attention
from .shared.model_files import checked_model, fp8_graphs, has_graphs
from .shared.sources import source_of

#: The stages that read an ONNX graph.
OF_A_GRAPH = ("build-engine", "triton")
#: The reason for having no graph that is recorded for `--no-graph`.
LEFT_OUT = "--no-graph left it out (`fp8q export` makes it)"
#: How graphs take the cache: those of runs from before take it otherwise, and are made anew.
IN_BLOCKS = GraphFacts()
#: The rules of the lint that apply without FP8: of the graph's form, and of its external data.
APPLYING = ("F3", "F4")


def export_or_note(run: Run, asked: ExportOptions, notes: Notes) -> None:
    """Run the stage `export`; where no graph can be made of the model, or none is asked for, note the reason instead of
    raising an error.
    """
    if not asked.graph:
        leave_out(run, asked, notes)
        return
    try:
        export(run, asked, notes)
    except (NoGraphError, UntraceableError):
        notes.note(str(NoGraphError(run.root, str(run.without_graph()))))


def export(run: Run, asked: ExportOptions, notes: Notes) -> None:
    """The stage `export`: write and lint both ONNX graphs of the checkpoint.

    Raises NoGraphError, or the exception of torch's exporter, where no graph can be made, and records that.
    """
    scales = load_scales(run)
    check_attention(adapters_of(run), asked)
    inputs = checked_model(run)
    check_dtype(scales.activations, asked)
    if asked.attention == "fp8" and scales.per_head:
        raise InputError(
            "--attention fp8",
            "attends by one scale a layer, which would round keys of a cache with a scale for each head once more",
            "choose scales again with --kv-scale tensor, or leave it out",
        )
    refused = None if has_graphs(run) else why_no_graph(run)
    if refused:
        refuse(run, Key(inputs, asked, IN_BLOCKS), refused, notes)
        raise NoGraphError(run.root, refused)
    if asked.attention == "fp8":
        measure_queries(run, "--attention fp8", notes)
        inputs |= {run.queries.name: run.record().stages["queries"].outputs[run.queries.name]} | run.record().stages[
            "measure"
        ].outputs
    key = Key(inputs, asked, IN_BLOCKS)
    if EXPORT.is_current(run, key):
        return
    record = load_record(run)
    form = traced_form(run, asked)
    with refusing(run, key, notes), EXPORT.writing(run, key, notes) as log:
        attention = write_attention(run, asked)
        log.outputs += [run.model / ATTENTION_SCALES, run.attention] if attention else []
        expected = run_expectation(run, scales, stored_scales(run.model, scales.activations))

        def linted(graphs: list[Path]) -> dict[Path, list[Finding]]:
            return {path: lint_graph(load_graph(path), expected) for path in graphs}

        findings = linted(fp8_graphs(run)) if form else {}
        if form is None or any(map(errors_of, findings.values())):  # what another hand recorded is not carried on
            plan = graph_plan(record, scales, asked.dtype, attention, asked.logits)
            form = "dq"
            findings = linted(export_model(run, plan, record.model.adapters or (), notes))
        if form != asked.weight_scale:
            for path in findings:
                write_form(path, path, asked.weight_scale)
            findings = linted([*findings])
        log.outputs += findings
        for path, graph_findings in findings.items():
            say(path, graph_findings, notes)


def leave_out(run: Run, asked: ExportOptions, notes: Notes) -> None:
    """Record that the run has no graph because none was asked for, or because its forms have none, and remove graphs of
    an earlier export.
    """
    inputs = checked_model(run)
    for path in fp8_graphs(run):
        path.unlink(missing_ok=True)
    refuse(run, Key(inputs, asked, IN_BLOCKS), _refused_by_scales(run) or LEFT_OUT, notes)


def traced_form(run: Run, asked: ExportOptions) -> WeightScale | None:
    """The form of the weights' scales in the run's graphs, if these were traced with the options `asked`.

    None where the model has to be traced again.
    """
    if not has_graphs(run):
        return None
    recorded = run.record().stages.get(EXPORT.name)
    if recorded is None:
        return None
    try:
        before, facts = EXPORT.read(recorded.options, run.record_file)
    except InputError:  # a malformed record: export again
        return None
    same = facts == IN_BLOCKS and replace(before, weight_scale=asked.weight_scale) == asked
    return before.weight_scale if same else None


def why_no_graph(run: Run) -> str | None:
    """The reason why no graph can be made of the checkpoint in `run`, by its scales and its classes; None where none is
    found before tracing.
    """
    if reason := _refused_by_scales(run):
        return reason
    model, _ = empty_model(written_config(run.model), torch.bfloat16)
    return unsupported(model.eval())


def _refused_by_scales(run: Run) -> str | None:
    scales = load_scales(run)
    return graph_refusal({*scales.forms.values()}, scales.vision or ())


@contextmanager
def refusing(run: Run, key: Key[ExportOptions, GraphFacts], notes: Notes) -> Iterator[None]:
    """Record that no graph can be made if torch's exporter fails in this block."""
    try:
        yield
    except UntraceableError as error:
        refuse(run, key, error.fault, notes)
        raise


def refuse(run: Run, key: Key[ExportOptions, GraphFacts], reason: str, notes: Notes) -> None:
    """Record that the run has no graph, with the reason, which commands that need the graph then report."""
    notes.lines.append(f"no ONNX graph: {reason}")  # the report shows a stage's notes
    with EXPORT.writing(run, key, notes) as log:
        log.refused = reason


def check_dtype(tensors: Mapping[str, TensorScale], asked: ExportOptions) -> None:
    """Raise InputError where a graph in FP16 cannot hold code × scale of one of the `tensors`, modules or queries."""
    if asked.dtype != "fp16":
        return
    for name, tensor in tensors.items():
        if not tensor.fits_fp16:
            raise InputError(
                "--dtype fp16",
                f"{name} takes two terms with the scale {tensor.scale:.3g}, and below {SMALLEST_FP16_SCALE:.3g} code "
                "× scale leaves FP16",
                "export in bf16, or choose one term with `fp8q scales`",
            )


def write_attention(run: Run, asked: ExportOptions) -> AttentionScales | None:
    """Choose the scales of attention in FP8, and write them for the graph and for readers.

    Returns None for attention in the compute type, after the files of an earlier export are removed.
    """
    stored = run.model / ATTENTION_SCALES
    for path in (stored, run.attention):
        path.unlink(missing_ok=True)
    if asked.attention == "wide":
        return None
    queries, _ = load_arrays(run.require(run.queries, "queries"))
    scales = attention_scales({**load_statistics(run).tensors, **queries}, run.options(QUANTIZE))
    check_dtype(scales.tensors, asked)
    with replacing(stored) as partial:
        save_scales(partial, scales)
    write_document(run.attention, scales)
    return scales


def say(path: Path, findings: Sequence[Finding], notes: Notes) -> None:
    """Note the findings of the lint in the new graph at `path`; an error among them is fp8q's own fault."""
    for finding in findings:
        notes.note(f"{path.name}: {finding}")
    if errors := errors_of(findings):
        raise Fp8qError(path, f"the exported graph breaks {len(errors)} rules of the lint, first {errors[0]}")


def errors_of(findings: Sequence[Finding]) -> list[Finding]:
    """The findings of severity error."""
    return [finding for finding in findings if finding.severity == "error"]


def export_precision(run: Run, notes: Notes, options: ExportOptions) -> Run:
    """Write the graphs of `run` in the precision asked for. Raises InputError for `options` without a graph."""
    if not options.graph:
        raise InputError("--no-graph", "the graphs are all that `fp8q export` makes", "leave it out")
    if options.precision == "fp8":
        export(run, options, notes)
    else:
        export_baseline(run, options.precision, notes)
    return run


def export_baseline(run: Run, precision: Baseline, notes: Notes) -> None:
    """Write `baselines/<precision>/` of the run: weights and two graphs, which compute in BF16 and in FP32 outside the
    GEMMs.

    Raises InputError when the source checkpoint is missing or has changed: neither precision can be made of FP8 codes.
    """
    run.refuse_without_graph()
    scales = load_scales(run)
    record = run.record()
    clip = run.options(QUANTIZE).clip
    inputs: dict[str, str] = {"model": record.model["fingerprint"]}
    if precision == "int8":
        for path, by in ((run.statistics, "measure"), (run.statistics_json, "measure"), (run.scales, "quantize")):
            inputs[path.name] = record.stages[by].outputs[run.require(path, by).name]
    stage = EXPORT_BASELINE[precision]
    directory = checkpoint_of(run, precision)
    key = Key(inputs, clip, IN_BLOCKS)  # BF16 has no clip
    if stage.is_current(run, key):
        return
    source = source_of(run)
    with stage.writing(run, key, notes) as log:
        with replacing(directory) as partial:
            groups: Mapping[str, list[str]] = {}
            if precision == "int8":
                statistics = load_statistics(run)
                groups = fp8_groups(
                    statistics.record.groups, write_int8(source, partial, statistics, scales, clip, notes)
                )
            else:
                write_bf16(source, partial, notes)
            for path in export_baseline_graphs(partial, groups, notes):
                say(path, [finding for finding in lint_file(path, {}) if finding.rule.startswith(APPLYING)], notes)
        log.outputs += sorted(path for path in directory.iterdir() if path.is_file())
