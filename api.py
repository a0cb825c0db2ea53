"""The public functions: each is one command of the command line, with the same names and defaults.

They join the stages; the work is in the folders. Every function takes a `Reporter` for its notes and progress (silent
by default), and does nothing that a finished stage of the same inputs, options and version has done already.

    from fp8q.api import calibrate, build_engine, validate
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .calibrate.measure.histogram import Histogram, magnitudes
from .calibrate.measure.statistics import load_statistics
from .core.errors import BackendError, Fp8qError, GateError, InputError, UnfinishedError
from .core.reporter import SILENT, Reporter
from .core.run import Run
from .options import (
    BenchOptions,
    CalibrateOptions,
    Clipping,
    DoctorOptions,
    EngineOptions,
    ExportOptions,
    GenerateOptions,
    ReportOptions,
    RescaleOptions,
    RunOptions,
    ScaleOptions,
    SensitivityOptions,
    ServeOptions,
    TritonOptions,
    TuneOptions,
    ValidateOptions,
)
from .quantize.codes.formats import E4M3, E4M3FNUZ, E5M2, Format
from .quantize.scales.clip import saturation, scale_of, sqnr_db, squared_error, underflow
from .quantize.scales.decisions import load_scales, tensor_scale
from .serve.local.generation import answer
from .serve.loop.request import Completion
from .stages import bench as bench_stage
from .stages import build_engine as build_engine_stage
from .stages import generate as generate_stage
from .stages import report as report_stage
from .stages import sensitivity as sensitivity_stage
from .stages import triton as triton_stage
from .stages import tune as tune_stage
from .stages import validate as validate_stage
from .stages.commands import calibrate as calibrate_command
from .stages.commands import doctor as doctor_command
from .stages.commands import engine as engine_command
from .stages.commands import inspect as inspect_command
from .stages.commands import lint as lint_command
from .stages.commands import merge as merge_command
from .stages.commands import rescale as rescale_command
from .stages.commands import run as run_command
from .stages.commands import serve as serve_command
from .stages.commands.calibrate import Calibration
from .stages.commands.inspect import Inspection
from .stages.shared.opening import open_run

if TYPE_CHECKING:
    from .core.columns import Table
    from .export.engine.info import EngineInfo
    from .serve.web.server import Server
    from .validate.accuracy.continuations import Continuations
    from .validate.accuracy.document import Accuracy
    from .validate.advice.checkup import Checkup
    from .validate.bench.document import Bench
    from .validate.report.plots import Plot
    from .validate.report.verdict import Verdict
    from .validate.sensitivity.document import Sensitivity
    from .validate.tuning.document import Tuning

__all__ = [
    "E4M3",
    "E4M3FNUZ",
    "E5M2",
    "BackendError",
    "BenchOptions",
    "CalibrateOptions",
    "Clipping",
    "DoctorOptions",
    "EngineOptions",
    "ExportOptions",
    "Format",
    "Fp8qError",
    "GateError",
    "GenerateOptions",
    "Histogram",
    "InputError",
    "Inspection",
    "ReportOptions",
    "RescaleOptions",
    "RunOptions",
    "ScaleOptions",
    "SensitivityOptions",
    "ServeOptions",
    "TritonOptions",
    "TuneOptions",
    "UnfinishedError",
    "ValidateOptions",
    "bench",
    "build_engine",
    "calibrate",
    "chat",
    "compare",
    "doctor",
    "engine",
    "export",
    "generate",
    "inspect",
    "lint",
    "load_scales",
    "load_statistics",
    "magnitudes",
    "merge",
    "open_run",
    "report",
    "report_continuations",
    "report_plots",
    "report_tables",
    "report_verdict",
    "run",
    "saturation",
    "scale_of",
    "scales",
    "sensitivity",
    "serve",
    "sqnr_db",
    "squared_error",
    "tensor_scale",
    "triton",
    "tune",
    "underflow",
    "validate",
]  # fmt: skip


def calibrate(
    model: str,
    data: str | Sequence[str],
    out: Path,
    eval_data: str | None = None,
    options: CalibrateOptions = CalibrateOptions(),
    export_options: ExportOptions = ExportOptions(),
    progress: Reporter = SILENT,
) -> Run:
    """Measure `model` on `data`, choose scales, write the FP8 checkpoint and its ONNX graphs into the run directory
    `out`.

    `model`: a directory or a hub name; `data`, `eval_data`: a .txt, .jsonl or .parquet file, a saved `datasets`
    directory, or a hub data set; several of these, each `TEXT` or `TEXT=WEIGHT`, make one corpus in which each has its
    share. Without `eval_data` the last tenth of `data` is held out. Raises InputError for whatever is wrong with these.
    In each of several processes that torchrun started, all measure and the first alone does the rest.
    """
    what = Calibration(model, data, eval_data, RunOptions(options, export_options))
    return calibrate_command.calibrate(out, what, progress)


def merge(
    runs: Sequence[Path], out: Path, model: str | None = None, options: ScaleOptions = ScaleOptions(),
    export_options: ExportOptions = ExportOptions(), progress: Reporter = SILENT,
) -> Run:  # fmt: skip
    """Add what `runs` measured, choose scales, and write FP8 checkpoint and graphs into the run directory `out`; the
    model is not run.

    The source checkpoint is read, for the weights: from `model`, or where one of the runs says it is. Raises InputError
    for runs that cannot be added: of different models, tokenizers, or sizes of windows or batches, or with a batch in
    common.
    """
    return merge_command.merge(runs, out, model, (options, export_options), progress)


def export(path: Path, options: ExportOptions = ExportOptions(), progress: Reporter = SILENT) -> Run:
    """Write `model.onnx` and `model.fp32.onnx` of the checkpoint in the run at `path`, and lint them.

    With `options.precision` bf16 or int8: the same model in that precision, made of the source checkpoint, into
    `baselines/`.
    """
    return rescale_command.export_precision.at(path, progress, options)


def lint(path: Path, run: Path | None = None) -> lint_command.Linted | lint_command.LintedRun:
    """Hold what is at `path` against the rules of `docs/lint.md`: an ONNX file, whoever exported it, a Triton
    repository, an FP8 checkpoint, or all that a run holds; what is found is returned, and nothing is raised for it.

    The graph of a run, in its `model/`, is also held against what the run promises; `run` names the run for a graph
    that lies elsewhere. Needs no torch and no server.
    """
    return lint_command.lint(Path(path), open_run(run) if run else None)


def scales(path: Path, options: RescaleOptions = RescaleOptions(), progress: Reporter = SILENT) -> Run:
    """Choose all scales of the run at `path` again, from its statistics, and write its checkpoint and graphs anew; the
    model is not run.

    What `options` are not given stays as the run has it. The source checkpoint is read, for the weights. Raises
    InputError when it is no longer there, or not the same.
    """
    return rescale_command.scales.at(path, progress, options)


def build_engine(
    path: Path, options: EngineOptions = EngineOptions(), progress: Reporter = SILENT
) -> "list[EngineInfo]":
    """Build an engine of `model.onnx` for each target and prove from the engine which promised products take FP8 on
    both sides.

    With `options.precision` bf16 or int8: of that graph, into `engines/<precision>/`; nothing is promised of it, and
    the engine says what it runs. Raises GateError when fewer than `options.min_fp8_share` of them do, or when that
    cannot be told; BackendError when the runtime is missing.
    """
    return build_engine_stage.build_engine.at(path, progress, options)


def engine(path: Path, targets: Sequence[str] = (), plan: Path | None = None) -> list[engine_command.EngineView]:
    """List what the engines of the run at `path` run, read from them: each matrix product, the kernels around it,
    attention, what stayed wide and why.

    `plan`: read this file instead, as an engine for the one target (what `engines/<target>.sh` built, say). Raises
    nothing for what it finds.
    """
    return engine_command.view_engines(open_run(path), tuple(targets), plan)


def validate(
    path: Path, data: str | None = None, options: ValidateOptions = ValidateOptions(), progress: Reporter = SILENT
) -> "Accuracy":
    """Run the held-out text (or `data`) through BF16 and the FP8 runtimes, and write `accuracy.json`.

    Raises GateError when a runtime's perplexity exceeds BF16's by more than `options.max_ppl_increase` (a fraction),
    and UnfinishedError for a runtime that failed: the others' numbers are written first.
    """
    return validate_stage.validate.at(path, progress, data, options)


def sensitivity(
    path: Path, options: SensitivityOptions = SensitivityOptions(), progress: Reporter = SILENT
) -> "Sensitivity":
    """Measure the loss that each quantized tensor of the run at `path` causes alone, on its calibration windows, worst
    first; written to `sensitivity.json`.
    """
    return sensitivity_stage.sensitivity.at(path, progress, options)


def doctor(path: Path, options: DoctorOptions = DoctorOptions(), progress: Reporter = SILENT) -> "Checkup":
    """The stability checklist of the run at `path`: a verdict for everything that is known to go wrong, the worst
    first, from its files and from a few calibration windows through its BF16 and FP8 models.

    What needs the source model is `unknown` where that is gone. Raises nothing for what is bad (`refuse_bad` in
    `validate.advice.checkup` does).
    """
    return doctor_command.doctor.at(path, progress, options)


def tune(
    path: Path, options: TuneOptions = TuneOptions(), apply: bool = False, progress: Reporter = SILENT
) -> "Tuning":
    """The cheapest mix of one term, two terms and BF16, of rounding and of the cache's form, for the budget of
    `options`: chosen on the calibration windows of the run at `path`, measured on its evaluation text, written to
    `tune.json`. `apply`: make checkpoint and graphs anew by it, where it meets the budget (`met`).

    Raises InputError for `apply` without a budget, and where the source checkpoint is no longer there.
    """
    return tune_stage.tune.at(path, progress, options, apply)


def generate(
    path: Path,
    prompt: str,
    options: GenerateOptions = GenerateOptions(),
    told: Callable[[str], None] = lambda _: None,
) -> Completion:
    """Go on from `prompt` with the FP8 model of the run at `path`, or another that `options.runtime` names; `told` is
    called with each piece of the text as it comes.
    """
    request = generate_stage.asked(prompt, options)
    return answer(generate_stage.open_model(open_run(path), options.runtime, adapter=options.adapter), request, told)


def chat(path: Path, options: GenerateOptions = GenerateOptions()) -> generate_stage.Chat:
    """A conversation with the model of the run at `path`, by the chat template of its tokenizer."""
    return generate_stage.open_chat(open_run(path), options)


def compare(path: Path, prompt: str, options: GenerateOptions = GenerateOptions()) -> generate_stage.Comparison:
    """Go on from `prompt` with FP8 and with the BF16 model that the run at `path` was made of; where they part."""
    return generate_stage.compare_answers(open_run(path), prompt, options)


def serve(
    path: Path, options: ServeOptions = ServeOptions(), ready: "Callable[[Server], object]" = lambda _: None
) -> int:
    """Serve the model of the run at `path` by OpenAI's API until it is told to end; returns how many requests were
    broken off then.

    `ready` is called in the thread that serves once requests are taken in, with the server: its `url`, and `stop()`,
    which any thread and any signal handler may call.
    """
    return serve_command.serve(open_run(path), options, ready)


def bench(
    path: Path,
    against: Sequence[Path] = (),
    options: BenchOptions = BenchOptions(),
    plot: Path | None = None,
    progress: Reporter = SILENT,
) -> "Bench":
    """Time answers of the models that the run at `path` holds (BF16, INT8, FP8), and of the FP8 models of the runs
    `against` it; write `bench.json`, and a picture of it at `plot`.

    Raises InputError for runs of different models, and for sizes that the model does not take.
    """
    return bench_stage.bench.at(path, progress, against, options, plot)


def triton(path: Path, options: TritonOptions = TritonOptions(), progress: Reporter = SILENT) -> list[Path]:
    """Write the Triton model repository of the run at `path`, in RUN/triton or at `options.out`; returns its files.

    Raises InputError for a directory there that is not empty and that fp8q did not write.
    """
    return triton_stage.triton.at(path, progress, options)


def report(path: Path, options: ReportOptions = ReportOptions(), progress: Reporter = SILENT) -> list[Path]:
    """Write `report.html` and `report.ipynb` of the run at `path`, beside the runs that `options.compare` names;
    returns their paths.

    Where the source model is here, both models go on from words of the evaluation text first.
    """
    return report_stage.report.at(path, progress, options)


def report_tables(path: Path, compare: Sequence[Path] = ()) -> "dict[str, Table[Any]]":
    """The report's tables of the run at `path`, beside the runs at `compare`; each shows itself in a notebook."""
    from .validate.report.report import report_tables

    return report_tables(open_run(path), [open_run(other) for other in compare])


