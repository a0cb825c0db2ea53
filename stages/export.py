"""The stage `export`: both ONNX graphs beside the checkpoint; and the files that every FP8 runtime reads."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..core.errors import Fp8qError, InputError
from ..core.files import replacing, sha256_file, write_document
from ..core.record import FP8_STAGES, command
from ..core.run import GRAPH, Run, graph_names, no_graph
from ..options import Clipping, ExportOptions, Precision, Terms
from ..quantize.reading.run_checkpoint import ATTENTION_SCALES, checkpoint_of
from .queries import measure_queries
from .shared.adapters import adapters_of, check_attention
from .shared.steps import Notes, stage

if TYPE_CHECKING:
    from ..core.findings import Finding

#: The stages that make something of an ONNX graph.
OF_A_GRAPH = ("build-engine", "triton")
#: Of a graph in FP16: its smallest number over E4M3's, both subnormal.
SMALLEST_FP16_SCALE = 2.0**-15


class NoGraphError(InputError):
    """No ONNX graph can be made of a model; what else there is of a run is whole."""


def export_or_note(run: Run, asked: ExportOptions, notes: Notes) -> None:
    """The stage `export`, which ends well where no graph can be made of the model, with a note that says why."""
    from ..export.graph.trace import UntraceableError

    try:
        export(run, asked, notes)
    except (NoGraphError, UntraceableError):
        notes.note(no_graph(run.root, str(run.without_graph())))


def export(run: Run, asked: ExportOptions, notes: Notes) -> None:
    """The stage `export`: both ONNX graphs beside the checkpoint, linted.

    Raises NoGraphError, or what torch's exporter raised, where none can be made of the model, and the record says so.
    """
    from ..calibrate.measure.statistics import load_record
    from ..export.graph.trace import export_model
    from ..export.graph.weight_scale_form import write_form
    from ..export.lint.check import lint, promised_attention, promised_terms
    from ..quantize.reading.run_checkpoint import stored_scales
    from ..quantize.scales.decisions import load_scales

    scales = load_scales(run)
    check_attention(adapters_of(run), asked)
    written = _written(run, "quantize")
    inputs = {name: digest for name, digest in written.items() if name != str(run.scales.relative_to(run.root))} | {
        "scales.json": written["scales.json"]
    }
    check_dtype({module: scales.activations[module].scale for module in scales.two_terms}, asked)
    traced = {"dtype": asked.dtype} | ({"attention": asked.attention} if asked.attention != "wide" else {})
    options = traced | ({"weight_scale": asked.weight_scale} if asked.weight_scale != "dq" else {})
    refused = None if has_graphs(run) else why_no_graph(run)
    if refused:
        refuse(run, inputs, options, refused, notes)
        raise NoGraphError(no_graph(run.root, refused))
    if asked.attention == "fp8":
        measure_queries(run, notes)
        inputs |= {run.queries.name: run.record().stages["queries"].outputs[run.queries.name]} | run.record().stages[
            "measure"
        ].outputs
    if run.is_current("export", inputs, options):
        return
    record = load_record(run)
    before = dict(run.record().stages["export"].options) if has_graphs(run) else {}
    form = before.pop("weight_scale", ExportOptions.weight_scale)
    carried = before == traced
    with refusing(run, inputs, options, notes), stage(run, "export", inputs, options, notes) as log:
        attention = write_attention(run, asked)
        log.outputs += [run.model / ATTENTION_SCALES, run.attention] if attention else []
        promised = {module: activation.scale for module, activation in scales.activations.items()}
        weight_scales = stored_scales(run.model, promised)

        def linted(graphs: list[Path]) -> "dict[Path, list[Finding]]":
            of_attention, two_terms = promised_attention(run), promised_terms(run, scales)
            return {path: lint(path, promised, weight_scales, of_attention, two_terms) for path in graphs}

        findings = linted(graphs_of(run)) if carried else {}
        if not carried or any(map(errors_of, findings.values())):  # what another hand recorded is not carried on
            form, findings = "dq", linted(export_model(run, record, scales, asked.dtype, notes, attention))
        if form != asked.weight_scale:
            for path in findings:
                write_form(path, path, asked.weight_scale)
            findings = linted([*findings])
        log.outputs += findings
        for path, found in findings.items():
            say(path, found, notes)


def graphs_of(run: Run) -> list[Path]:
    """The FP8 graphs of `run`: both of the model, and both of it with each adapter beside it."""
    return [run.model / name for adapter in (None, *adapters_of(run)) for name in graph_names(adapter)]


def why_no_graph(run: Run) -> str | None:
    """Why no graph can be made of the model whose checkpoint is in `run`, told without its weights; None where one
    can, as far as that is seen before it is traced.
    """
    import torch
    from transformers import AutoConfig

    from ..export.graph.trace import empty_model
    from ..export.modules.support import unsupported

    model, _ = empty_model(AutoConfig.from_pretrained(run.model), torch.bfloat16)
    return unsupported(model.eval())


@contextmanager
def refusing(run: Run, inputs: Mapping[str, str], options: Mapping[str, object], notes: Notes) -> Iterator[None]:
    """Record that no graph can be made where torch's exporter finds that out in the block."""
    from ..export.graph.trace import UntraceableError

    try:
        yield
    except UntraceableError as error:
        refuse(run, inputs, options, error.reason, notes)
        raise


