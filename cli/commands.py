"""The command line. Results on standard output (one JSON object with --json), everything else on standard error.

Exit codes: 0 good, 2 wrong usage or input, 3 a gate not met, 4 a runtime or library missing or failed, 130 interrupted
(Ctrl-C), 143 stopped by SIGTERM, 1 anything else.
"""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .. import __version__
from ..calibrate.ranks.place import place
from ..errors import GateError, InputError
from ..options import (
    CalibrateOptions,
    Clipping,
    EngineOptions,
    ExportOptions,
    Precision,
    ScaleOptions,
    ValidateOptions,
    first_given,
)
from .arguments import (
    Against,
    Algorithm,
    AttentionOption,
    Batches,
    BatchSize,
    BuiltTarget,
    ByWeights,
    ChatTemplate,
    ClipMethod,
    Context,
    Data,
    Delayed,
    DelayedAlgorithm,
    DelayedHistoryLength,
    DelayedInterval,
    DelayedMargin,
    Dtype,
    EvalData,
    EvaluationText,
    Grid,
    HistoryLength,
    Interval,
    Json,
    KeptKvCache,
    KeptOnly,
    KeptSkip,
    KeptWeightMethod,
    KvCacheOption,
    Margin,
    MaxBatch,
    MaxIncrease,
    MaxPrompt,
    MaxSeqLen,
    MinFp8Share,
    ModelArgument,
    OfRun,
    Only,
    OnnxArgument,
    OptBatch,
    OptSeqLen,
    Out,
    Percentile,
    PlanFile,
    PrecisionOption,
    Revision,
    RunArgument,
    RunsArgument,
    RuntimeOption,
    Runtimes,
    Samples,
    Seed,
    SeqLen,
    Skip,
    SourceModel,
    Stream,
    Stride,
    Target,
    TrustRemoteCode,
    Version,
    WeightRoundingOption,
    Workspace,
)

if TYPE_CHECKING:
    from .console import Terminal