def report_verdict(path: Path) -> "Verdict":
    """Is the model of the run at `path` still the same? It shows itself in a notebook."""
    from .validate.report.report import report_verdict

    return report_verdict(open_run(path))


def report_continuations(path: Path) -> "Continuations":
    """Load the texts that BF16 and FP8 of the run at `path` write after the same words; a notebook shows them."""
    from .validate.report.report import report_continuations

    return report_continuations(open_run(path))


def report_plots(path: Path) -> "dict[str, Plot]":
    """The report's plots of the run at `path`; each shows itself in a notebook."""
    from .validate.report.report import report_plots

    return report_plots(open_run(path))


def inspect(
    path: Path, delayed: Clipping | None = None, against: str | None = None, progress: Reporter = SILENT
) -> Inspection:
    """Every matrix product and cache tensor of the run at `path` (its scale and what that does, or why it stays in
    BF16), and what stands out.

    A cache tensor in BF16 is shown at the scale that the run's own method would choose, so that what FP8 would do to it
    is seen before.
    `delayed`: also how often each tensor would have saturated under that amax history. `against`: also measure this
    text with the float model, as many windows as were calibrated on, and hold it against the chosen scales.
    """
    return inspect_command.inspect.at(path, progress, delayed, against)


def run(
    model: str,
    data: str | Sequence[str],
    out: Path,
    eval_data: str | None = None,
    options: RunOptions = RunOptions(),
    progress: Reporter = SILENT,
) -> Run:
    """All stages, one after the other: the arguments are those of `calibrate`.

    A gate that is not met, and a runtime that failed beside others, are raised when all is written.
    """
    return run_command.run_all(out, Calibration(model, data, eval_data, options, whole_run=True), progress)