def refuse(run: Run, inputs: Mapping[str, str], options: Mapping[str, object], reason: str, notes: Notes) -> None:
    """Record the stage `export` as one that cannot be done, and why: whatever needs the graph says so from there."""
    notes.lines.append(f"no ONNX graph: {reason}")  # the report shows a stage's notes
    with stage(run, "export", inputs, options, notes) as log:
        log.refused = reason


def check_dtype(two_terms: Mapping[str, float], asked: ExportOptions) -> None:
    """Raise InputError where a graph in FP16 cannot hold the second of two terms: a code times its scale has to be a
    number of that type, whose smallest is 2^-24, and the smallest code is 2^-9.

    `two_terms`: the scale of each module's input, or each attention's queries, that are of two.
    """
    if asked.dtype != "fp16":
        return
    for name, scale in two_terms.items():
        if scale < SMALLEST_FP16_SCALE:
            raise InputError(
                f"--dtype fp16: {name} takes two terms with the scale {scale:.3g}, and below "
                f"{SMALLEST_FP16_SCALE:.3g} code × scale leaves FP16; export in bf16, or choose one term with `fp8q "
                "scales`"
            )


def write_attention(run: Run, asked: ExportOptions) -> int:
    """Choose the scales of attention in FP8, where it is asked for, and write them for the graph and for readers; where
    not, take them away. Returns how many codes a query or a probability is, 0 for none.
    """
    from ..calibrate.measure.statistics import load_arrays, load_statistics
    from ..quantize.reference.attention import attention_scales, save_scales

    stored = run.model / ATTENTION_SCALES
    for path in (stored, run.attention):
        path.unlink(missing_ok=True)
    if asked.attention == "wide":
        return 0
    queries, _ = load_arrays(run.require(run.queries, "queries"))
    terms: Terms = 2 if run.record().stages["quantize"].options["activation_terms"] == 2 else 1
    scales = attention_scales({**load_statistics(run).tensors, **queries}, clipping_of(run), terms)
    check_dtype({name: each.scale for name, each in scales.tensors.items() if each.terms == 2}, asked)
    with replacing(stored) as partial:
        save_scales(partial, scales)
    write_document(run.attention, scales)
    return terms


def clipping_of(run: Run) -> Clipping:
    """Read back how the run's scales were chosen."""
    chosen = run.record().stages["quantize"].options
    options: dict[str, Any] = {field.name: chosen[field.name] for field in fields(Clipping)}
    return Clipping(**options)


def say(path: Path, findings: "Sequence[Finding]", notes: Notes) -> None:
    """Note what the lint found in the graph just written at `path`; an error is fp8q's own."""
    for finding in findings:
        notes.note(f"{path.name}: {finding}")
    if errors := errors_of(findings):
        raise Fp8qError(f"{path}: the exported graph breaks {len(errors)} rules of the lint, first {errors[0]}")


def errors_of(findings: "Sequence[Finding]") -> "list[Finding]":
    """The findings that are errors."""
    return [finding for finding in findings if finding.severity == "error"]


def has_graphs(run: Run) -> bool:
    """Tell whether the graphs in the run are what this version exported.

    A checkpoint that they no longer fit took them away (`export.graph.reuse`).
    """
    exported = run.record().stages.get("export")
    if exported is None or exported.version != __version__ or exported.refused:
        return False
    return all(
        (run.root / name).is_file() and sha256_file(run.root / name) == digest
        for name, digest in exported.outputs.items()
    )


def exported_options(run: Run) -> ExportOptions:
    """Read back the options that the run's graph was exported with; the defaults where there is none."""
    before = run.record().stages.get("export")
    options: dict[str, Any] = dict(before.options) if before else {}
    return ExportOptions(**options)


def fp8_files(run: Run, *, graph: bool = True) -> dict[str, str]:
    """Name -> SHA-256 of the files that every FP8 runtime reads, found to be what their stages wrote, of what is there
    now. Raises InputError.

    `graph` False: for runtimes that read the checkpoint alone, where no graph can be made of the model.
    """
    run.refuse_stale(*FP8_STAGES)
    hashes = _written(run, "quantize", "export")
    if graph or not run.without_graph():
        run.require(run.onnx, "export")
    return hashes


def files_of(run: Run, precision: Precision) -> dict[str, str]:
    """Return the SHA-256 of each file that the runtimes of a precision read."""
    run.refuse_without_graph()
    if precision == "fp8":
        return fp8_files(run)
    hashes = _written(run, f"export-{precision}")
    run.require(checkpoint_of(run, precision) / GRAPH, f"export-{precision}")
    if run.is_stale(f"export-{precision}"):
        raise InputError(
            f"{checkpoint_of(run, precision)}: was made of other statistics or scales than the run has now; run `fp8q "
            f"export {run.root} --precision {precision}` again"
        )
    return hashes


def _written(run: Run, *stages: str) -> dict[str, str]:
    """Name -> SHA-256 of what `stages` wrote, each file found to be still that.

    Raises InputError, naming the folder where all of it is gone.
    """
    hashes: dict[str, str] = {}
    for by in stages:
        outputs = run.record().stages[by].outputs if by in run.record().stages else {}
        for name, digest in outputs.items():
            if not (folder := (run.root / name).parent).is_dir():
                raise InputError(f"{folder}: is missing; `{command(by, run.root)}` writes it, run that first")
            run.require(run.root / name, by)
            hashes[name] = digest
    return hashes
