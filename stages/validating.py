"""The stage `validate`: the held-out text, or another, through the runtimes; and the gate on what is lost."""

from typing import TYPE_CHECKING

from ..errors import GateError, InputError
from ..options import WITHOUT_FP8, ValidateOptions
from ..run import Run
from .graphs import files_of, fp8_files
from .other_text import evaluation
from .sources import source_of
from .steps import Notes, device, stage

if TYPE_CHECKING:
    from ..validate.accuracy import Accuracy


def validate(run: Run, data: str | None, options: ValidateOptions, notes: Notes) -> "Accuracy":
    """Run the held-out text, or `data`, through `options.runtimes`, where that is not done, and return what was found.

    Raises GateError, when all is written, for a runtime that loses more than `options.max_ppl_increase`.
    """
    from ..validate.accuracy import load_accuracy, save_accuracy
    from ..validate.compare import compare
    from ..validate.runtimes import forwards, vocabulary

    inputs = fp8_files(run)
    for precision in options.baselines:
        inputs |= files_of(run, precision)
    tokens = evaluation(run, data, options.context, options.stride, notes)
    inputs["tokens"] = tokens.protocol.sha256
    chosen = {
        "runtimes": list(options.runtimes),
        "context": tokens.protocol.context,
        "stride": tokens.protocol.stride,
    }
    if not run.is_current("validate", inputs, chosen):
        with stage(run, "validate", inputs, chosen, notes) as log:
            made = forwards(options.runtimes, run, lambda: source_of(run), device())
            found, nll = compare(tokens, made, vocabulary(run.model), notes)
            log.outputs += save_accuracy(run, found, nll)
    accuracy = load_accuracy(run)
    check_increase(accuracy, options.max_ppl_increase)
    return accuracy


def check_increase(accuracy: "Accuracy", limit: float | None) -> None:
    """Raise GateError when a runtime's perplexity is more than `limit` (a fraction) above BF16's, or is no number.

    Raises InputError when there is nothing to hold against the limit.
    """
    if limit is None:
        return
    increases = {
        name: runtime.perplexity_increase for name, runtime in accuracy.runtimes.items() if name not in WITHOUT_FP8
    }
    if not increases or None in increases.values():
        raise InputError(
            f"--max-ppl-increase {limit:.2%}: needs bf16 and an FP8 runtime to compare, and the runtimes are "
            f"{', '.join(accuracy.runtimes)}; add what is missing to --runtimes"
        )
    for name, increase in increases.items():
        runtime = accuracy.runtimes[name]
        if increase is not None and not increase <= limit:
            raise GateError(
                f"{name}: perplexity {runtime.perplexity:.4f} is {increase:.2%} above BF16's, more than "
                f"--max-ppl-increase {limit:.2%}; `fp8q inspect` shows the modules that lose most, keep some in BF16 "
                "with --skip"
            )
