"""The stage `report`: describe the run in a page and a notebook, and compare it with other runs.

Its stage `continue` lets BF16 and FP8 continue prompts from the evaluation text.
"""

from collections.abc import Sequence
from pathlib import Path

from ..core.errors import BackendError, InputError
from ..core.files import write_document
from ..core.run import Run
from ..options import ContinueOptions, PageOptions, ReportOptions
from ..validate.accuracy.continuations import TOKENS
from ..validate.report import report as page
from ..validate.report.run_comparison import is_same_model
from .pipeline.stage import CALIBRATE_MODULES, NO_FACTS, Key, Notes, needs
from .pipeline.stages import CONTINUE, REPORT, ContinueFacts
from .shared.model_files import fp8_files
from .shared.opening import open_run


def write_continuations(run: Run, options: ContinueOptions, notes: Notes) -> None:
    """Let both models continue some passages of the evaluation text, unless that is done.

    Where the source model or its runtime is missing, or memory does not hold the model, a note says so, and the results
    of an earlier call stay.
    """
    if not options.continuations or not run.evaluation.is_file():
        return
    inputs = fp8_files(run, graph=False) | {
        run.evaluation.name: run.record().stages["corpus"].outputs[run.evaluation.name]
    }
    key = Key(inputs, options, ContinueFacts(tokens=TOKENS))
    if CONTINUE.is_current(run, key):
        return
    try:
        needs("calibrate", CALIBRATE_MODULES)
        from .continuations import continued, too_much

        if fault := too_much(run):
            notes.note(f"no continuations: {fault}")
            return
        with CONTINUE.writing(run, key, notes) as log:
            write_document(run.continuations, continued(run, options.continuations))
            log.outputs.append(run.continuations)
    except (BackendError, InputError) as error:
        notes.note(f"no continuations: {error}")


def report(run: Run, notes: Notes, options: ReportOptions) -> list[Path]:
    """Let both models continue prompts of the evaluation text, and write the page and the notebook of `run`."""
    others = [open_run(other) for other in options.compare]
    write_continuations(run, options, notes)
    return write_report(run, others, notes)


def write_report(run: Run, others: Sequence[Run], notes: Notes) -> list[Path]:
    """Write both report files of `run`, compared with `others`, where they are not current; return their paths.

    Raises InputError for a run that is compared with itself, or named twice.
    """
    roots = [compared.root.resolve() for compared in (run, *others)]
    for number, root in enumerate(roots):
        if root in roots[:number]:
            raise InputError(f"--compare {others[number - 1].root}", "is in the report already", "name each run once")
    inputs = outputs(run) | {
        f"compared {number} {name}": digest
        for number, other in enumerate(others)
        for name, digest in outputs(other).items()
    }
    for other in others:
        if not is_same_model(run, other):
            notes.note(f"--compare {other.root}: is of another model than {run.root}, and the table says so")
    key = Key(inputs, PageOptions(), NO_FACTS)
    if not REPORT.is_current(run, key):
        with REPORT.writing(run, key, notes) as log:
            log.outputs += page.render_report(run, notes, others)
    return [run.report_html, run.report_ipynb]


def outputs(run: Run) -> dict[str, str]:
    """Name -> SHA-256 of the outputs of all stages but this one."""
    return {
        name: digest
        for stage, record in run.record().stages.items()
        if stage != "report"
        for name, digest in record.outputs.items()
    }
