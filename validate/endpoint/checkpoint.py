"""Run a checkpoint through transformers in the place of a server: the same prompts, as many likeliest tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...calibrate.input.silence import muted, quiet_transformers
from ...core.errors import BackendError, InputError
from ...core.reporter import Reporter
from ...serve.loop.text import ModelFileError, Vocabulary
from ..accuracy.top_logits import top_of
from .answers import LikelyTokens, joined_answers
from .distance import SERVED
from .prompts import Prompt

if TYPE_CHECKING:
    import torch


def run_checkpoint(
    directory: Path, own: Path, prompts: Sequence[Prompt], device: str, report: Reporter
) -> LikelyTokens:
    """The answers of the checkpoint in `directory`, in its own type; `own`: the run's, whose tokens the prompts are.

    Raises InputError for a directory without a checkpoint or with another tokenizer, BackendError where transformers
    cannot run it.
    """
    import torch

    check_tokens(directory, own, prompts)
    model = loaded_checkpoint(directory).to(device)
    found = list[LikelyTokens]()
    with torch.inference_mode(), report.track(f"Running {directory}", len(prompts), "windows") as advance:
        for prompt in prompts:
            ids = torch.tensor([prompt.ids], device=device)
            try:
                logits = model(input_ids=ids, use_cache=False).logits[0, prompt.positions - 1].float()
            except (RuntimeError, IndexError) as error:
                told = f"{type(error).__name__}: {str(error)[:200]}"
                raise BackendError(f"{directory}: failed on a window ({told})") from None
            top = top_of(logits)
            targets = ids[0, torch.from_numpy(prompt.positions).to(device)]
            nll = -torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0].double().cpu().numpy()
            tokens, logprobs = top.tokens[:, :SERVED].astype(np.int64), top.logprobs[:, :SERVED].astype(np.float64)
            found.append(LikelyTokens(prompt.rows, tokens, logprobs, nll, len(prompt.ids), 0))
            advance(1)
    return joined_answers(found)


def loaded_checkpoint(directory: Path) -> "torch.nn.Module":
    """The checkpoint as transformers loads it, in its own type; raises InputError where it cannot."""
    from transformers import AutoModelForCausalLM

    try:
        with quiet_transformers(), muted():
            loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
                directory, dtype="auto", local_files_only=True, trust_remote_code=False
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        told = " ".join(str(error).split())[:300]
        raise InputError(
            f"--model {directory}: transformers cannot load it ({told}); name a checkpoint's directory"
        ) from None
    return loaded.eval()


def check_tokens(directory: Path, own: Path, prompts: Sequence[Prompt]) -> None:
    """Raise InputError where the checkpoint's tokenizer reads the prompts' tokens as another text than the run's."""
    if not directory.is_dir():
        raise InputError(f"--model {directory}: there is no such directory; give that of a checkpoint")
    try:
        theirs, ours = (Vocabulary.read(each) for each in (directory, own))
    except ModelFileError as error:
        raise InputError(str(error)) from None
    for prompt in prompts:
        texts = [each.tokenizer.decode(list(prompt.ids), skip_special_tokens=False) for each in (theirs, ours)]
        if texts[0] != texts[1]:
            raise InputError(
                f"--model {directory}: has another tokenizer than the run, and so is another model; its tokens cannot "
                "be compared"
            )
