"""The commands, a function each, and what they take; what all of them share is in `application`."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Annotated

from ..calibrate.ranks.torchrun import process_rank
from ..core.errors import InputError
from ..core.run import Run
from ..options import (
    BenchOptions,
    CalibrateOptions,
    CompareOptions,
    ConvertOptions,
    DistillOptions,
    DoctorOptions,
    EngineOptions,
    EvaluateOptions,
    ExportOptions,
    GenerateOptions,
    History,
    LintOptions,
    PairOptions,
    PushOptions,
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
from ..options.declare import first_changed, only, without
from .application import app, showing, terminal
from .arguments import (
    Against,
    Apply,
    BuiltTargets,
    Chat,
    ChosenPreset,
    Common,
    Compare,
    ConvertedOut,
    Delayed,
    ExaminedRun,
    LearningData,
    LintPath,
    Model,
    OfRun,
    OlderApplyScales,
    OtherData,
    OtherRuns,
    Out,
    PlanFile,
    PlotFile,
    Prompt,
    RuleCode,
    RunOrLog,
    RunOrOriginal,
    RunPath,
    RunPaths,
    RunTexts,
    SourceModel,
    TrainedGradients,
)

__all__ = ["app"]


@app.command
def run(
    model: Model,
    /,
    *,
    texts: RunTexts,
    preset: ChosenPreset = None,
    options: RunOptions = RunOptions(),
    common: Common = Common(),
) -> None:
    """Run all stages: calibrate, build engines, validate, write the Triton repository and the report.

    Goes on where it stopped. Where one code an activation loses more than the limit and no form is asked for, the
    cheapest form that --for computes and that does not is found. --form one keeps one code.
    """
    from .. import api

    speak = terminal()
    chosen = replace(options, form_named=preset is not None)
    with nullcontext() if options.planning.plan else showing(speak, texts.out, common, "run"):
        api.run(model, texts.data, texts.out, texts.eval_data, chosen, speak)


@app.command(synonym=("quantize", "ptq"))
def calibrate(
    model: Model,
    /,
    *,
    texts: RunTexts,
    preset: ChosenPreset = None,
    options: CalibrateOptions = CalibrateOptions(),
    export: Annotated[ExportOptions, without("precision", "attention")] = ExportOptions(),
    common: Common = Common(),
) -> None:
    """Measure a model on text, choose scales, and write the FP8 checkpoint and its ONNX graphs."""
    from .. import api

    speak = terminal()
    with showing(speak, texts.out, common, "calibrate"):
        api.calibrate(model, texts.data, texts.out, texts.eval_data, options, export, speak)


@app.command(name="convert")
def convert_checkpoint(
    model: Model, /, *, out: ConvertedOut, options: ConvertOptions = ConvertOptions(), common: Common = Common()
) -> None:
    """Write an FP8 checkpoint for servers by a model's class or its tensors' names, without text or a run.

    Inputs are scaled where it is served. Takes any architecture, and less than 1 GB of memory. Each code is proven;
    the loss of accuracy is not measured: `fp8q compare MODEL --model OUT` does that.
    """
    from .. import api
    from .views import show_converted

    speak = terminal()
    show_converted(speak, model, api.convert(model, out, options, speak), common.as_json)


@app.command
def scales(
    run: RunPath,
    /,
    *,
    options: RescaleOptions = RescaleOptions(),
    common: Common = Common(),
) -> None:
    """Choose all scales again from the measured statistics, with other options.

    Writes checkpoint and graphs; the model is not run.
    An empty pattern, --skip '' or --only '', takes back what the run has.
    """
    from .. import api

    speak = terminal()
    with showing(speak, run, common, "scales"):
        api.scales(run, options, speak)


@app.command
def merge(
    runs: RunPaths,
    /,
    *,
    out: Out,
    model: SourceModel = None,
    options: Annotated[ScaleOptions, without("weight_rounding", "weigh_first_token", "q_scale")] = ScaleOptions(),
    export: Annotated[ExportOptions, without("precision", "attention")] = ExportOptions(),
    common: Common = Common(),
) -> None:
    """Add the statistics of several runs of one model, and choose scales by the sum.

    Writes checkpoint and graphs; the model is not run.
    """
    from .. import api

    speak = terminal()
    with showing(speak, out, common, "merge"):
        api.merge(runs, out, model, options, export, speak)


@app.command
def export(
    run: RunPath,
    /,
    *,
    options: Annotated[ExportOptions, without("graph")] = ExportOptions(),
    weight_scale: OlderApplyScales = None,
    common: Common = Common(),
) -> None:
    """Write the checkpoint's ONNX graphs again, or the same model in another precision for comparison.

    `fp8q calibrate` ends with this by itself.
    """
    from .. import api

    speak = terminal()
    with showing(speak, run, common, "export"):
        api.export(run, replace(options, weight_scale=weight_scale) if weight_scale else options, speak)


@app.command
def lint(
    path: LintPath = None,
    /,
    *,
    run: OfRun = None,
    options: LintOptions = LintOptions(),
    explain: RuleCode = None,
    common: Common = Common(),
) -> None:
    """Check files (graph, FP8 checkpoint, Triton repository, run) for what makes engines and servers fail.

    No model is run: `fp8q doctor RUN` runs it and checks its numbers, `fp8q inspect RUN` shows all of them.
    docs/lint.md says what is checked, `--explain` why a rule is there.
    """
    from .lint import show_lint

    show_lint(path, run, options, explain, common.as_json)


@app.command(synonym=("build", "compile"))
def build_engine(run: RunPath, /, *, options: EngineOptions = EngineOptions(), common: Common = Common()) -> None:
    """Build a TensorRT engine for each target, and prove which GEMMs run in FP8."""
    from .. import api

    speak = terminal()
    with showing(speak, run, common, "build-engine"):
        api.build_engine(run, options, speak)


@app.command
def engine(
    run: RunPath,
    /,
    *,
    target: BuiltTargets = (),
    plan: PlanFile = None,
    options: Annotated[EngineOptions, only("min_fp8_share")] = EngineOptions(),
    common: Common = Common(),
) -> None:
    """Show what the engines run: the types of every GEMM, and which are not FP8 on both sides, and why.

    Also shows the kernels around each GEMM, and attention.
    """
    from .. import api
    from ..stages.engine import check_views
    from . import views

    engine_views = api.engine(run, target, plan)
    views.show_engines(terminal(), engine_views, common.as_json)
    check_views(engine_views, options.min_fp8_share)


@app.command(synonym=("eval", "perplexity"))
def validate(
    run: RunPath,
    /,
    *,
    data: OtherData = None,
    options: ValidateOptions = ValidateOptions(),
    common: Common = Common(),
) -> None:
    """Tell whether it is still the same model: perplexity, KL and agreement against BF16."""
    from .. import api

    speak = terminal()
    with showing(speak, run, common, "validate"):
        api.validate(run, data, options, speak)


@app.command(name="compare")
def compare_model(
    run: RunOrOriginal,
    /,
    *,
    options: CompareOptions = CompareOptions(),
    pair: PairOptions = PairOptions(),
    common: Common = Common(),
) -> None:
    """Tell whether a server, or another checkpoint, is the model that was validated; or compare any two checkpoints.

    Servers: vLLM, SGLang, `fp8q serve`, Triton. Shows the distance from each runtime of the run, on the held-out text.
    Two checkpoints: the original, and --model, whoever made it, on --data; --out gets a report with the worst modules.
    Without a run: an original, and --url of a server, on --data.
    Exit code 3 where it is another model, or a worse one.
    """
    from .. import api
    from ..stages.compare import check_validated
    from ..validate.pair.document import check_pair
    from . import views
    from .compared import candidate_of, check_endpoint_options, is_original, refuse_for_run

    speak = terminal()
    if is_original(run):
        if options.url is not None:
            check_endpoint_options(options, pair)
            compared = api.compare_endpoint(run, options, pair, speak)
        else:
            compared = api.compare_checkpoints(run, candidate_of(run, options), pair, speak)
        views.show_pair(speak, compared, pair, common.as_json)
        check_pair(compared)
        return
    refuse_for_run(run, pair)
    comparison = api.compare(run, options, speak)
    views.show_model_comparison(speak, comparison, common.as_json)
    check_validated(comparison)


@app.command(name="evaluate")
def evaluate_model(run: RunPath, /, *, options: EvaluateOptions = EvaluateOptions(), common: Common = Common()) -> None:
    """Ask BF16 and FP8 lm-eval's tasks, and compare their answers question by question.

    Shows scores, recovery, flipped answers, and if these are more than chance. docs/evaluate.md explains it.
    """
    from .. import api
    from . import views

    speak = terminal()
    views.show_evaluation(speak, api.evaluate(run, options, speak), common.as_json)


@app.command
def generate(
    run: RunPath,
    /,
    *,
    prompt: Prompt = None,
    chat: Chat = False,
    compare: Compare = False,
    options: GenerateOptions = GenerateOptions(),
    common: Common = Common(),
) -> None:
    """Generate text with the FP8 model, streamed: an answer to one prompt, a conversation, or FP8 beside BF16."""
    from . import answers

    answers.show_answers(terminal(), run, prompt, options, (chat, compare), common.as_json)


@app.command
def serve(run: RunPath, /, *, options: ServeOptions = ServeOptions(), common: Common = Common()) -> None:
    """Serve the model by OpenAI's API, with a page to try it, until Ctrl-C or SIGTERM.

    When stopped it finishes the requests in progress: exit code 0, or the signal's where one was cut off.
    """
    from . import server

    server.run_server(terminal(), run, options, common.as_json)


@app.command
def bench(
    run: RunPath,
    /,
    *,
    against: OtherRuns = (),
    plot: PlotFile = None,
    options: BenchOptions = BenchOptions(),
    common: Common = Common(),
) -> None:
    """Measure speed and memory of answers in all precisions of a run.

    Time to first token, time between tokens, throughput, memory, energy; docs/bench.md has the protocol.
    """
    from .. import api
    from . import views

    speak = terminal()
    views.benched(speak, api.bench(run, against, options, plot, speak), common.as_json)


@app.command(synonym=("deploy",))
def triton(run: RunPath, /, *, options: TritonOptions = TritonOptions(), common: Common = Common()) -> None:
    """Write a Triton model repository that serves the model, in the run or elsewhere.

    With Dockerfile and README, and the plain engine beside the model where TensorRT built one.
    """
    from .. import api

    speak = terminal()
    with showing(speak, run, common, "triton"):
        api.triton(run, options, speak)


@app.command(name="push")
def push_model(run: RunPath, /, *, options: PushOptions = PushOptions(), common: Common = Common()) -> None:
    """Upload the run's checkpoint and card to the Hugging Face hub; without --yes, list what would be.

    The token is that of `hf auth login`, or HF_TOKEN.
    """
    from .. import api
    from . import views

    views.show_pushed(api.push(run, options, terminal()), common.as_json)


@app.command
def report(
    run: RunOrLog,
    /,
    *,
    options: ReportOptions = ReportOptions(),
    gradients: TrainedGradients = None,
    common: Common = Common(),
) -> None:
    """Write report.html and report.ipynb: the verdict, the next steps, and the numbers.

    Of a training log that `fp8q.api.watch` wrote: training.html, beside it.
    """
    from .. import api
    from . import training

    speak = terminal()
    if training.takes_log(run, gradients):
        training.refuse_run_options(options, options.declared())
        training.show_page(speak, run, gradients or "e5m2", common.as_json)
        return
    with showing(speak, run, common, "report"):
        api.report(run, options, speak)


@app.command
def inspect(
    run: RunOrLog,
    /,
    *,
    delayed: Delayed = False,
    history: Annotated[History, without("percentile", "scale_grid")] = History(),
    against: Against = None,
    gradients: TrainedGradients = None,
    common: Common = Common(),
) -> None:
    """Show every module (scale and error, or why it stays in BF16), the cache, and outliers, ranked.

    A cache in BF16 is shown as FP8 would have it. This judges nothing: `fp8q doctor RUN` does, and `fp8q lint RUN`
    checks the files. Of a training log that `fp8q.api.watch` wrote: what training in FP8 would lose by depth, and the
    checklist's verdicts.
    """
    from .. import api
    from . import training, views

    if training.takes_log(run, gradients):
        training.refuse_run_options(history, history.declared(), delayed=delayed, against=against)
        training.show_log(terminal(), run, gradients or "e5m2", common.as_json)
        return
    if not delayed and (option := first_changed(history, history.declared())):
        raise InputError(option, "is for --delayed, which is not given", "add it, or leave this out")
    speak = terminal()
    views.inspection(speak, api.inspect(run, history if delayed else None, against, speak), common.as_json)


@app.command
def distill(
    run: RunPath,
    /,
    *,
    data: LearningData = None,
    options: DistillOptions = DistillOptions(),
    common: Common = Common(),
) -> None:
    """Learn the codes of the weights from the BF16 model, so that FP8 gives its distribution more nearly.

    Scales, and the cost of the engine, stay as they are. One window in ten is held out, and the weights of the best
    moment win; where nothing gets better, nothing changes. It gains most where inputs have two FP8 codes.

    With --train adapter the FP8 model stays as it is, and a LoRA adapter is learned beside it, in PEFT's form.
    """
    from .. import api
    from . import views

    speak = terminal()
    learned = api.distill(run, data, options, speak)
    if process_rank().rank == 0:
        views.show_distillation(speak, Run(run), learned, common.as_json)


@app.command
def sensitivity(
    run: RunPath, /, *, options: SensitivityOptions = SensitivityOptions(), common: Common = Common()
) -> None:
    """Tell which tensor causes the loss: the KL of quantizing each one alone, worst first.

    Weights, activations and caches; beside each the KL that two FP8 codes an activation, or BF16, would leave.
    """
    from .. import api
    from . import views

    speak = terminal()
    views.show_losses(speak, Run(run), api.sensitivity(run, options, speak), common.as_json)


@app.command
def tune(
    run: RunPath, /, *, options: TuneOptions = TuneOptions(), apply: Apply = False, common: Common = Common()
) -> None:
    """Find the cheapest mix of formats that meets a budget of loss; without a budget, the cost of every loss.

    For each module a mix takes one FP8 code an activation (one term), two codes (two terms; a tail: two for decoded
    tokens and the end of a prompt, one for the rest) or BF16. It also chooses how weights are rounded and the cache is
    stored. docs/tune.md explains it.
    """
    from .. import api
    from ..stages.tune import check_met
    from . import views

    speak = terminal()
    tuning = api.tune(run, options, apply, speak)
    views.show_tuning(speak, run, tuning, common.as_json)
    check_met(tuning)


@app.command
def doctor(run: ExaminedRun = None, /, *, options: DoctorOptions = DoctorOptions(), common: Common = Common()) -> None:
    """List this machine's runtimes and GPUs; or check the numbers of a RUN, with verdict, module and remedy.

    Exit code 3 where a check is bad. `fp8q lint RUN` checks the files, `fp8q inspect RUN` shows every module.
    """
    from . import checklist

    if run is None:
        if option := first_changed(options, options.declared()):
            raise InputError(option, "is for a RUN, and none is given", "name one, or leave this out")
        checklist.machine(terminal(), common.as_json)
    else:
        checklist.show_checklist(terminal(), run, options, common.as_json)
