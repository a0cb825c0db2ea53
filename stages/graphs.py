"""The stage `export`: both ONNX graphs beside the checkpoint; and the files that every FP8 runtime reads."""

from typing import Literal

from .. import __version__
from ..errors import Fp8qError
from ..options import ExportOptions
from ..run import Run, sha256_file
from .steps import Notes, stage


def export(run: Run, dtype: Literal["bf16", "fp16"], notes: Notes) -> None:
    """The stage `export`: both ONNX graphs beside the checkpoint, linted."""
    from ..calibrate.statistics import StatisticsRecord
    from ..export.lint import lint
    from ..export.model import export_model
    from ..quantize.scales import load_scales
    from ..quantize.stored import stored_scales
    from ..run import read_document

    scales = load_scales(run)
    written = run.record().stages["quantize"].outputs
    inputs = {name: digest for name, digest in written.items() if name != str(run.scales.relative_to(run.root))} | {"scales.json": written["scales.json"]}
    options = {"dtype": dtype}
    if run.is_current("export", inputs, options):
        return
    for name in inputs:
        run.require(run.root / name, "quantize")
    record = read_document(run.require(run.statistics_json, "measure"), StatisticsRecord)
    carried = has_graphs(run) and run.record().stages["export"].options == options
    with stage(run, "export", inputs, options, notes) as log:
        log.outputs += [run.onnx, run.onnx_fp32] if carried else export_model(run, record, scales, dtype, notes)
        promised = {module: activation.scale for module, activation in scales.activations.items()}
        weight_scales = stored_scales(run.model, promised)
        for path in log.outputs:
            findings = lint(path, promised, weight_scales)
            for finding in findings:
                notes.note(f"{path.name}: {finding}")
            errors = [finding for finding in findings if finding.severity == "error"]
            if errors:
                raise Fp8qError(f"{path}: the exported graph breaks {len(errors)} rules of the lint, first {errors[0]}")


def has_graphs(run: Run) -> bool:
    """Whether the graphs in the run are what this version exported. A checkpoint that they no longer fit took them away (`export.carry`)."""
    exported = run.record().stages.get("export")
    if exported is None or exported.version != __version__:
        return False
    return all((run.root / name).is_file() and sha256_file(run.root / name) == digest for name, digest in exported.outputs.items())


def exported_dtype(run: Run) -> Literal["bf16", "fp16"]:
    """The type the run's graph computes in; the default where there is none."""
    before = run.record().stages.get("export")
    return "fp16" if before and before.options["dtype"] == "fp16" else ExportOptions.dtype


def fp8_files(run: Run) -> dict[str, str]:
    """Name -> SHA-256 of the files that every FP8 runtime reads, found to be what their stages wrote, of what is there now. Raises InputError."""
    run.refuse_stale("measure", "quantize", "export")
    hashes: dict[str, str] = {}
    for by in ("quantize", "export"):
        outputs = run.record().stages[by].outputs if by in run.record().stages else {}
        for name, digest in outputs.items():
            run.require(run.root / name, by)
            hashes[name] = digest
    run.require(run.onnx, "export")
    return hashes
