"""Gates of `validate`: what is comparable, numbers that are none, and the limit that the user gave."""

from math import isfinite

from ...core.commands import name_in_commands, tune_command
from ...core.errors import GateError, InputError
from ...core.run import Run
from ...options import FLOAT, NOT_SERVED
from ...validate.accuracy.document import Accuracy


def check_gates(run: Run, accuracy: Accuracy, limit: float | None) -> None:
    """Check the numbers of all runtimes, and those with each adapter, and the verdict where a `limit` was asked for."""
    for what, row in accuracy.with_adapters():
        check_numbers(row, what)
    check_increase(run, accuracy, limit)


def check_comparable(runtimes: tuple[str, ...], limit: float | None) -> None:
    """Raise InputError when `runtimes` include nothing to compare with the `limit`."""
    if limit is not None and ("bf16" not in runtimes or NOT_SERVED.issuperset(runtimes)):
        raise InputError(
            f"--max-ppl-increase {100 * limit:g}%",
            f"needs bf16 and an FP8 runtime to compare, and the runtimes are {', '.join(runtimes)}",
            "add what is missing to --runtimes",
        )


def check_numbers(accuracy: Accuracy, what: str = "") -> None:
    """Raise InputError for a float model without a finite perplexity, and GateError for another runtime without one.

    The files of the float model are at fault then. `what` follows the runtime's name in the message.
    """
    for name, runtime in sorted(accuracy.runtimes.items(), key=lambda named: named[0] not in NOT_SERVED):
        if isfinite(runtime.perplexity):
            continue
        bad, where = (
            f"{name}{what}: perplexity is {runtime.perplexity} on {accuracy.protocol.dataset}",
            runtime.not_finite,
        )
        if where:
            bad += f", first at position {where.position} of window {where.window} (from 0)"
            bad += f", by the output of {where.module}" if where.module else ""
        if name in FLOAT or (where and where.bf16):
            raise InputError(
                bad,
                "the model gives no finite numbers before anything is quantized",
                "check its config.json and its weights",
            )
        known = where is None or where.bf16 is not None
        theirs = "and BF16's is a number" if known else "and BF16's is not known, since its checkpoint is gone"
        raise GateError(
            "", f"{bad}, {theirs}", "`fp8q inspect` shows what stands out, keep modules in BF16 with --skip"
        )


def check_increase(run: Run, accuracy: Accuracy, limit: float | None) -> None:
    """Raise GateError where the verdict of `accuracy` is that a runtime, or an adapter, loses more than `limit` (a
    fraction), or has no finite perplexity; nothing where None was asked for.

    Raises InputError when there is nothing to compare with the limit.
    """
    if limit is None:
        return
    check_comparable(tuple(accuracy.runtimes), limit)
    verdict = accuracy.verdict
    if verdict and verdict.kind in ("worse", "broken"):
        budget, graph = f"--max-ppl-increase {100 * limit:g}%", run.without_graph() is None
        rise = verdict.perplexity_increase
        above = "not a number" if rise is None else f"{rise:.2%} above BF16's"
        raise GateError(
            f"{verdict.runtime}",
            f"perplexity is {above}, more than {budget}",
            f"`{tune_command(name_in_commands(run.root), budget, graph)}` finds the cheapest mix that meets it",
        )
