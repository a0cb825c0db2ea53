"""The stage `validate`: the held-out text, or another, through the runtimes; and the gate on what is lost."""

from math import isfinite
from pathlib import Path
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
    from ..validate.perplexity import Evaluation


def validate(run: Run, data: str | None, options: ValidateOptions, notes: Notes) -> "Accuracy":
    """Run the held-out text, or `data`, through `options.runtimes`, where that is not done, and return what was found.

    Raises GateError, when all is written, for a runtime that loses more than `options.max_ppl_increase`.
    """
    from ..validate.accuracy import load_accuracy

    inputs = fp8_files(run)
    for precision in options.baselines:
        inputs |= files_of(run, precision)
    check_comparable(options.runtimes, options.max_ppl_increase)
    check_accumulator(options)
    tokens = evaluation(run, data, options.context, options.stride, notes)
    inputs["tokens"] = tokens.protocol.sha256
    chosen: dict[str, object] = {
        "runtimes": list(options.runtimes),
        "context": tokens.protocol.context,
        "stride": tokens.protocol.stride,
    }
    if options.accumulator:
        chosen |= {"accumulator": options.accumulator, "accumulator_windows": options.accumulator_windows}
    if not run.is_current("validate", inputs, chosen):
        with stage(run, "validate", inputs, chosen, notes) as log:
            log.outputs += _evaluate(run, tokens, options, notes)
    accuracy = load_accuracy(run)
    check_numbers(accuracy)
    check_increase(accuracy, options.max_ppl_increase)
    return accuracy


def _evaluate(run: Run, tokens: "Evaluation", options: ValidateOptions, notes: Notes) -> list[Path]:
    """Run `tokens` through what was asked for, and write what was found; returns the files."""
    from ..validate.accuracy import save_accuracy
    from ..validate.compare import BASELINE, compare
    from ..validate.runtimes import forwards, vocabulary
    from ..validate.sums import compare_sums, cost, sample

    taken = sample(tokens, options.accumulator_windows)
    if options.accumulator:
        notes.note(cost(run, taken, options.accumulator, device()))
    made = forwards(options.runtimes, run, lambda: source_of(run), device())
    accuracy, nll = compare(tokens, made, vocabulary(run.model), notes)
    if options.accumulator:
        baseline = made.get(BASELINE)
        made.clear()  # their weights would stay in memory beside the next reference's
        sums, their_nll = compare_sums(run, taken, baseline, options.accumulator, device(), notes)
        accuracy, nll = accuracy.model_copy(update={"runtimes": accuracy.runtimes | sums}), nll | their_nll
    return save_accuracy(run, accuracy, nll)


def check_accumulator(options: ValidateOptions) -> None:
    """Raise InputError for sums of a reference that is not asked for."""
    if options.accumulator and "reference" not in options.runtimes:
        raise InputError(
            f"--accumulator {options.accumulator}: is of the runtime reference, and the runtimes are "
            f"{', '.join(options.runtimes)}; add reference to --runtimes"
        )


def check_comparable(runtimes: tuple[str, ...], limit: float | None) -> None:
    """Raise InputError when `runtimes` leave nothing to hold against the `limit`."""
    if limit is not None and ("bf16" not in runtimes or WITHOUT_FP8.issuperset(runtimes)):
        raise InputError(
            f"--max-ppl-increase {limit:.2%}: needs bf16 and an FP8 runtime to compare, and the runtimes are "
            f"{', '.join(runtimes)}; add what is missing to --runtimes"
        )


def check_numbers(accuracy: "Accuracy") -> None:
    """Raise InputError for a float model whose perplexity is no finite number, which its files are to blame for, and
    GateError for an FP8 runtime of which that is so.
    """
    for name, runtime in sorted(accuracy.runtimes.items(), key=lambda named: named[0] not in WITHOUT_FP8):
        if isfinite(runtime.perplexity):
            continue
        if name in WITHOUT_FP8:
            raise InputError(
                f"{name}: perplexity is {runtime.perplexity} on {accuracy.protocol.dataset}: the model gives no finite "
                "numbers before anything is quantized; check its config.json and its weights"
            )
        raise GateError(
            f"{name}: perplexity is {runtime.perplexity}, and the float model's is a number; `fp8q inspect` shows what "
            "stands out, keep modules in BF16 with --skip"
        )


def check_increase(accuracy: "Accuracy", limit: float | None) -> None:
    """Raise GateError when the perplexity of a runtime that ran all windows is more than `limit` (a fraction) above
    BF16's, or is no number.

    Raises InputError when there is nothing to hold against the limit.
    """
    if limit is None:
        return
    check_comparable(tuple(accuracy.runtimes), limit)
    increases = {
        name: runtime.perplexity_increase
        for name, runtime in accuracy.runtimes.items()
        if name not in WITHOUT_FP8 and not runtime.sampled
    }
    for name, increase in increases.items():
        runtime = accuracy.runtimes[name]
        if increase is not None and not increase <= limit:
            raise GateError(
                f"{name}: perplexity {runtime.perplexity:.4f} is {increase:.2%} above BF16's, more than "
                f"--max-ppl-increase {limit:.2%}; `fp8q tune RUN --max-ppl-increase {limit:.2%}` finds the cheapest "
                "mix that meets it"
            )
