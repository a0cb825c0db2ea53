"""Gates of `validate`: what is comparable, numbers that are none, and the limits that the user gave."""

from math import isfinite

from ...core.columns import nats
from ...core.commands import name_in_commands, tune_command
from ...core.errors import GateError, InputError
from ...core.run import Run
from ...options import FLOAT, NOT_SERVED, VerdictLimits
from ...quantize.scales.decisions import load_scales
from ...quantize.scales.scheme import in_two_codes
from ...validate.accuracy.decision import beside_limit, measured_of_100, of_100, percent
from ...validate.accuracy.document import Accuracy, Verdict
from ...validate.accuracy.limits import tune_budget


def check_gates(run: Run, accuracy: Accuracy, limits: VerdictLimits) -> None:
    """Check the numbers of all runtimes, and those with each adapter, and the verdict where a limit was asked for."""
    for what, row in accuracy.with_adapters():
        check_numbers(row, what)
    check_verdict(run, accuracy, limits)


def check_comparable(runtimes: tuple[str, ...], limits: VerdictLimits) -> None:
    """Raise InputError when `runtimes` include nothing to compare with a limit that was asked for."""
    if limits.asked and ("bf16" not in runtimes or NOT_SERVED.issuperset(runtimes)):
        raise InputError(
            limits.asked,
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
        bad = f"{name}{what}: perplexity is {runtime.perplexity} on {accuracy.protocol.dataset}"
        where = runtime.not_finite
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


def check_verdict(run: Run, accuracy: Accuracy, limits: VerdictLimits) -> None:
    """Raise GateError where the verdict of `accuracy` is that a runtime, or an adapter, loses more than a limit, or has
    no finite perplexity; nothing where no limit was asked for.

    Raises InputError when there is nothing to compare with the limit.
    """
    if not limits.asked:
        return
    check_comparable(tuple(accuracy.runtimes), limits)
    verdict = accuracy.verdict
    if verdict and verdict.kind in ("worse", "broken"):
        graph = run.without_graph() is None
        plugin = run.scales.is_file() and bool(in_two_codes(load_scales(run).forms))
        tune = tune_command(name_in_commands(run.root), tune_budget(verdict), graph, plugin)
        beyond = " and ".join(_beyond(verdict, limits))
        raise GateError(f"{verdict.runtime}", beyond, f"`{tune}` finds the cheapest mix that meets it")


def _beyond(verdict: Verdict, asked: VerdictLimits) -> list[str]:
    """The measures of a verdict that are beyond their limits, in words: as an option gave them, or by default."""

    def limit(option: str, value: str, by_option: float | None) -> str:
        if by_option is None:
            return f"more than the limit {value} ({option})"
        return f"more than {option} {value}"

    rise = verdict.perplexity_increase
    kl = verdict.kl_nats
    flips = verdict.flips
    words: list[str] = []
    if rise is None or "perplexity" in verdict.exceeded:
        above = "not a number"
        if rise is not None:
            text = beside_limit(f"{rise:.2%}", 100 * rise, 100 * verdict.limit, percent(verdict.limit))
            above = f"{text.removesuffix('%')}% above BF16's"
        largest = limit("--max-ppl-increase", f"{100 * verdict.limit:g}%", asked.max_ppl_increase)
        words.append(f"perplexity is {above}, {largest}")
    if "kl" in verdict.exceeded and kl is not None and verdict.kl_limit_nats is not None:
        most = nats(verdict.kl_limit_nats)
        measured = beside_limit(nats(kl), kl, verdict.kl_limit_nats, most)
        words.append(f"KL from BF16 is {measured} nats a token, {limit('--max-kl', most, asked.max_kl)}")
    if "flips" in verdict.exceeded and flips is not None and verdict.flips_limit is not None:
        most = of_100(verdict.flips_limit)
        measured = beside_limit(measured_of_100(flips), 100 * flips, 100 * verdict.flips_limit, most)
        differ = f"{measured} of 100 next tokens differ from BF16's"
        words.append(f"{differ}, {limit('--max-flips', f'{most}%', asked.max_flips)}")
    return words
