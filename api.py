"""The public functions: one for each command of the command line, with the same names and defaults.

Every function takes a `Reporter` for its notes and progress (by default the logger `fp8q`, at INFO), and skips stages
that are finished with the same inputs, options and version.

    from fp8q.api import calibrate, build_engine, validate
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .calibrate.measure.histogram import Histogram, magnitudes
from .calibrate.measure.statistics import load_statistics
from .core.errors import BackendError, Fp8qError, GateError, InputError, UnfinishedError
from .core.reporter import LOGGED, SILENT, Reporter
from .core.run import Run
from .options import (
    BenchOptions,
    CalibrateOptions,
    Clipping,
    CompareOptions,
    DistillOptions,
    DoctorOptions,
    EngineOptions,
    EvaluateOptions,
    ExportOptions,
    GenerateOptions,
    GradientFormat,
    ReportOptions,
    RescaleOptions,
    RunOptions,
    ScaleOptions,
    SensitivityOptions,
    ServeOptions,
    TritonOptions,
    TuneOptions,
    ValidateOptions,
    WatchOptions,
)
from .quantize.codes.formats import E4M3, E4M3FNUZ, E5M2, Format
from .quantize.scales.clip import saturation, scale_of, sqnr_db, squared_error, underflow
from .quantize.scales.decisions import load_scales, tensor_scale
from .serve.local.generation import answer_request
from .serve.loop.request import GeneratedAnswer
from .stages import bench as bench_stage
from .stages import build_engine as build_engine_stage
from .stages import compare as compare_stage
from .stages import distill as distill_stage
from .stages import evaluate as evaluate_stage
from .stages import generate as generate_stage
from .stages import learned_adapter as adapter_stage
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
from .stages.commands import load as load_command
from .stages.commands import merge as merge_command
from .stages.commands import rescale as rescale_command
from .stages.commands import run as run_command
from .stages.commands import serve as serve_command
from .stages.commands.calibrate import Calibration
from .stages.commands.inspect import Inspection
from .stages.commands.load import ProductMode, WideType
from .stages.commands.results import report_continuations, report_plots, report_tables, report_verdict
from .stages.commands.training import TrainingInspection, inspect_training, report_training, watch
from .stages.shared.opening import open_run

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from .export.engine.info import EngineInfo
    from .quantize.learning.document import AdapterLearning, Distillation
    from .serve.web.server import Server
    from .validate.accuracy.document import Accuracy
    from .validate.advice.checkup import Checkup
    from .validate.bench.document import Bench
    from .validate.endpoint.document import ModelComparison
    from .validate.sensitivity.document import Sensitivity
    from .validate.tasks.document import TaskScores
    from .validate.tuning.document import Tuning

__all__ = [
    "E4M3", "E4M3FNUZ", "E5M2", "BackendError", "BenchOptions", "CalibrateOptions", "Clipping", "CompareOptions",
    "DistillOptions", "DoctorOptions", "EngineOptions", "EvaluateOptions", "ExportOptions", "Format", "Fp8qError",
    "GateError", "GenerateOptions", "GradientFormat", "Histogram", "InputError", "Inspection", "ReportOptions",
    "RescaleOptions", "RunOptions", "ScaleOptions", "SensitivityOptions", "ServeOptions", "TrainingInspection",
    "TritonOptions", "TuneOptions", "UnfinishedError", "ValidateOptions", "WatchOptions", "bench", "build_engine",
    "calibrate", "chat", "compare", "compare_answers", "distill", "doctor", "engine", "evaluate", "export", "generate",
    "inspect", "inspect_training", "lint", "load", "load_scales", "load_statistics", "magnitudes", "merge", "open_run",
    "report", "report_continuations", "report_plots", "report_tables", "report_training", "report_verdict", "run",
    "saturation", "scale_of", "scales", "sensitivity", "serve", "sqnr_db", "squared_error", "tensor_scale", "triton",
    "tune", "underflow", "validate", "watch",
]  # fmt: skip


def calibrate(
    model: str,
    data: str | Sequence[str],
    out: Path,
    eval_data: str | None = None,
    options: CalibrateOptions = CalibrateOptions(),
    export_options: ExportOptions = ExportOptions(),
    progress: Reporter = LOGGED,
) -> Run:
    """Measure `model` on `data`, choose scales, and write the FP8 checkpoint and its ONNX graphs into the run directory
    `out`.

    `model`: a directory or a hub name. `data`, `eval_data`: a file of text (`docs/corpora.md`), a saved `datasets`
    directory, or a hub data set; a list of these, each `TEXT` or `TEXT=WEIGHT`, makes one corpus in which each has its
    share. Without `eval_data` the last tenth of `data` is held out.

    Raises InputError for any fault of these. In several processes that torchrun started, all measure and the first
    alone does the rest.
    """
    what = Calibration(model, data, eval_data, RunOptions(options, export_options))
    return calibrate_command.calibrate(out, what, progress)


def merge(
    runs: Sequence[Path], out: Path, model: str | None = None, options: ScaleOptions = ScaleOptions(),
    export_options: ExportOptions = ExportOptions(), progress: Reporter = LOGGED,
) -> Run:  # fmt: skip
    """Add the measurements of `runs`, choose scales, and write FP8 checkpoint and graphs into the run directory `out`.

    The model is not run; its weights are read from the source checkpoint, at `model` or at the path in the runs'
    records. Raises InputError for runs that cannot be added: of different models, tokenizers, or sizes of windows or
    batches, or with a batch in common.
    """
    return merge_command.merge(runs, out, model, (options, export_options), progress)


def export(path: Path, options: ExportOptions = ExportOptions(), progress: Reporter = LOGGED) -> Run:
    """Write `model.onnx` and `model.fp32.onnx` of the checkpoint in the run at `path`, and lint them.

    With `options.precision` bf16 or int8: export the source checkpoint in that precision, into `baselines/`.
    """
    return rescale_command.export_precision.at(path, progress, options)


def lint(path: Path, run: Path | None = None) -> lint_command.Linted | lint_command.LintedRun:
    """Check an ONNX file, a Triton repository, an FP8 checkpoint or a whole run against the rules of `docs/lint.md`.

    The files may come from any exporter. The graph of a run, in its `model/`, is also checked against the run's scales;
    `run` names the run of a graph that lies elsewhere. The findings are returned, and raise no error. Needs no torch
    and no server.
    """
    return lint_command.lint(Path(path), open_run(run) if run else None)


def scales(path: Path, options: RescaleOptions = RescaleOptions(), progress: Reporter = LOGGED) -> Run:
    """Choose all scales of the run at `path` again, from its statistics, and write its checkpoint and graphs anew.

    The model is not run; its weights are read from the source checkpoint. Omitted `options` keep the run's values.
    Raises InputError when the source checkpoint is missing or has changed.
    """
    return rescale_command.scales.at(path, progress, options)


def build_engine(
    path: Path, options: EngineOptions = EngineOptions(), progress: Reporter = LOGGED
) -> "list[EngineInfo]":
    """Build an engine of `model.onnx` for each target, and prove from the engine which promised products run in FP8.

    With `options.precision` bf16 or int8: build that graph, into `engines/<precision>/`; no product is promised in it.
    Raises GateError when the share of products in FP8 is below `options.min_fp8_share` or unknown; BackendError when
    the runtime is missing.
    """
    return build_engine_stage.build_engine.at(path, progress, options)


def engine(path: Path, targets: Sequence[str] = (), plan: Path | None = None) -> list[engine_command.EngineView]:
    """Read the kernels of the run's engines: each matrix product, the kernels around it, attention, and wide products.

    `targets`: the targets to read (none: all). `plan`: read this file instead, as an engine for the one target, such as
    `engines/<target>.sh` builds. Findings raise no error.
    """
    return engine_command.view_engines(open_run(path), tuple(targets), plan)


def validate(
    path: Path, data: str | None = None, options: ValidateOptions = ValidateOptions(), progress: Reporter = LOGGED
) -> "Accuracy":
    """Run the held-out text (or `data`) through BF16 and the FP8 runtimes, and write `accuracy.json`.

    Runtimes that all need no torch are added to what is there, held against what the run keeps of the others.

    Raises GateError when a runtime's perplexity exceeds BF16's by more than `options.max_ppl_increase` (a fraction),
    and UnfinishedError for a runtime that failed; the results of the others are written first.
    """
    return validate_stage.validate.at(path, progress, data, options)


def evaluate(path: Path, options: EvaluateOptions, progress: Reporter = SILENT) -> "TaskScores":
    """Ask BF16 and FP8 of the run at `path` the tasks of lm-eval that `options` names, compare their answers question
    by question (flips, McNemar's exact test, recovery with its interval), and write `evaluation.json`.

    Answers stay in the run, by task and model, and are not asked for again. Raises InputError for tasks that are not
    there or cannot be loaded; BackendError where lm-eval is not installed, or a server does not answer.
    """
    return evaluate_stage.evaluate_tasks.at(path, progress, options)


def distill(
    path: Path,
    data: str | None = None,
    options: DistillOptions = DistillOptions(),
    progress: Reporter = LOGGED,
) -> "Distillation | AdapterLearning":
    """Learn the codes of the weights of the run at `path` from its float model, on the text `data` or on the
    calibration text; then write checkpoint and graphs with them. The held-out divergence decides: nothing changes
    where it does not fall.

    With `train="adapter"` a LoRA adapter is learned on the checkpoint instead, which stays as it is, and written to
    `adapter/`.

    A killed call goes on at the last saved step. Raises InputError for text that the run is evaluated on, too little
    of it, a source model that is gone, and a model that is too large for the memory.
    """
    if options.train == "adapter":
        return adapter_stage.learn_adapter.at(path, progress, data, options)
    return distill_stage.distill.at(path, progress, data, options)


def sensitivity(
    path: Path, options: SensitivityOptions = SensitivityOptions(), progress: Reporter = LOGGED
) -> "Sensitivity":
    """Measure the loss that each quantized tensor of the run at `path` causes alone, on calibration windows.

    The result is sorted, worst first, and written to `sensitivity.json`.
    """
    return sensitivity_stage.sensitivity.at(path, progress, options)


def doctor(path: Path, options: DoctorOptions = DoctorOptions(), progress: Reporter = LOGGED) -> "Checkup":
    """Run the stability checklist on the run at `path`: a verdict for each known failure, the worst first.

    It checks the run's files, and runs a few calibration windows through its BF16 and FP8 models. Checks that need a
    missing source model are `unknown`. Bad verdicts raise no error (`refuse_bad` in `validate.advice.checkup` does).
    """
    return doctor_command.doctor.at(path, progress, options)


def tune(
    path: Path, options: TuneOptions = TuneOptions(), apply: bool = False, progress: Reporter = LOGGED
) -> "Tuning":
    """Find the cheapest mix of one term, tails, two terms and BF16, of rounding and of the cache's form, within the
    budget of `options`.

    It is chosen on calibration windows of the run at `path`, measured on its evaluation text, and written to
    `tune.json`. `apply`: make checkpoint and graphs anew with it, if it meets the budget (`met`). Raises InputError for
    `apply` without a budget, and where the source checkpoint is missing.
    """
    return tune_stage.tune.at(path, progress, options, apply)


def generate(
    path: Path,
    prompt: str,
    options: GenerateOptions = GenerateOptions(),
    told: Callable[[str], None] = lambda _: None,
) -> GeneratedAnswer:
    """Go on from `prompt` with the FP8 model of the run at `path`, or another that `options.runtime` names; `told` is
    called with each piece of the text as it comes.
    """
    request = generate_stage.asked(prompt, options)
    return answer_request(
        generate_stage.open_model(open_run(path), options.runtime, adapter=options.adapter), request, told
    )


def load(
    path: Path,
    dtype: WideType = "bfloat16",
    mode: ProductMode = "fast",
    device: "str | torch.device | None" = None,
    as_served: int | None = None,
    adapter: str | None = None,
) -> "PreTrainedModel":
    """Load the FP8 model of the run at `path` as Hugging Face's, multiplied as fp8q's reference multiplies it.

    One term, two terms, tails and FP8 weights alone are each computed as such, and an FP8 cache holds codes; `generate`
    needs no further argument. `dtype`: the type of all but FP8 products. `mode`: `exact` keeps the sums of FP8 products
    in FP32, `fast` rounds them to BF16 on CPUs, as `validate` does. `device` None: the first GPU, or the CPU.
    `as_served`: in a call without a cache so many tokens are a prompt, and the others stand for decoded tokens, which
    matters to tails alone; None: all are a prompt. `adapter`: the adapter that is on.

    Raises InputError where there is no such run, device or adapter, and for files that their stages did not write.
    """
    return load_command.load_fp8_model.at(path, SILENT, (dtype, mode), device, as_served, adapter)


def chat(path: Path, options: GenerateOptions = GenerateOptions()) -> generate_stage.Chat:
    """Open a conversation with the model of the run at `path`, by the chat template of its tokenizer."""
    return generate_stage.open_chat(open_run(path), options)


def compare(path: Path, options: CompareOptions, progress: Reporter = LOGGED) -> "ModelComparison":
    """Ask the server at `options.url`, or the checkpoint at `options.model`, for log-probabilities of the evaluation
    text of the run at `path`, judge whether it is the model that was validated, and write `compare.json`.

    A verdict raises no error (`check_validated` in `stages.compare` does). Raises InputError for a run without the
    likeliest tokens that `validate` keeps, and for a server with another tokenizer or too short a context; BackendError
    for one that does not answer.
    """
    return compare_stage.compare_served.at(path, progress, options)


def compare_answers(path: Path, prompt: str, options: GenerateOptions = GenerateOptions()) -> generate_stage.Comparison:
    """Go on from `prompt` with FP8 and with the BF16 model that the run at `path` was made of; where they part."""
    return generate_stage.compare_both(open_run(path), prompt, options)


def serve(
    path: Path, options: ServeOptions = ServeOptions(), ready: "Callable[[Server], object]" = lambda _: None
) -> int:
    """Serve the model of the run at `path` by OpenAI's API until it is stopped; return the number of requests it cut
    off.

    `ready` is called once the server accepts requests, in the serving thread, with the server: its `url`, and `stop()`,
    which any thread and any signal handler may call.
    """
    return serve_command.serve(open_run(path), options, ready)


def bench(
    path: Path,
    against: Sequence[Path] = (),
    options: BenchOptions = BenchOptions(),
    plot: Path | None = None,
    progress: Reporter = LOGGED,
) -> "Bench":
    """Measure the time of answers of the run at `path` in BF16, INT8 and FP8, and of the FP8 models of the runs
    `against`.

    Writes `bench.json`, and a plot at `plot`. Raises InputError for runs of different models, and for sizes beyond the
    model's limits.
    """
    return bench_stage.bench.at(path, progress, against, options, plot)


def triton(path: Path, options: TritonOptions = TritonOptions(), progress: Reporter = LOGGED) -> list[Path]:
    """Write the Triton model repository of the run at `path`, to RUN/triton or `options.out`; return its files.

    Raises InputError for a directory with files that fp8q did not write.
    """
    return triton_stage.triton.at(path, progress, options)


def report(path: Path, options: ReportOptions = ReportOptions(), progress: Reporter = LOGGED) -> list[Path]:
    """Write `report.html` and `report.ipynb` of the run at `path`, compared with the runs in `options.compare`.

    Returns their paths. Where the source model is available, both models first continue prompts of the evaluation text.
    """
    return report_stage.report.at(path, progress, options)


def inspect(
    path: Path, delayed: Clipping | None = None, against: str | None = None, progress: Reporter = LOGGED
) -> Inspection:
    """List every matrix product and cache tensor of the run at `path`, with its scale and loss, and the outliers.

    A tensor that stays in BF16 has the reason. A cache tensor in BF16 is shown at the scale that the run's method would
    choose. `delayed`: also simulate this amax history, and count how often each tensor would have saturated. `against`:
    also measure this text with the float model, as many windows as in calibration, and compare it with the chosen
    scales.
    """
    return inspect_command.inspect.at(path, progress, delayed, against)


def run(
    model: str,
    data: str | Sequence[str],
    out: Path,
    eval_data: str | None = None,
    options: RunOptions = RunOptions(),
    progress: Reporter = LOGGED,
) -> Run:
    """Run all stages, one after the other; the arguments are those of `calibrate`.

    GateError for a gate that is not met, and UnfinishedError for a runtime that failed, are raised after everything is
    written.
    """
    return run_command.run_all(out, Calibration(model, data, eval_data, options, whole_run=True), progress)
