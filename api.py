"""The public functions: each is one command of the command line, with the same names and defaults.

They join the stages; the work is in the folders. Every function takes a `Reporter` for its notes and progress (silent
by default), and does nothing that a finished stage of the same inputs, options and version has done already.

    from fp8q.api import calibrate, build_engine, validate
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .calibrate.measure.histogram import Histogram, magnitudes
from .calibrate.measure.statistics import load_statistics
from .calibrate.ranks.torchrun import process_rank
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
from .stages import continuations as continuations_stage
from .stages import corpus as corpus_stage
from .stages import doctor as doctor_stage
from .stages import engine as engine_stage
from .stages import export as export_stage
from .stages import export_baseline as export_baseline_stage
from .stages import generate as generate_stage
from .stages import inspect as inspect_stage
from .stages import lint as lint_stage
from .stages import measure as measure_stage
from .stages import merge as merge_stage
from .stages import preflight
from .stages import quantize as quantize_stage
from .stages import report as report_stage
from .stages import sensitivity as sensitivity_stage
from .stages import serve as serve_stage
from .stages import triton as triton_stage
from .stages import tune as tune_stage
from .stages import validate as validate_stage
from .stages.inspect import Inspection
from .stages.shared import sources
from .stages.shared.opening import open_run
from .stages.shared.steps import CALIBRATE_MODULES, Notes, alone, needs

if TYPE_CHECKING:
    from .calibrate.model.source import Source
    from .calibrate.ranks.world import World
    from .core.columns import Table
    from .export.engine.info import EngineInfo
    from .quantize.scales.policy import Products
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


@alone("out")
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
    return _calibrate(model, data, out, eval_data, RunOptions(options, export_options), None, progress)


def _calibrate(
    model: str,
    data: str | Sequence[str],
    out: Path,
    eval_data: str | None,
    all_options: "RunOptions",
    later: "RunOptions | None",
    progress: Reporter,
) -> Run:
    """`calibrate`, which also finds what is wrong with the options of `later` stages, where these are to follow."""
    needs("calibrate", CALIBRATE_MODULES)
    from .calibrate.ranks.world import joined_ranks

    found, notes, options = Run(Path(out)), Notes(progress), all_options.calibrate
    with joined_ranks() as world:
        if world.rank:
            source = sources.opened(
                model, options.revision, options.trust_remote_code, fingerprinted=world.process.local_rank == 0,
                adapters=options.adapter, mode=options.adapter_mode,
            )  # fmt: skip
            sources.check_same(source, world)
            measure_stage.take_part(found, source, world, notes)
        else:
            source, products = _measured(found, model, (data, eval_data), all_options, later, notes, world)
    if world.rank:
        found.leave_work("measure", world.rank)
    elif options.batches:
        first, end = options.batches
        progress.note(
            f"--batches {first}:{end}: these are measured, and no scales are chosen; `fp8q merge` adds them to the "
            "other batches and goes on"
        )
    else:
        quantize_stage.quantize(found, source, products, options, notes)
        export_stage.export_or_note(found, all_options.export, notes)
    return found


def _measured(
    found: Run,
    model: str,
    texts: tuple[str | Sequence[str], str | None],
    all_options: "RunOptions",
    later: "RunOptions | None",
    notes: Notes,
    world: "World",
) -> "tuple[Source, Products]":
    """The stages of `calibrate` that several ranks share, as the first of them: find all that is wrong, write the
    corpus, measure.
    """
    from .calibrate.model.tokenizer import load_tokenizer

    options = all_options.calibrate
    preflight.check_out(found)
    before = found.record().model
    with notes.held():
        if later:
            preflight.check_later(found, later.engine, later.validate)
        source = sources.opened(
            model,
            options.revision,
            options.trust_remote_code,
            notes,
            adapters=options.adapter,
            mode=options.adapter_mode,
        )
        sources.check_same(source, world)
        sources.check_model(found, before, source)
        products = sources.products_of(source, options)
        measure_stage.check_experts(source, products, options)
        preflight.check_graph(
            found, products, later.engine if later else None, later.validate if later else None, notes
        )
        preflight.check_calibrate(source, options, all_options.export)
        collected = corpus_stage.collect(source, load_tokenizer(source), *texts, options, notes)
        measure_stage.check_batches(options, len(collected.windows), world)
        if later:
            preflight.check_fit(source, collected, later.engine, later.validate)
        sources.check_weights(found, source, notes)
    with preflight.nothing_left(found):
        corpus_stage.write_corpus(found, source, collected, notes)
        measure_stage.measure(found, source, options, notes, world)
    return source, products


@alone("out")
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
    needs("calibrate", CALIBRATE_MODULES)

    found, notes = Run(Path(out)), Notes(progress)
    preflight.check_out(found)
    before = found.record().model
    with notes.held():
        if options.weight_rounding != "nearest":
            why = "its second moments are not added" if options.weight_rounding == "gptq" else "runs the model"
            raise InputError(
                f"--weight-rounding {options.weight_rounding}: {why}; use `fp8q calibrate` on all of the text in one "
                "run, or leave it out"
            )
        merged = merge_stage.add(runs, out)
        source = merge_stage.source_of_all(merged, model, notes)
        sources.check_model(found, before, source)
        products = sources.products_of(source, options)
        overlap = merge_stage.check_held_out(merged, source, notes)
        if left := merge_stage.missing(merged):
            notes.note(
                f"{len(left)} batches were measured by none of the runs: "
                f"{', '.join(left[:3])}{' …' if len(left) > 3 else ''}"
            )
    with preflight.nothing_left(found):
        merge_stage.write(found, source, merged, notes, overlap)
        quantize_stage.quantize(found, source, products, options, notes)
        export_stage.export_or_note(found, export_options, notes)
    return found


@alone("path")
def export(path: Path, options: ExportOptions = ExportOptions(), progress: Reporter = SILENT) -> Run:
    """Write `model.onnx` and `model.fp32.onnx` of the checkpoint in the run at `path`, and lint them.

    With `options.precision` bf16 or int8: the same model in that precision, made of the source checkpoint, into
    `baselines/`.
    """
    needs("calibrate", CALIBRATE_MODULES)

    found, notes = open_run(path), Notes(progress)
    if options.precision == "fp8":
        export_stage.export(found, options, notes)
    else:
        export_baseline_stage.export_baseline(found, options.precision, notes)
    return found


def lint(path: Path, run: Path | None = None) -> lint_stage.Linted | lint_stage.LintedRun:
    """Hold what is at `path` against the rules of `docs/lint.md`: an ONNX file, whoever exported it, a Triton
    repository, an FP8 checkpoint, or all that a run holds; what is found is returned, and nothing is raised for it.

    The graph of a run, in its `model/`, is also held against what the run promises; `run` names the run for a graph
    that lies elsewhere. Needs no torch and no server.
    """
    return lint_stage.lint(Path(path), open_run(run) if run else None)


@alone("path")
def scales(path: Path, options: RescaleOptions = RescaleOptions(), progress: Reporter = SILENT) -> Run:
    """Choose all scales of the run at `path` again, from its statistics, and write its checkpoint and graphs anew; the
    model is not run.

    What `options` are not given stays as the run has it. The source checkpoint is read, for the weights. Raises
    InputError when it is no longer there, or not the same.
    """
    needs("calibrate", CALIBRATE_MODULES)

    found, notes = open_run(path), Notes(progress)
    chosen, source = quantize_stage.rescaled(found, options), sources.source_of(found)
    quantize_stage.quantize(found, source, sources.products_of(source, chosen), chosen, notes)
    export_stage.export_or_note(found, export_stage.exported_options(found), notes)
    return found


@alone("path")
def build_engine(
    path: Path, options: EngineOptions = EngineOptions(), progress: Reporter = SILENT
) -> "list[EngineInfo]":
    """Build an engine of `model.onnx` for each target and prove from the engine which promised products take FP8 on
    both sides.

    With `options.precision` bf16 or int8: of that graph, into `engines/<precision>/`; nothing is promised of it, and
    the engine says what it runs. Raises GateError when fewer than `options.min_fp8_share` of them do, or when that
    cannot be told; BackendError when the runtime is missing.
    """
    found, notes = open_run(path), Notes(progress)
    return build_engine_stage.build(found, options, notes)


def engine(path: Path, targets: Sequence[str] = (), plan: Path | None = None) -> list[engine_stage.EngineView]:
    """List what the engines of the run at `path` run, read from them: each matrix product, the kernels around it,
    attention, what stayed wide and why.

    `plan`: read this file instead, as an engine for the one target (what `engines/<target>.sh` built, say). Raises
    nothing for what it finds.
    """
    return engine_stage.view_engines(open_run(path), tuple(targets), plan)


@alone("path")
def validate(
    path: Path, data: str | None = None, options: ValidateOptions = ValidateOptions(), progress: Reporter = SILENT
) -> "Accuracy":
    """Run the held-out text (or `data`) through BF16 and the FP8 runtimes, and write `accuracy.json`.

    Raises GateError when a runtime's perplexity exceeds BF16's by more than `options.max_ppl_increase` (a fraction),
    and UnfinishedError for a runtime that failed: the others' numbers are written first.
    """
    needs("calibrate", CALIBRATE_MODULES)

    found, notes = open_run(path), Notes(progress)
    return validate_stage.validate(found, data, options, notes)


def sensitivity(
    path: Path, options: SensitivityOptions = SensitivityOptions(), progress: Reporter = SILENT
) -> "Sensitivity":
    """Measure the loss that each quantized tensor of the run at `path` causes alone, on its calibration windows, worst
    first; written to `sensitivity.json`.
    """
    needs("calibrate", CALIBRATE_MODULES)
    return sensitivity_stage.sensitivity(open_run(path), options, Notes(progress))


def doctor(path: Path, options: DoctorOptions = DoctorOptions(), progress: Reporter = SILENT) -> "Checkup":
    """The stability checklist of the run at `path`: a verdict for everything that is known to go wrong, the worst
    first, from its files and from a few calibration windows through its BF16 and FP8 models.

    What needs the source model is `unknown` where that is gone. Raises nothing for what is bad (`refuse_bad` in
    `validate.advice.checkup` does).
    """
    return doctor_stage.examine(open_run(path), options, Notes(progress))


def tune(
    path: Path, options: TuneOptions = TuneOptions(), apply: bool = False, progress: Reporter = SILENT
) -> "Tuning":
    """The cheapest mix of one term, two terms and BF16, of rounding and of the cache's form, for the budget of
    `options`: chosen on the calibration windows of the run at `path`, measured on its evaluation text, written to
    `tune.json`. `apply`: make checkpoint and graphs anew by it, where it meets the budget (`met`).

    Raises InputError for `apply` without a budget, and where the source checkpoint is no longer there.
    """
    needs("calibrate", CALIBRATE_MODULES)

    found, notes = open_run(path), Notes(progress)
    tune_stage.check_budget(options, apply)
    tuned = tune_stage.tune(found, options, notes)
    if apply:
        _apply(path, tuned, notes)
    return tuned


@alone("path")
def _apply(path: Path, tuned: "Tuning", notes: Notes) -> None:
    """Make the run at `path` anew by what was `tuned`."""
    tune_stage.apply(open_run(path), tuned, notes)


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
    return generate_stage.compare(open_run(path), prompt, options)


def serve(
    path: Path, options: ServeOptions = ServeOptions(), ready: "Callable[[Server], object]" = lambda _: None
) -> int:
    """Serve the model of the run at `path` by OpenAI's API until it is told to end; returns how many requests were
    broken off then.

    `ready` is called in the thread that serves once requests are taken in, with the server: its `url`, and `stop()`,
    which any thread and any signal handler may call.
    """
    return serve_stage.serve(open_run(path), options, ready)


@alone("path")
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
    return bench_stage.bench(open_run(path), against, options, plot, Notes(progress))


@alone("path")
def triton(path: Path, options: TritonOptions = TritonOptions(), progress: Reporter = SILENT) -> list[Path]:
    """Write the Triton model repository of the run at `path`, in RUN/triton or at `options.out`; returns its files.

    Raises InputError for a directory there that is not empty and that fp8q did not write.
    """
    return triton_stage.deploy(open_run(path), options, Notes(progress))


@alone("path")
def report(path: Path, options: ReportOptions = ReportOptions(), progress: Reporter = SILENT) -> list[Path]:
    """Write `report.html` and `report.ipynb` of the run at `path`, beside the runs that `options.compare` names;
    returns their paths.

    Where the source model is here, both models go on from words of the evaluation text first.
    """
    found, notes = open_run(path), Notes(progress)
    others = [open_run(other) for other in options.compare]
    continuations_stage.write_continuations(found, options.continuations, notes)
    return report_stage.report(found, others, notes)


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
    return inspect_stage.inspect(open_run(path), delayed, against, Notes(progress))


@dataclass(frozen=True)
class RunOptions:
    """Options of all stages."""

    calibrate: CalibrateOptions = CalibrateOptions()
    export: ExportOptions = ExportOptions()
    engine: EngineOptions = EngineOptions()
    validate: ValidateOptions = ValidateOptions()
    triton: TritonOptions = TritonOptions()


@alone("out")
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
    found = _calibrate(model, data, out, eval_data, options, options, progress)
    if process_rank().rank:
        return found  # the first rank alone does what follows
    gates, unfinished = list[GateError](), list[UnfinishedError]()
    steps: dict[str, Callable[[], object]] = {
        "build-engine": lambda: build_engine(out, options.engine, progress),
        "validate": lambda: validate(out, None, options.validate, progress),
        "triton": lambda: triton(out, options.triton, progress),
        "report": lambda: report(out, progress=progress),
    }
    for name, step in steps.items():
        if name in export_stage.OF_A_GRAPH and found.without_graph():
            progress.note(f"{name}: left out, since {out} has no ONNX graph")
            continue
        try:
            step()
        except GateError as gate:
            gates.append(gate)
        except UnfinishedError as error:
            unfinished.append(error)
    if unfinished:
        raise UnfinishedError("; ".join(map(str, [*unfinished, *gates])))
    if gates:
        raise GateError("; ".join(map(str, gates)))
    return found
