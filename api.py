"""The public functions: one for each command of the command line, with the same names and defaults.

In every function options go by name (`calibrate(…, preset="exact", samples=64)`), as an object of their class, or both,
and a name overrides; paths are text or `Path`. Every function takes a `Reporter` for its notes and progress (by default
the logger `fp8q`, at INFO), and skips stages that are finished with the same inputs, options and version. A function
imports its stage once the run is open and the libraries that it needs are there, so that nothing heavy is loaded here.
Type checkers and editors know the names and types of all options (`options/keywords.py`), and the types of results can
be imported from here as well.

    from fp8q.api import calibrate, build_engine, validate
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

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
    ConvertOptions,
    DistillOptions,
    DoctorOptions,
    EngineOptions,
    EvaluateOptions,
    ExportOptions,
    GenerateOptions,
    GradientFormat,
    LintOptions,
    PairOptions,
    PushOptions,
    QuantizeOptions,
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
from .options.settings import with_settings, with_settings_of_both
from .quantize.codes.formats import E4M3, E4M3FNUZ, E5M2, Format
from .quantize.scales.activation_scales import tensor_scale
from .quantize.scales.clip import saturation, scale_of, sqnr_db, squared_error, underflow
from .quantize.scales.decisions import load_scales
from .quantize.training.training_log import read_log
from .stages.inspect import Inspection
from .stages.pipeline.stage import CALIBRATE_MODULES, SERVE_MODULES, needs
from .stages.shared.opening import open_run, run_at, run_into
from .validate.advice.training_checks import TrainingInspection, training_checkup

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    from .core.columns import Table as Table
    from .export.engine.info import EngineInfo as EngineInfo
    from .options import keywords
    from .quantize.learning.document import AdapterLearning as AdapterLearning
    from .quantize.learning.document import Distillation as Distillation
    from .quantize.sensitivity.document import Sensitivity as Sensitivity
    from .quantize.training.watch import TrainingRecorder as TrainingRecorder
    from .serve.loop.request import GeneratedAnswer as GeneratedAnswer
    from .serve.web.server import Server as Server
    from .stages.convert import Converted as Converted
    from .stages.engine import EngineView as EngineView
    from .stages.generate import Chat as Chat
    from .stages.generate import Comparison as Comparison
    from .stages.lint import Linted as Linted
    from .stages.lint import LintedRun as LintedRun
    from .stages.load import FloatType as FloatType
    from .stages.load import GemmMode as GemmMode
    from .stages.loaded_texts import Texts as Texts
    from .stages.push import Pushed as Pushed
    from .validate.accuracy.continuations import Continuations as Continuations
    from .validate.accuracy.document import Accuracy as Accuracy
    from .validate.accuracy.document import Verdict as Verdict
    from .validate.advice.checkup import Checkup as Checkup
    from .validate.bench.document import Bench as Bench
    from .validate.endpoint.document import ModelComparison as ModelComparison
    from .validate.pair.document import PairComparison as PairComparison
    from .validate.report.plots import Plot as Plot
    from .validate.tasks.document import TaskScores as TaskScores
    from .validate.tuning.document import Tuning as Tuning

__all__ = [
    "E4M3", "E4M3FNUZ", "E5M2", "BackendError", "BenchOptions", "CalibrateOptions", "Clipping", "CompareOptions",
    "ConvertOptions", "DistillOptions", "DoctorOptions", "EngineOptions", "EvaluateOptions", "ExportOptions", "Format",
    "Fp8qError", "GateError", "GenerateOptions", "GradientFormat", "Histogram", "InputError", "Inspection",
    "LintOptions", "PairOptions", "PushOptions", "QuantizeOptions", "ReportOptions", "RescaleOptions", "RunOptions",
    "ScaleOptions", "SensitivityOptions", "ServeOptions", "TrainingInspection", "TritonOptions", "TuneOptions",
    "UnfinishedError", "ValidateOptions", "WatchOptions", "bench", "build_engine", "calibrate", "chat", "compare",
    "compare_answers", "compare_checkpoints", "compare_endpoint", "convert", "distill", "doctor", "engine", "evaluate",
    "export", "generate", "inspect", "inspect_training", "lint", "load", "load_scales", "load_statistics", "magnitudes",
    "merge", "open_run", "push", "quantize", "report", "report_continuations", "report_plots", "report_tables",
    "report_training", "report_verdict", "run", "saturation", "scale_of", "scales", "sensitivity", "serve", "sqnr_db",
    "squared_error", "tensor_scale", "triton", "tune", "underflow", "validate", "watch",
]  # fmt: skip


#: The types of what functions return, by the modules that have them; `from fp8q.api import Accuracy` loads that module.
RETURNED = {
    "Table": ".core.columns",
    "EngineInfo": ".export.engine.info",
    "AdapterLearning": ".quantize.learning.document",
    "Distillation": ".quantize.learning.document",
    "TrainingRecorder": ".quantize.training.watch",
    "GeneratedAnswer": ".serve.loop.request",
    "Server": ".serve.web.server",
    "Converted": ".stages.convert",
    "EngineView": ".stages.engine",
    "Chat": ".stages.generate",
    "Comparison": ".stages.generate",
    "Linted": ".stages.lint",
    "LintedRun": ".stages.lint",
    "FloatType": ".stages.load",
    "GemmMode": ".stages.load",
    "Texts": ".stages.loaded_model",
    "Pushed": ".stages.push",
    "Continuations": ".validate.accuracy.continuations",
    "Accuracy": ".validate.accuracy.document",
    "Verdict": ".validate.accuracy.document",
    "Checkup": ".validate.advice.checkup",
    "Bench": ".validate.bench.document",
    "ModelComparison": ".validate.endpoint.document",
    "PairComparison": ".validate.pair.document",
    "Plot": ".validate.report.plots",
    "Sensitivity": ".quantize.sensitivity.document",
    "TaskScores": ".validate.tasks.document",
    "Tuning": ".validate.tuning.document",
}


def __getattr__(name: str) -> Any:
    """Load the type of a result: its module may be heavy, so it is loaded for whoever asks for it."""
    if name not in RETURNED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(RETURNED[name], __package__), name)


def calibrate(
    model: str | Path, data: str | Path | Sequence[str], out: str | Path, eval_data: str | Path | None = None,
    options: CalibrateOptions = CalibrateOptions(), export_options: ExportOptions = ExportOptions(),
    progress: Reporter = LOGGED, **settings: "Unpack[keywords.CalibrateSettings]",
) -> Run:  # fmt: skip
    """Measure `model` on `data`, choose scales, and write the FP8 checkpoint and its ONNX graphs into the run directory
    `out`.

    `model`: a directory or a hub name. `data`, `eval_data`: a file of text (`docs/corpora.md`), a saved `datasets`
    directory, or a hub data set; a list of these, each `TEXT` or `TEXT=WEIGHT`, makes one corpus in which each has its
    share. Without `eval_data` the last tenth of `data` is held out.

    Raises InputError for any fault of these. In several processes that torchrun started, all measure and the first
    alone does the rest.
    """
    with run_into(out, progress) as (run, notes):
        from .stages.calibrate import calibrate, calibration_of

        chosen = RunOptions(*with_settings_of_both(options, export_options, settings))
        return calibrate(run, notes, calibration_of(model, data, eval_data, chosen))


def quantize(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | ProcessorMixin", texts: "Texts", out: str | Path,
    options: QuantizeOptions = QuantizeOptions(), progress: Reporter = LOGGED,
    **settings: "Unpack[keywords.QuantizeSettings]",
) -> Run:  # fmt: skip
    """Calibrate a `model` that is loaded, as `calibrate` does one in files, into the run directory `out`; `load(out)`
    gives the FP8 model back.

    `tokenizer`: the model's, or the processor of a model that sees, whose files the checkpoint then has too. `texts`: a
    list of documents, of lists of token ids, or of chats (with `chat_template=True`), what a tokenizer returned, or a
    `datasets.Dataset`; of a `datasets.DatasetDict` the split `train` is calibrated on, and `validation` or `test`
    evaluated on. Parts of chats may be images, as `{"type": "image", "image": …}` with a path or an image of Pillow,
    where a processor is given; text is needed beside them. Model and texts are written into the run, below `loaded/`:
    that takes the size of the model on disk, and the run needs nothing else later. The model stays as it is;
    calibration loads another, so leave room for it on a GPU.

    Raises InputError, before anything is written, for a model that is quantized already, has adapters, hooks,
    offloaded weights or modules that its config does not make, and in several processes.
    """
    with run_into(out, progress) as (run, notes):
        from .stages.loaded_model import InMemory, quantize_loaded

        return quantize_loaded(run, notes, InMemory(model, tokenizer, texts), with_settings(options, settings))


def convert(
    model: str | Path, out: str | Path, options: ConvertOptions = ConvertOptions(), progress: Reporter = LOGGED,
    **settings: "Unpack[keywords.ConvertSettings]",
) -> "Converted":  # fmt: skip
    """Write an FP8 checkpoint of `model`, a directory or a hub name, into the directory `out`: without text and
    without running a model. Its class in transformers says what is a linear layer; names and shapes do without one.

    Every code is proven. A killed call goes on where it stopped; of a call that fails nothing is left. Raises
    InputError for a source that is quantized already, pickled or damaged, for rules and patterns that match nothing,
    and for an `out` that holds anything else than a convert in progress.
    """
    needs("calibrate", ("torch", "transformers"))
    from .stages.convert import convert

    return convert(str(model), Path(out), with_settings(options, settings), progress)


def merge(
    runs: Sequence[str | Path], out: str | Path, model: str | Path | None = None,
    options: ScaleOptions = ScaleOptions(), export_options: ExportOptions = ExportOptions(),
    progress: Reporter = LOGGED, **settings: "Unpack[keywords.MergeSettings]",
) -> Run:  # fmt: skip
    """Add the measurements of `runs`, choose scales, and write FP8 checkpoint and graphs into the run directory `out`.

    The model is not run; its weights are read from the source checkpoint, at `model` or at the path in the runs'
    records. Raises InputError for runs that cannot be added: of different models, tokenizers, or sizes of windows or
    batches, or with a batch in common.
    """
    with run_into(out, progress) as (run, notes):
        from .stages.merge import merge

        chosen = with_settings_of_both(options, export_options, settings)
        return merge(run, notes, list(map(Path, runs)), None if model is None else str(model), chosen)


def export(
    path: str | Path,
    options: ExportOptions = ExportOptions(),
    progress: Reporter = LOGGED,
    **settings: "Unpack[keywords.ExportSettings]",
) -> Run:
    """Write `model.onnx` and `model.fp32.onnx` of the checkpoint in the run at `path`, and lint them.

    With `options.precision` bf16 or int8: export the source checkpoint in that precision, into `baselines/`.
    """
    with run_at(path, progress) as (run, notes):
        from .stages.export import export_precision

        return export_precision(run, notes, with_settings(options, settings))


def lint(
    path: str | Path,
    run: str | Path | None = None,
    options: LintOptions = LintOptions(),
    **settings: "Unpack[keywords.LintSettings]",
) -> "Linted | LintedRun":
    """Check an ONNX file, a Triton repository, an FP8 checkpoint or a whole run against the rules of `docs/lint.md`.

    The files may come from any exporter. The graph of a run, in its `model/`, is also checked against the run's scales;
    `run` names the run of a graph that lies elsewhere. With a server in `options` a checkpoint, of any form or none, is
    held against what that server does with it. The findings are returned, and raise no error. Needs no torch and no
    server.
    """
    from .stages.lint import lint

    return lint(Path(path), open_run(run) if run else None, with_settings(options, settings))


def scales(
    path: str | Path,
    options: RescaleOptions = RescaleOptions(),
    progress: Reporter = LOGGED,
    **settings: "Unpack[keywords.ScalesSettings]",
) -> Run:
    """Choose all scales of the run at `path` again, from its statistics, and write its checkpoint and graphs anew.

    The model is not run; its weights are read from the source checkpoint. Omitted `options` keep the run's values.
    Raises InputError when the source checkpoint is missing or has changed.
    """
    with run_at(path, progress) as (run, notes):
        from .stages.calibrate import scales

        return scales(run, notes, with_settings(options, settings))


def build_engine(
    path: str | Path, options: EngineOptions = EngineOptions(), progress: Reporter = LOGGED,
    **settings: "Unpack[keywords.BuildEngineSettings]",
) -> "list[EngineInfo]":  # fmt: skip
    """Build an engine of `model.onnx` for each target, and prove from the engine which of the expected GEMMs run in
    FP8.

    With `options.precision` bf16 or int8: build that graph, into `engines/<precision>/`; no GEMM is expected on FP8 in
    it. Raises GateError when the share of GEMMs in FP8 is below `options.min_fp8_share` or unknown; BackendError when
    the runtime is missing.
    """
    with run_at(path, progress, modules=()) as (run, notes):
        from .stages.build_engine import build_engine

        return build_engine(run, notes, with_settings(options, settings))


def engine(path: str | Path, targets: Sequence[str] = (), plan: str | Path | None = None) -> "list[EngineView]":
    """Read the kernels of the run's engines: each GEMM, the kernels around it, attention, and GEMMs not in FP8.

    `targets`: the targets to read (none: all). `plan`: read this file instead, as an engine for the one target, such as
    `engines/<target>.sh` builds. Findings raise no error.
    """
    from .stages.engine import view_engines

    return view_engines(open_run(path), tuple(targets), None if plan is None else Path(plan))


def validate(
    path: str | Path, data: str | Path | None = None, options: ValidateOptions = ValidateOptions(),
    progress: Reporter = LOGGED, **settings: "Unpack[keywords.ValidateSettings]",
) -> "Accuracy":  # fmt: skip
    """Run the held-out text (or `data`) through BF16 and the FP8 runtimes, and write `accuracy.json`.

    Runtimes that all need no torch are added to what is there, held against what the run keeps of the others.

    Raises GateError where the verdict is worse and one of its limits was asked for (`max_ppl_increase`, `max_kl`,
    `max_flips`), and UnfinishedError for a runtime that failed; the results of the others are written first.
    """
    with run_at(path, progress, modules=()) as (run, notes):
        from .stages.validate import validate

        return validate(run, notes, None if data is None else str(data), with_settings(options, settings))


def evaluate(
    path: str | Path,
    options: EvaluateOptions = EvaluateOptions(),
    progress: Reporter = SILENT,
    **settings: "Unpack[keywords.EvaluateSettings]",
) -> "TaskScores":
    """Ask BF16 and FP8 of the run at `path` the tasks of lm-eval that `options` names, compare their answers question
    by question (flips, McNemar's exact test, recovery with its interval), and write `evaluation.json`.

    Answers stay in the run, by task and model, and are not asked for again. Raises InputError for tasks that are not
    there or cannot be loaded; BackendError where lm-eval is not installed, or a server does not answer.
    """
    with run_at(path, progress) as (run, notes):
        from .stages.evaluate import evaluate_tasks

        return evaluate_tasks(run, notes, with_settings(options, settings))


def distill(
    path: str | Path, data: str | Path | None = None, options: DistillOptions = DistillOptions(),
    progress: Reporter = LOGGED, **settings: "Unpack[keywords.DistillSettings]",
) -> "Distillation | AdapterLearning":  # fmt: skip
    """Learn the codes of the weights of the run at `path` from its float model, on the text `data` or on the
    calibration text; then write checkpoint and graphs with them. The held-out divergence decides: nothing changes
    where it does not fall.

    With `train="adapter"` a LoRA adapter is learned on the checkpoint instead, which stays as it is, and written to
    `adapter/`.

    A killed call goes on at the last saved step. Raises InputError for text that the run is evaluated on, too little
    of it, a source model that is gone, and a model that is too large for the memory.
    """
    options = with_settings(options, settings)
    text = None if data is None else str(data)
    if options.train == "adapter":
        with run_at(path, progress, modules=(*CALIBRATE_MODULES, "peft")) as (run, notes):
            from .stages.learned_adapter import learn_adapter

            return learn_adapter(run, notes, text, options)
    with run_at(path, progress) as (run, notes):
        from .stages.distill import distill

        return distill(run, notes, text, options)


def sensitivity(
    path: str | Path, options: SensitivityOptions = SensitivityOptions(), progress: Reporter = LOGGED,
    **settings: "Unpack[keywords.SensitivitySettings]",
) -> "Sensitivity":  # fmt: skip
    """Measure the loss that each quantized tensor of the run at `path` causes alone, on calibration windows.

    The result is sorted, worst first, and written to `sensitivity.json`.
    """
    with run_at(path, progress, writes=False) as (run, notes):  # but for its own stage
        from .stages.sensitivity import sensitivity

        return sensitivity(run, notes, with_settings(options, settings))


def doctor(
    path: str | Path,
    options: DoctorOptions = DoctorOptions(),
    progress: Reporter = LOGGED,
    **settings: "Unpack[keywords.DoctorSettings]",
) -> "Checkup":
    """Run the stability checklist on the run at `path`: a verdict for each known failure, the worst first.

    It checks the run's files, and runs a few calibration windows through its BF16 and FP8 models. Checks that need a
    missing source model are `unknown`. Bad verdicts raise no error (`refuse_bad` in `validate.advice.checkup` does).
    """
    with run_at(path, progress, writes=False, modules=()) as (run, notes):
        from .stages.doctor import doctor

        return doctor(run, notes, with_settings(options, settings))


def tune(
    path: str | Path, options: TuneOptions = TuneOptions(), apply: bool = False, progress: Reporter = LOGGED,
    **settings: "Unpack[keywords.TuneSettings]",
) -> "Tuning":  # fmt: skip
    """Find the cheapest mix of one term, a tail, two terms and BF16, of rounding and of the cache's form, within the
    budget of `options`.

    It is chosen on calibration windows of the run at `path`, measured on its evaluation text, and written to
    `tune.json`. `apply`: make checkpoint and graphs anew with it, if it meets the budget (`met`). Raises InputError for
    `apply` without a budget, and where the source checkpoint is missing.
    """
    with run_at(path, progress, writes=False) as (run, notes):  # but for its own stage, and what it applies
        from .stages.tune import tune

        return tune(run, notes, with_settings(options, settings), apply)


def generate(
    path: str | Path, prompt: str, options: GenerateOptions = GenerateOptions(),
    told: Callable[[str], None] = lambda _: None,
    **settings: "Unpack[keywords.GenerateSettings]",
) -> "GeneratedAnswer":  # fmt: skip
    """Go on from `prompt` with the FP8 model of the run at `path`, or another that `options.runtime` names; `told` is
    called with each piece of the text as it comes.
    """
    from .serve.local.generation import answer_request
    from .stages.generate import asked, open_model

    options = with_settings(options, settings)
    request = asked(prompt, options)
    return answer_request(open_model(open_run(path), options.runtime, adapter=options.adapter), request, told)


def load(
    path: str | Path, dtype: "FloatType" = "bfloat16", mode: "GemmMode" = "fast",
    device: "str | torch.device | None" = None, as_served: int | None = None, adapter: str | None = None,
) -> "PreTrainedModel":  # fmt: skip
    """Load the FP8 model of the run at `path` as Hugging Face's, multiplied as fp8q's reference multiplies it.

    One term, two terms, a tail and FP8 weights alone are each computed as such, and an FP8 cache holds codes;
    `generate` needs no further argument. `dtype`: the type of all but FP8 GEMMs. `mode`: `exact` keeps the sums of
    FP8 GEMMs in FP32, `fast` rounds them to BF16 on CPUs, as `validate` does. `device` None: the first GPU, or the CPU.
    `as_served`: in a call without a cache so many tokens are a prompt, and the others stand for decoded tokens, which
    matters to a tail alone; None: all are a prompt. `adapter`: the adapter that is on.

    Raises InputError where there is no such run, device or adapter, and for files that their stages did not write.
    """
    with run_at(path, SILENT, writes=False) as (run, notes):
        from .stages.load import load_fp8_model

        return load_fp8_model(run, notes, (dtype, mode), device, as_served, adapter)


def chat(
    path: str | Path, options: GenerateOptions = GenerateOptions(), **settings: "Unpack[keywords.ChatSettings]"
) -> "Chat":
    """Open a conversation with the model of the run at `path`, by the chat template of its tokenizer."""
    from .stages.generate import open_chat

    return open_chat(open_run(path), with_settings(options, settings))


def compare(
    path: str | Path,
    options: CompareOptions = CompareOptions(),
    progress: Reporter = LOGGED,
    **settings: "Unpack[keywords.CompareSettings]",
) -> "ModelComparison":
    """Ask the server at `options.url`, or the checkpoint at `options.model`, for log-probabilities of the evaluation
    text of the run at `path`, judge whether it is the model that was validated, and write `compare.json`.

    A verdict raises no error (`check_validated` in `stages.compare` does). Raises InputError for a run without the
    likeliest tokens that `validate` keeps, and for a server with another tokenizer or too short a context; BackendError
    for one that does not answer.
    """
    with run_at(path, progress, modules=()) as (run, notes):
        from .stages.compare import compare_served

        return compare_served(run, notes, with_settings(options, settings))


def compare_checkpoints(
    original: str | Path, candidate: str | Path, options: PairOptions = PairOptions(), progress: Reporter = LOGGED,
    **settings: "Unpack[keywords.CompareCheckpointsSettings]",
) -> "PairComparison":  # fmt: skip
    """Compare two checkpoints of one model, whoever made them, on the text `options.data`; write `options.out`.

    Measures perplexity, KL both ways, flips and the output error of every module, and names causes. A verdict raises no
    error (`check_pair` in `validate.pair.document` does). Raises InputError for checkpoints of different models or
    tokenizers, BackendError for one that does not run.
    """
    needs("calibrate", CALIBRATE_MODULES)
    from .stages.compare_pair import compare_pair

    return compare_pair(Path(original), Path(candidate), with_settings(options, settings), progress)


def compare_endpoint(
    original: str | Path, served: CompareOptions = CompareOptions(), options: PairOptions = PairOptions(),
    progress: Reporter = LOGGED, **settings: "Unpack[keywords.CompareEndpointSettings]",
) -> "PairComparison":  # fmt: skip
    """Compare the model of the server at `served.url` with the checkpoint `original` that it is said to be, on the text
    `options.data`; write `options.out`.

    Measures perplexity, flips, and KL as far as the server lists log-probabilities. A verdict raises no error
    (`check_pair` in `validate.pair.document` does). Raises InputError for a server without log-probabilities of
    prompts, BackendError for one that does not answer.
    """
    needs("calibrate", CALIBRATE_MODULES)
    from .stages.compare_endpoint import compare_with_server

    server, chosen = with_settings_of_both(served, options, settings)
    return compare_with_server(Path(original), server, chosen, progress)


def compare_answers(
    path: str | Path,
    prompt: str,
    options: GenerateOptions = GenerateOptions(),
    **settings: "Unpack[keywords.CompareAnswersSettings]",
) -> "Comparison":
    """Go on from `prompt` with FP8 and with the BF16 model that the run at `path` was made of; where they part."""
    from .stages.generate import compare_both

    return compare_both(open_run(path), prompt, with_settings(options, settings))


def serve(
    path: str | Path, options: ServeOptions = ServeOptions(), ready: "Callable[[Server], object]" = lambda _: None,
    **settings: "Unpack[keywords.ServeSettings]",
) -> int:  # fmt: skip
    """Serve the model of the run at `path` by OpenAI's API until it is stopped; return the number of requests it cut
    off.

    `ready` is called once the server accepts requests, in the serving thread, with the server: its `url`, and `stop()`,
    which any thread and any signal handler may call.
    """
    run = open_run(path)
    needs("serve", SERVE_MODULES)
    from .stages.serve import serve

    return serve(run, with_settings(options, settings), ready)


def bench(
    path: str | Path, against: Sequence[str | Path] = (), options: BenchOptions = BenchOptions(),
    plot: str | Path | None = None, progress: Reporter = LOGGED, **settings: "Unpack[keywords.BenchSettings]",
) -> "Bench":  # fmt: skip
    """Measure the time of answers of the run at `path` in BF16, INT8 and FP8, and of the FP8 models of the runs
    `against`.

    Writes `bench.json`, and a plot at `plot`. Raises InputError for runs of different models, and for sizes beyond the
    model's limits.
    """
    with run_at(path, progress, modules=()) as (run, notes):
        from .stages.bench import bench

        others = list(map(Path, against))
        drawn = None if plot is None else Path(plot)
        return bench(run, notes, others, with_settings(options, settings), drawn)


def triton(
    path: str | Path,
    options: TritonOptions = TritonOptions(),
    progress: Reporter = LOGGED,
    **settings: "Unpack[keywords.TritonSettings]",
) -> list[Path]:
    """Write the Triton model repository of the run at `path`, to RUN/triton or `options.out`; return its files.

    Raises InputError for a directory with files that fp8q did not write.
    """
    with run_at(path, progress, modules=()) as (run, notes):
        from .stages.triton import triton

        return triton(run, notes, with_settings(options, settings))


def report(
    path: str | Path,
    options: ReportOptions = ReportOptions(),
    progress: Reporter = LOGGED,
    **settings: "Unpack[keywords.ReportSettings]",
) -> list[Path]:
    """Write `report.html` and `report.ipynb` of the run at `path`, compared with the runs in `options.compare`.

    Returns their paths. Where the source model is available, both models first continue prompts of the evaluation text.
    """
    with run_at(path, progress, modules=()) as (run, notes):
        from .stages.report import report

        return report(run, notes, with_settings(options, settings))


def push(
    path: str | Path,
    options: PushOptions = PushOptions(),
    progress: Reporter = LOGGED,
    **settings: "Unpack[keywords.PushSettings]",
) -> "Pushed":
    """Upload the checkpoint of the run at `path`, with its card, to the hub's repository `options.repo`, or return what
    would be uploaded where `options.yes` is not set.

    Raises InputError for files that changed since they were written, and where the hub refuses; BackendError where it
    does not answer. The token is huggingface_hub's own.
    """
    with run_at(path, progress, modules=()) as (run, notes):
        from .stages.push import push_checkpoint

        return push_checkpoint(run, with_settings(options, settings), notes)


def inspect(
    path: str | Path, delayed: Clipping | None = None, against: str | Path | None = None, progress: Reporter = LOGGED
) -> Inspection:
    """List every GEMM and cache tensor of the run at `path`, with its scale and loss, and the outliers.

    A tensor that stays in BF16 has the reason. A cache tensor in BF16 is shown at the scale that the run's method would
    choose. `delayed`: also simulate this amax history, and count how often each tensor would have saturated. `against`:
    also measure this text with the float model, as many windows as in calibration, and compare it with the chosen
    scales.
    """
    with run_at(path, progress, writes=False, modules=()) as (run, notes):
        from .stages.inspect import inspect

        return inspect(run, notes, delayed, None if against is None else str(against))


def run(
    model: str | Path, data: str | Path | Sequence[str], out: str | Path, eval_data: str | Path | None = None,
    options: RunOptions = RunOptions(), progress: Reporter = LOGGED, **settings: "Unpack[keywords.RunSettings]",
) -> Run:  # fmt: skip
    """Run all stages, one after the other; the arguments are those of `calibrate`.

    GateError for a gate that is not met, and UnfinishedError for a runtime that failed, are raised after everything is
    written.
    """
    with run_into(out, progress) as (directory, notes):
        from .stages.calibrate import calibration_of
        from .stages.run import run_all

        chosen = with_settings(options, settings)
        return run_all(directory, notes, calibration_of(model, data, eval_data, chosen))


def report_tables(path: str | Path, compare: Sequence[str | Path] = ()) -> "dict[str, Table[Any]]":
    """The report's tables of the run at `path`, compared with the runs at `compare`; a notebook displays each."""
    from .validate.report.report import report_tables

    return report_tables(open_run(path), [open_run(other) for other in compare])


def report_verdict(path: str | Path) -> "Verdict":
    """The verdict on whether the model of the run at `path` is good enough in FP8; a notebook displays it."""
    from .validate.report.verdict import report_verdict

    return report_verdict(open_run(path))


def report_continuations(path: str | Path) -> "Continuations":
    """Load what BF16 and FP8 of the run at `path` wrote on from the same prompts; a notebook displays it."""
    from .validate.report.report import report_continuations

    return report_continuations(open_run(path))


def report_plots(path: str | Path) -> "dict[str, Plot]":
    """The report's plots of the run at `path`; a notebook displays each."""
    from .validate.report.drawings import report_plots

    return report_plots(open_run(path))


@contextmanager
def watch(
    model: "nn.Module", out: str | Path, options: WatchOptions = WatchOptions(),
    modules: "Mapping[str, nn.Module] | None" = None, first_step: int = 0, **settings: "Unpack[keywords.WatchSettings]",
) -> "Iterator[TrainingRecorder]":  # fmt: skip
    """Record what the training of `model` would lose in FP8, in `out`/training.jsonl, while this block runs.

        with fp8q.api.watch(model, "logs/run-1") as log:
            for batch in batches:
                loss = model(**batch).loss
                loss.backward()
                log.step(loss)
                optimizer.step()
                optimizer.zero_grad()

    At every `options.every`th step the exact histogram of each linear layer's input, weight and output gradient is
    taken, and of it the amax, the shares that saturate, become zero and are lost in E4M3 and in E5M2, under a scale
    that follows from the records before (Transformer Engine's delayed scaling). `step` is called once after each
    backward pass; several of them before an optimizer's step are one step if `step` is called after the last. Nothing
    of the model changes. `modules`: name -> the layers to watch (None: every linear layer but a transformers model's
    output head). `first_step`: the step that a resumed training begins with; the log's records before it stay.

    `inspect_training` and `fp8q inspect` read the log. Raises InputError for a model without a linear layer, for a log
    that is there already, and at a recorded step in which no layer ran.
    """
    from .quantize.training.watch import TrainingRecorder

    recorder = TrainingRecorder(model, Path(out), with_settings(options, settings), modules, first_step)
    try:
        yield recorder
    finally:
        recorder.close()


def inspect_training(path: str | Path, gradients: GradientFormat = "e5m2") -> TrainingInspection:
    """Read the training log at `path`, a file or its directory, and judge it, with `gradients` in E5M2 or in E4M3;
    raise InputError where there is no log, or no record in it yet.
    """
    log = read_log(Path(path))
    return TrainingInspection(log, training_checkup(log, gradients))


def report_training(path: str | Path, gradients: GradientFormat = "e5m2") -> Path:
    """Write `training.html`, the page of the training log at `path`, beside it, and return its path; raise InputError
    where there is no log, BackendError where the extra `report` is not installed.
    """
    needs("report", ("matplotlib",))
    from .validate.report.training_page import write_training_page

    training = inspect_training(path, gradients)
    return write_training_page(training.log, training.checkup)