EXIT_CODES = (
    "Exit codes: 0 good, 2 wrong usage or input, 3 a gate not met, 4 a runtime or library missing or failed, 130 "
    "interrupted (Ctrl-C), 143 stopped by SIGTERM, 1 anything else."
)
app = typer.Typer(
    name="fp8q",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
#: What typer raises for wrong usage; its own name for the class is private.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]
#: The commands that several processes can run together.
TOGETHER = ("calibrate", "run")


def terminal() -> "Terminal":
    """The reporter that draws on this terminal; of several ranks the first alone speaks."""
    from .console import Terminal

    return Terminal(quiet=place().rank > 0)


def fraction(text: str | None, option: str) -> float | None:
    """A share given as 1% or 0.01, as a fraction."""
    if text is None:
        return None
    value = number(text)
    if not 0 <= value < float("inf") or (value >= 1 and not text.endswith("%")):
        raise InputError(f"{option} {text}: is no share; give one such as 1% or 0.01")
    return value


def number(text: str) -> float:
    """A number, or so many percent; NaN where it is neither."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return float("nan")


def fp8_share(text: str | None, precision: Precision = "fp8") -> float:
    """The share of promised products that must run in FP8, given as 96% or 0.96; all of them where it is not given."""
    if text is None:
        return EngineOptions.min_fp8_share
    if precision != "fp8":
        raise InputError(
            f"--min-fp8-share {text}: is for the FP8 engine, and --precision {precision} promises no product in FP8; "
            "leave one of them out"
        )
    if not 0 <= number(text) <= 1:
        raise InputError(
            f"--min-fp8-share {text}: is no share of the products; give one from 0 to 1, or in percent, such as 96% "
            "or 0.96"
        )
    return number(text)


def interval_of(text: str | None) -> tuple[int, int] | None:
    """The two numbers of A:B."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    if not found:
        raise InputError(
            f"--batches {text}: is no interval; give the first batch and the one after the last, as in 0:8"
        )
    return int(found[1]), int(found[2])


@app.callback()
def root(context: typer.Context, version: Version = False) -> None:
    """From a Hugging Face checkpoint to a proven FP8 TensorRT engine, and what it costs in accuracy."""
    here = place()  # several ranks where only one can work are refused
    if here.ranks > 1 and context.invoked_subcommand not in TOGETHER:
        raise InputError(
            f"fp8q {context.invoked_subcommand}: is the work of one process, and {here.ranks} ranks were started; run "
            "it without torchrun, or unset RANK"
        )


@app.command()
def run(
    model: ModelArgument,
    data: Data,
    out: Out,
    eval_data: EvalData = None,
    method: ClipMethod = Clipping.method,
    percentile: Percentile = Clipping.percentile,
    margin: Margin = Clipping.margin,
    scale_grid: Grid = Clipping.scale_grid,
    amax_history_len: HistoryLength = Clipping.amax_history_len,
    amax_compute_algo: Algorithm = Clipping.amax_compute_algo,
    interval: Interval = Clipping.interval,
    weight_method: ByWeights = ScaleOptions.weight_method,
    kv_cache: KvCacheOption = ScaleOptions.kv_cache,
    samples: Samples = None,
    seq_len: SeqLen = None,
    batch_size: BatchSize = CalibrateOptions.batch_size,
    skip: Skip = None,
    only: Only = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    stream: Stream = None,
    weight_rounding: WeightRoundingOption = ScaleOptions.weight_rounding,
    chat_template: ChatTemplate = False,
    seed: Seed = None,
    dtype: Dtype = ExportOptions.dtype,
    runtime: RuntimeOption = EngineOptions.runtime,
    target: Target = None,
    max_batch: MaxBatch = EngineOptions.max_batch,
    max_seq_len: MaxSeqLen = None,
    max_prompt: MaxPrompt = None,
    opt_batch: OptBatch = None,
    opt_seq_len: OptSeqLen = None,
    workspace: Workspace = None,
    min_fp8_share: MinFp8Share = None,
    runtimes: Runtimes = ",".join(ValidateOptions.runtimes),
    context: Context = None,
    stride: Stride = None,
    max_ppl_increase: MaxIncrease = None,
    as_json: Json = False,
) -> None:
    """Do all of it: calibrate, build engines, validate, write the Triton repository and the report.

    Goes on where it stopped.
    """
    from .. import api

    clip = Clipping(method, percentile, margin, scale_grid, amax_history_len, amax_compute_algo, interval)
    calibrate_options = CalibrateOptions(
        clip,
        weight_method,
        kv_cache,
        tuple(skip or ()),
        tuple(only or ()),
        weight_rounding,
        samples,
        seq_len,
        batch_size,
        revision,
        trust_remote_code,
        stream,
        chat_template,
        seed,
    )
    engine_options = EngineOptions(
        runtime,
        tuple(target or ()),
        max_batch,
        max_seq_len,
        fp8_share(min_fp8_share),
        max_prompt,
        opt_batch,
        opt_seq_len,
        workspace,
    )
    validate_options = ValidateOptions(
        listed(runtimes), context, stride, fraction(max_ppl_increase, "--max-ppl-increase")
    )
    speak = terminal()
    with showing(speak, out, as_json):
        api.run(
            model,
            data,
            out,
            eval_data,
            api.RunOptions(calibrate_options, ExportOptions(dtype), engine_options, validate_options),
            speak,
        )


@app.command()
def calibrate(
    model: ModelArgument,
    data: Data,
    out: Out,
    eval_data: EvalData = None,
    method: ClipMethod = Clipping.method,
    percentile: Percentile = Clipping.percentile,
    margin: Margin = Clipping.margin,
    scale_grid: Grid = Clipping.scale_grid,
    amax_history_len: HistoryLength = Clipping.amax_history_len,
    amax_compute_algo: Algorithm = Clipping.amax_compute_algo,
    interval: Interval = Clipping.interval,
    weight_method: ByWeights = ScaleOptions.weight_method,
    kv_cache: KvCacheOption = ScaleOptions.kv_cache,
    samples: Samples = None,
    seq_len: SeqLen = None,
    batch_size: BatchSize = CalibrateOptions.batch_size,
    skip: Skip = None,
    only: Only = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    stream: Stream = None,
    weight_rounding: WeightRoundingOption = ScaleOptions.weight_rounding,
    chat_template: ChatTemplate = False,
    seed: Seed = None,
    batches: Batches = None,
    dtype: Dtype = ExportOptions.dtype,
    as_json: Json = False,
) -> None:
    """Measure a model on text, choose scales, and write the FP8 checkpoint and its ONNX graphs."""
    from .. import api

    clip = Clipping(method, percentile, margin, scale_grid, amax_history_len, amax_compute_algo, interval)
    options = CalibrateOptions(
        clip,
        weight_method,
        kv_cache,
        tuple(skip or ()),
        tuple(only or ()),
        weight_rounding,
        samples,
        seq_len,
        batch_size,
        revision,
        trust_remote_code,
        stream,
        chat_template,
        seed,
        interval_of(batches),
    )
    speak = terminal()
    with showing(speak, out, as_json):
        api.calibrate(model, data, out, eval_data, options, ExportOptions(dtype), speak)


@app.command()
def scales(
    run: RunArgument,
    method: ClipMethod = Clipping.method,
    percentile: Percentile = Clipping.percentile,
    margin: Margin = Clipping.margin,
    scale_grid: Grid = Clipping.scale_grid,
    amax_history_len: HistoryLength = Clipping.amax_history_len,
    amax_compute_algo: Algorithm = Clipping.amax_compute_algo,
    interval: Interval = Clipping.interval,
    weight_method: KeptWeightMethod = None,
    kv_cache: KeptKvCache = None,
    skip: KeptSkip = None,
    only: KeptOnly = None,
    as_json: Json = False,
) -> None:
    """Choose all scales again from what was measured, and write checkpoint and graphs anew; no model is run."""
    from .. import api

    clip = Clipping(method, percentile, margin, scale_grid, amax_history_len, amax_compute_algo, interval)
    speak = terminal()
    with showing(speak, run, as_json):
        api.scales(
            run,
            clip,
            weight_method,
            kv_cache,
            tuple(filter(None, skip)) if skip else None,
            tuple(filter(None, only)) if only else None,
            speak,
        )


@app.command()
def merge(
    runs: RunsArgument,
    out: Out,
    model: SourceModel = None,
    method: ClipMethod = Clipping.method,
    percentile: Percentile = Clipping.percentile,
    margin: Margin = Clipping.margin,
    scale_grid: Grid = Clipping.scale_grid,
    amax_history_len: HistoryLength = Clipping.amax_history_len,
    amax_compute_algo: Algorithm = Clipping.amax_compute_algo,
    interval: Interval = Clipping.interval,
    weight_method: ByWeights = ScaleOptions.weight_method,
    kv_cache: KvCacheOption = ScaleOptions.kv_cache,
    skip: Skip = None,
    only: Only = None,
    dtype: Dtype = ExportOptions.dtype,
    as_json: Json = False,
) -> None:
    """Add what several runs of one model measured, choose scales, and write checkpoint and graphs, without running the
    model.
    """
    from .. import api

    clip = Clipping(method, percentile, margin, scale_grid, amax_history_len, amax_compute_algo, interval)
    speak = terminal()
    with showing(speak, out, as_json):
        api.merge(
            runs,
            out,
            model,
            ScaleOptions(clip, weight_method, kv_cache, tuple(skip or ()), tuple(only or ())),
            ExportOptions(dtype),
            speak,
        )


@app.command()
def export(
    run: RunArgument, dtype: Dtype = ExportOptions.dtype, precision: PrecisionOption = ExportOptions.precision,
    attention: AttentionOption = ExportOptions.attention, as_json: Json = False,
) -> None:  # fmt: skip
    """Write the checkpoint's ONNX graphs again (`calibrate` ends with this), or the same model in a precision to
    compare FP8 with.
    """
    from .. import api

    speak = terminal()
    with showing(speak, run, as_json):
        api.export(run, ExportOptions(dtype, precision, attention), speak)


@app.command()
def lint(path: OnnxArgument, run: OfRun = None, as_json: Json = False) -> None:
    """Check an FP8 ONNX graph, whoever exported it, against what is known to go wrong on the way to an engine.
    docs/lint.md explains the rules.
    """
    from .. import api
    from ..stages.linting import check_findings
    from . import views

    found = api.lint(path, run)
    views.linted(found, as_json)
    check_findings(found)


@app.command("build-engine")
def build_engine(
    run: RunArgument,
    runtime: RuntimeOption = EngineOptions.runtime,
    target: Target = None,
    max_batch: MaxBatch = EngineOptions.max_batch,
    max_seq_len: MaxSeqLen = None,
    max_prompt: MaxPrompt = None,
    opt_batch: OptBatch = None,
    opt_seq_len: OptSeqLen = None,
    workspace: Workspace = None,
    min_fp8_share: MinFp8Share = None,
    precision: PrecisionOption = EngineOptions.precision,
    as_json: Json = False,
) -> None:
    """Build a TensorRT engine for each target, and prove which products run in FP8."""
    from .. import api

    options = EngineOptions(
        runtime,
        tuple(target or ()),
        max_batch,
        max_seq_len,
        fp8_share(min_fp8_share, precision),
        max_prompt,
        opt_batch,
        opt_seq_len,
        workspace,
        precision,
    )
    speak = terminal()
    with showing(speak, run, as_json):
        api.build_engine(run, options, speak)


@app.command()
def engine(
    run: RunArgument,
    target: BuiltTarget = None,
    plan: PlanFile = None,
    min_fp8_share: MinFp8Share = None,
    as_json: Json = False,
) -> None:
    """Show what the engines run: every matrix product, its types and the kernels around it, attention, and what stayed
    wide and why.
    """
    from .. import api
    from ..stages.engines import check_views
    from . import views

    share = fp8_share(min_fp8_share)
    found = api.engine(run, target or (), plan)
    views.engines(terminal(), found, as_json)
    check_views(found, share)


@app.command()
def validate(
    run: RunArgument,
    data: EvaluationText = None,
    runtimes: Runtimes = ",".join(ValidateOptions.runtimes),
    context: Context = None,
    stride: Stride = None,
    max_ppl_increase: MaxIncrease = None,
    as_json: Json = False,
) -> None:
    """Say whether it is still the same model: perplexity, KL and agreement against BF16."""
    from .. import api

    options = ValidateOptions(listed(runtimes), context, stride, fraction(max_ppl_increase, "--max-ppl-increase"))
    speak = terminal()
    with showing(speak, run, as_json):
        api.validate(run, data, options, speak)


@app.command()
def triton(run: RunArgument, as_json: Json = False) -> None:
    """Write a Triton model repository that serves the model."""
    from .. import api

    speak = terminal()
    with showing(speak, run, as_json):
        api.triton(run, progress=speak)


@app.command()
def report(run: RunArgument, as_json: Json = False) -> None:
    """Write report.html and report.ipynb: the run, to show to somebody."""
    from .. import api

    speak = terminal()
    with showing(speak, run, as_json):
        api.report(run, speak)


@app.command()
def inspect(
    run: RunArgument, delayed: Delayed = False, amax_history_len: DelayedHistoryLength = Clipping.amax_history_len,
    amax_compute_algo: DelayedAlgorithm = Clipping.amax_compute_algo, interval: DelayedInterval = Clipping.interval,
    margin: DelayedMargin = Clipping.margin,
    against: Against = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Show every module (its scale and what that does, or why it stays in BF16), the cache (in BF16: as FP8 would have
    it), and what stands out, ranked.
    """
    from .. import api
    from . import views

    history = Clipping(
        "delayed",
        margin=margin,
        amax_history_len=amax_history_len,
        amax_compute_algo=amax_compute_algo,
        interval=interval,
    )
    if not delayed and (given := first_given(history, ("amax_history_len", "amax_compute_algo", "interval", "margin"))):
        raise InputError(f"{given}: is for --delayed, which is not given; add it, or leave this out")
    speak = terminal()
    views.inspection(speak, api.inspect(run, history if delayed else None, against, speak), as_json)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say which runtimes, GPUs and versions are here, and what each is good for."""
    from .doctor import examine

    found = examine()
    if as_json:
        sys.stdout.write(json.dumps({"fp8q": __version__, "findings": [asdict(finding) for finding in found]}) + "\n")
    else:
        rows = [(finding.name, finding.version or "missing", finding.good_for, finding.remedy) for finding in found]
        terminal().table(f"fp8q {__version__} on this machine", ("what", "version", "good for", "to get it"), rows)


def listed(text: str) -> tuple[str, ...]:
    """The parts of a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


@contextmanager
def showing(speak: "Terminal", path: Path, as_json: bool) -> Iterator[None]:
    """Show what the run at `path` holds when the block ends well, or with a gate that was not met; of several ranks the
    first does.
    """
    from . import views

    if place().rank:
        yield
        return
    try:
        yield
    except GateError:
        views.summary(speak, path, as_json)
        raise
    views.summary(speak, path, as_json)
