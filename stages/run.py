"""`fp8q run`: run all stages, one after the other."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt

from ..calibrate.model.memory import weight_bytes
from ..calibrate.model.source import Source
from ..calibrate.ranks.torchrun import process_rank
from ..calibrate.text.corpus import lower_default
from ..calibrate.text.evaluation import Evaluation
from ..calibrate.text.packing import Packing
from ..core.errors import GateError, InputError, UnfinishedError
from ..core.reporter import SILENT, Reporter
from ..core.run import Run
from ..export.engine.build import resolve
from ..options import (
    DEFAULT_SEQ_LEN,
    LEAST_WINDOWS,
    WITHOUT_GRAPH,
    ReportOptions,
    RunOptions,
    ScaleOptions,
    ValidateOptions,
)
from ..options.form import longest_tail
from .build_engine import build_engine
from .calibrate import Calibration, calibrate, without_idle_graph
from .corpus import Collected
from .export import LEFT_OUT, OF_A_GRAPH
from .forms import chosen_options, validate_acceptable
from .measure import streamed
from .other_text import cut_for
from .pipeline.stage import Notes, device
from .pipeline.stages import MEASURE
from .plan import Outlook, check_free_disk, plan_of, tell
from .preflight import OnlyPlannedError
from .report import report
from .shared.gates import check_comparable
from .shared.opening import run_at
from .triton import triton
from .validate import behind_a_prompt, check_accumulator, check_enough, check_runtimes

#: The largest model in BF16, in bytes, of which a CPU evaluates as much as a GPU.
SMALL_BYTES = 500_000_000


@dataclass
class Following:
    """The stages of `fp8q run` after calibration (`preflight.LaterStages`), by its options, to which `check_fit` adds
    how much is evaluated.
    """

    options: RunOptions
    notes: Notes
    graph: bool = True

    def check_options(self, run: Run) -> None:
        """Raise InputError for a gate without anything to compare, and for graphs that no earlier stage writes."""
        engine = self.options.engine
        validate = self.options.validate
        check_comparable(validate.chosen, validate)
        check_accumulator(validate)
        done = run.record().stages
        for precision in (*validate.baselines, *([engine.precision] if engine.precision != "fp8" else [])):
            if f"export-{precision}" not in done:
                raise InputError(
                    run.root,
                    f"has no graph in {precision}, which is made of a finished run",
                    f"leave it out of this one, and run `fp8q export {run.root} --precision {precision}` after it",
                )

    def check_graph(self, run: Run, no_graph: str | None) -> None:
        """Raise InputError for a runtime that needs an ONNX graph, where none can be made or none is asked for;
        otherwise what building the engine would: a missing target or runtime.
        """
        left_out = None if self.options.export.graph else LEFT_OUT
        self.graph = not (no_graph or left_out)
        if reason := no_graph or left_out:
            check_runtimes(self.options.validate.runtimes, run, reason)
        else:
            resolve(self.options.engine)

    def check_fit(self, source: Source, collected: Collected) -> None:
        """Raise InputError for lengths beyond the model's positions, sizes that do not fit the length, and text that is
        shorter than a window.
        """
        options = self.options
        limit = source.served_positions
        positions = "the model's positions"
        length = lower_default("--max-seq-len", options.engine.max_seq_len, DEFAULT_SEQ_LEN, limit, positions, SILENT)
        replace(options.engine, max_seq_len=length)  # its constructor checks the sizes against the length
        self.options = replace(options, validate=self._affordable(source, collected))
        tokens, validate = self._evaluation(source, collected)
        check_enough(tokens, validate, Notes(SILENT), "--eval-data")

    def _evaluation(self, source: Source, collected: Collected) -> tuple[Evaluation, ValidateOptions]:
        """Cut the windows that are evaluated, with the options of it."""
        options = self.options
        packing = Packing(collected.windows.shape[1], tuple(collected.opening.prefix))
        tail = longest_tail(rule.form for rule in options.calibrate.form_rules)
        limit = source.served_positions
        window = options.validate.context or min(packing.size, limit or packing.size)
        validate = behind_a_prompt(options.validate, window, tail)
        return cut_for(collected.evaluation, collected.names[1], validate, packing, limit, SILENT), validate

    def _affordable(self, source: Source, collected: Collected) -> ValidateOptions:
        """Return the options of an evaluation that takes no longer than calibrating, where a larger model runs on a CPU
        and nobody asked for more; note how much wider its intervals become.
        """
        validate = self.options.validate
        if validate.max_tokens is not None or device() != "cpu" or weight_bytes(source) <= SMALL_BYTES:
            return validate
        tokens, asked = self._evaluation(source, collected)
        names = [name for name in validate.chosen if self.graph or name in WITHOUT_GRAPH]
        most = max(int(collected.windows.size) // len(names), LEAST_WINDOWS * tokens.ids.shape[1])
        if asked.as_served is not None or most >= tokens.protocol.tokens:
            return validate
        self.notes.note(
            f"--max-tokens: {most:,} tokens are evaluated, so that it takes no longer than calibrating on a CPU: the "
            f"interval is some {sqrt(tokens.protocol.tokens / most):.1f} times as wide as by default; --max-tokens "
            f"{tokens.protocol.tokens} takes that"
        )
        return replace(validate, max_tokens=most)

    def plan(self, run: Run, source: Source, collected: Collected, moments: bool, spent: bool) -> None:
        """Tell what each stage takes here, unless the run is measured already."""
        alone = self.options.planning.plan
        if process_rank().ranks > 1 or (MEASURE.name in run.record().stages and not alone):
            return
        tokens, _ = self._evaluation(source, collected)
        stream = streamed(source, self.options.calibrate.stream, Notes(SILENT))
        outlook = Outlook(self.graph, moments, stream or spent, spent)
        stages = plan_of(source, collected, tokens, self.options, outlook)
        tell(stages, self.notes)
        check_free_disk(run, stages)
        if alone:
            raise OnlyPlannedError

    def chosen_options(self, run: Run) -> ScaleOptions:
        """The options of scales for the form that was found for `run`, or those that were asked for."""
        return chosen_options(run, self.options)


def run_all(run: Run, notes: Notes, what: Calibration) -> Run:
    """Calibrate, then build, validate, deploy and report.

    GateError and UnfinishedError are raised after everything is written.
    """
    what = without_idle_graph(what, notes)
    options = what.options
    later = Following(options, notes)
    try:
        calibrate(run, notes, replace(what, later=later))
    except OnlyPlannedError:
        return run
    if process_rank().rank == 0:  # the first rank alone does what follows
        _do_all(run, later.options, notes.report)
    return run


def _do_all(run: Run, options: RunOptions, progress: Reporter) -> None:
    """Run all later stages whose input files `run` has; raise their GateError and UnfinishedError at the end."""
    stages: dict[str, Callable[[Run, Notes], object]] = {
        "build-engine": lambda run, notes: build_engine(run, notes, options.engine),
        "validate": lambda run, notes: validate_acceptable(run, notes, options),
        "triton": lambda run, notes: triton(run, notes, options.triton),
        "report": lambda run, notes: report(run, notes, ReportOptions()),
    }
    if options.finds_form and not options.validate.engines:  # an engine is built of the form that is found
        stages = {name: stages[name] for name in ("validate", "build-engine", "triton", "report")}
    gates: list[GateError] = []
    unfinished: list[UnfinishedError] = []
    for name, stage in stages.items():
        if name in OF_A_GRAPH and run.without_graph():
            progress.note(f"{name}: left out, since {run.root} has no ONNX graph")
            continue
        try:
            with run_at(run.root, progress, modules=()) as (opened, notes):
                stage(opened, notes)
        except GateError as gate:
            gates.append(gate)
        except UnfinishedError as error:
            unfinished.append(error)
    if unfinished:
        raise UnfinishedError("", "; ".join(map(str, [*unfinished, *gates])))
    if gates:
        raise GateError("", "; ".join(map(str, gates)))
