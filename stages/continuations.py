"""The passages that FP8 and BF16 go on from in a report: both decode token by token, each model whole."""

import numpy as np

from ..calibrate.model.memory import weight_bytes
from ..calibrate.model.source import open_source
from ..calibrate.model.tokenizer import stored_tokenizer
from ..core.run import Run
from ..options import GenerateOptions
from ..quantize.reading.dequantized import recognize
from ..validate.accuracy.continuations import PROMPT_TOKENS, TOKENS, Continuation, Continuations
from .corpus import load_tokens
from .generate import compare_all
from .measure import beyond
from .shared.model_files import source_path


def too_much(run: Run) -> str:
    """Explain that memory does not hold the model of `run`; empty where it does.

    Raises InputError where the source model is missing.
    """
    size = weight_bytes(open_source(source_path(run), fingerprinted=False, recognize=recognize))
    fault = beyond(size)
    return f"the weights take {size / 1e9:,.3g} GB in BF16, {fault}" if fault else ""


def continued(run: Run, count: int) -> Continuations:
    """Let both models of `run` go on from `count` passages of its evaluation text."""
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
