"""Run a checkpoint through transformers in the place of a server: the same prompts, as many likeliest tokens."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...calibrate.input.untrusted import foreign
from ...calibrate.measure.scoring import log_softmax, losses
from ...core.errors import BackendError, InputError
from ...core.reporter import Reporter
from ...serve.loop.text import ModelFileError, Vocabulary
from ..accuracy.log_probabilities import check_logprobs
from ..accuracy.top_logits import top_of
from .answers import LikelyTokens, joined_answers
from .distance import SERVED
from .prompts import Prompt


def run_checkpoint(
    directory: Path, run_model: Path, prompts: Sequence[Prompt], device: str, report: Reporter
) -> LikelyTokens:
    """The answers of the checkpoint in `directory`, in its own type; `run_model`: the run's, whose tokens the prompts
    are.

    Raises InputError for a directory without a checkpoint or with another tokenizer, BackendError where transformers
    cannot run it.
    """
    import torch

    from .transformers_loader import TransformersLoader, typed_error  # loads torch

    check_tokens(directory, run_model, prompts)
    model = TransformersLoader(directory, "--model ", device).load()
    parts: list[LikelyTokens] = []
    with torch.inference_mode(), report.track(f"Running {directory}", len(prompts), "windows") as advance:
        for prompt in prompts:
            ids = torch.tensor([prompt.ids], device=device)
            with foreign(lambda error: BackendError(directory, f"failed on a window ({typed_error(error)})")):
                logits = model(input_ids=ids, use_cache=False).logits[0, prompt.positions - 1].float()
            top = top_of(logits)
            try:
                check_logprobs(top.logprobs, logits.shape[-1], top.rest)
            except ValueError as error:
                raise BackendError(
                    directory, f"gives log-probabilities that no model can ({error})", "mend its weights"
                ) from None
            targets = ids[0, torch.from_numpy(prompt.positions).to(device)]
            nll = losses(log_softmax(logits), targets).double().cpu().numpy()
            tokens = top.tokens[:, :SERVED].astype(np.int64)
            logprobs = top.logprobs[:, :SERVED].astype(np.float64)
            parts.append(LikelyTokens(prompt.rows, tokens, logprobs, nll, len(prompt.ids), 0))
            advance(1)
    return joined_answers(parts)


def check_candidate(directory: Path) -> None:
    """Raise InputError where `directory` is none."""
    if not directory.is_dir():
        raise InputError(f"--model {directory}", "there is no such directory", "give that of a checkpoint")


def check_tokens(directory: Path, run_model: Path, prompts: Sequence[Prompt]) -> None:
    """Raise InputError where the checkpoint's tokenizer reads the prompts' tokens as another text than the run's."""
    check_candidate(directory)
    try:
        theirs, ours = (Vocabulary.read(path) for path in (directory, run_model))
    except ModelFileError as error:
        raise InputError(error.subject, error.fault, error.remedy) from None
    for prompt in prompts:
        texts = [
            vocabulary.tokenizer.decode(list(prompt.ids), skip_special_tokens=False) for vocabulary in (theirs, ours)
        ]
        if texts[0] != texts[1]:
            raise InputError(
                f"--model {directory}",
                "has another tokenizer than the run, and so is another model",
                "its tokens cannot be compared",
            )
