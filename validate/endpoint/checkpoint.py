"""Run a checkpoint through transformers in the place of a server: the same prompts, as many likeliest tokens."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...calibrate.input.silence import muted, quiet_transformers
from ...calibrate.input.untrusted import error_text, foreign
from ...calibrate.measure.scoring import log_softmax, losses
from ...core.errors import BackendError, Fp8qError, InputError
from ...core.reporter import Reporter
from ...quantize.reading.codecs import CODECS
from ...serve.loop.text import ModelFileError, Vocabulary
from ..accuracy.log_probabilities import check_logprobs
from ..accuracy.top_logits import top_of
from .answers import LikelyTokens, joined_answers
from .distance import SERVED
from .prompts import Prompt

if TYPE_CHECKING:
    import torch

#: The remedy for a checkpoint that cannot be loaded.
AGAIN = "copy or download it again, or name another directory"
#: How the names of weights' scales end. transformers only warns of those that it does not read (ModelOpt's, Conv1D's).
WEIGHT_SCALES = (".weight_scale_2", *(f".{name}" for codec in CODECS.values() for name in codec.weight_scales))


def run_checkpoint(
    directory: Path, run_model: Path, prompts: Sequence[Prompt], device: str, report: Reporter
) -> LikelyTokens:
    """The answers of the checkpoint in `directory`, in its own type; `run_model`: the run's, whose tokens the prompts
    are.

    Raises InputError for a directory without a checkpoint or with another tokenizer, BackendError where transformers
    cannot run it.
    """
    import torch

    check_tokens(directory, run_model, prompts)
    model = loaded_checkpoint(directory).to(device)
    parts: list[LikelyTokens] = []
    with torch.inference_mode(), report.track(f"Running {directory}", len(prompts), "windows") as advance:
        for prompt in prompts:
            ids = torch.tensor([prompt.ids], device=device)
            with foreign(lambda error: BackendError(directory, f"failed on a window ({_error_text(error)})")):
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


def loaded_checkpoint(
    directory: Path, subject: str = "--model ", dtype: "torch.dtype | None" = None
) -> "torch.nn.Module":
    """Load the checkpoint with transformers, in `dtype` or (None) its own; raises InputError where it cannot.

    `subject`: what stands before the directory in errors. Raises BackendError where a library that its quantization
    needs is missing.
    """
    from transformers import AutoModelForCausalLM

    return complete_model(directory, subject, lambda: AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype or "auto", local_files_only=True, trust_remote_code=False, output_loading_info=True
    ))  # fmt: skip


@contextmanager
def loading_by_transformers(directory: Path, subject: str) -> Iterator[None]:
    """Silence transformers in this block, and turn its exceptions into an InputError or BackendError that names the
    checkpoint in `directory`, with `subject` before it.
    """

    def fault(error: BaseException) -> Fp8qError:
        if isinstance(error, ImportError):  # of a quantizer that its config.json names
            return BackendError(f"{subject}{directory}", f"needs what is not installed here ({_error_text(error)})")
        return InputError(f"{subject}{directory}", f"transformers cannot load it ({_error_text(error)})", AGAIN)

    with quiet_transformers(), muted(), foreign(fault):
        yield


def complete_model(
    directory: Path, subject: str, load: Callable[[], Any], wanted: Callable[[str], bool] = lambda name: True
) -> "torch.nn.Module":
    """Return the model of `load`, a `from_pretrained` of transformers with its loading info, in evaluation mode.

    Raises InputError where it lacks weights, or where scales among the `wanted` names of tensors were not read.
    """
    import torch

    with loading_by_transformers(directory, subject):
        loaded, report = load()
    if missing := sorted(report["missing_keys"]):
        more = f", nor {len(missing) - 1:,} more tensors" if len(missing) > 1 else ""
        raise InputError(
            f"{subject}{directory}", f"has no {missing[0]}{more}, and would run with random weights", AGAIN
        )
    if unread := sorted(name for name in report["unexpected_keys"] if name.endswith(WEIGHT_SCALES) and wanted(name)):
        raise InputError(
            f"{subject}{directory}",
            f"transformers does not know this quantization: it reads no {unread[0]}, nor {len(unread) - 1:,} more "
            "scales, and takes the codes of weights for their values",
            "serve it with a server that does, or export it in compressed-tensors' form",
        )
    assert isinstance(loaded, torch.nn.Module), "a model of transformers is a module"
    return loaded.eval()


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error_text(error)}"


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
