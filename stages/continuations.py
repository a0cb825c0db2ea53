"""The stage `continue` of a report: let BF16 and FP8 continue prompts from the evaluation text."""

import numpy as np

from ..core.errors import BackendError, InputError
from ..core.files import write_document
from ..core.run import Run
from ..options import ContinueOptions, GenerateOptions
from ..validate.accuracy.continuations import Continuation, Continuations
from .corpus import load_tokens
from .generate import compare_all
from .pipeline.stage import Key
from .pipeline.stages import CONTINUE, ContinueFacts
from .pipeline.steps import CALIBRATE_MODULES, Notes, needs
from .shared.model_files import fp8_files

#: Tokens of a prompt, and tokens of a continuation.
PROMPT_TOKENS, TOKENS = 32, 48


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
