"""The stage `report`: describe the run in a page and a notebook, and compare it with other runs.

Its stage `continue` lets BF16 and FP8 continue prompts from the evaluation text.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..core.errors import BackendError, InputError
from ..core.files import write_document
from ..core.run import Run
from ..options import ContinueOptions, GenerateOptions, PageOptions, ReportOptions
from ..validate.accuracy.continuations import Continuation, Continuations
from ..validate.report import report as page
from ..validate.report.run_comparison import is_same_model
from .corpus import load_tokens
from .generate import compare_all
from .pipeline.stage import CALIBRATE_MODULES, NO_FACTS, Key, Notes, needs
from .pipeline.stages import CONTINUE, REPORT, ContinueFacts
from .shared.model_files import fp8_files
from .shared.opening import open_run

#: Tokens of a prompt, and tokens of a continuation.
PROMPT_TOKENS = 32
TOKENS = 48


def write_continuations(run: Run, options: ContinueOptions, notes: Notes) -> None:
    """Let both models continue some passages of the evaluation text, unless that is done.

    Where the source model or its runtime is missing, a note says so, and the results of an earlier call stay.
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
        with CONTINUE.writing(run, key, notes) as log:
            write_document(run.continuations, _continued(run, options.continuations))
            log.outputs.append(run.continuations)
    except (BackendError, InputError) as error:
        notes.note(f"no continuations: {error}")


def _continued(run: Run, count: int) -> Continuations:
    from ..calibrate.model.tokenizer import stored_tokenizer

    ids = load_tokens(run, run.evaluation)
    length = min(PROMPT_TOKENS, len(ids))
    starts = np.unique(np.linspace(0, len(ids) - length, count + 2).astype(np.int64)[1:-1])
    tokenizer = stored_tokenizer(run.model)
    prompts = [str(tokenizer.decode(ids[start : start + length], skip_special_tokens=True)) for start in starts]
    answers = compare_all(run, prompts, GenerateOptions(max_tokens=TOKENS, runtime="reference"))
    return Continuations(
        tokens=TOKENS,
        continuations=[
            Continuation(
                prompt=prompt,
                bf16=answer.bf16.text,
                fp8=answer.fp8.text,
                common=answer.common,
                parts_at=answer.parts_at,
            )
            for prompt, answer in zip(prompts, answers, strict=True)
        ],
    )


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
