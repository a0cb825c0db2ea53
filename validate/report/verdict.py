"""Is it still the same model? One verdict, and what to do next.

The verdict is of the worst FP8 runtime that ran every window, and rests on the paired 95 % interval of its perplexity's
increase over BF16, not on the increase alone: what a text cannot tell apart is no loss, and what it cannot exclude is
no equality.

same      the whole interval lies within a tenth of a percent of BF16: what evaluations on other texts differ by, many
          times over, and no user sees
noise     the interval holds zero: on this text FP8 cannot be told from BF16. Or FP8 is no farther from FP32 than BF16
          is itself (KL, where the runtime fp32 ran): then what it adds is less than what BF16's own rounding does
better    the interval lies below zero, which happens by chance, and is no reason to worry
worse     the interval lies above zero
unknown   nothing was evaluated, or too little for an interval
broken    FP8's perplexity is no finite number
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite
from typing import Literal

from ...core.columns import Column, Table, nats
from ...options import NOT_SERVED
from .accuracy_rows import AccuracyRow
from .tables import interval, too_short

Kind = Literal["same", "noise", "better", "worse", "unknown", "broken"]
#: A change of perplexity that is none.
SAME = 1e-3
#: The colour of each, of the palette of `plots`.
TONES: dict[Kind, str] = {
    "same": "#009e73", "noise": "#0072b2", "better": "#009e73", "worse": "#d55e00", "unknown": "#666667",
    "broken": "#d55e00",
}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """The `sentence` says how much and how sure; `runtime` is the one it is of, None where nothing was compared, and
    `rise` its perplexity's increase.
    """

    kind: Kind
    sentence: str
    runtime: str | None = None
    rise: float = 0.0

    def _repr_html_(self) -> str:
        """Render the verdict for a notebook."""
        return f'<p style="border-left:6px solid {TONES[self.kind]};padding-left:1em">{escape(self.sentence)}</p>'


@dataclass(frozen=True)
class NextStep:
    """A next step: the reason and the command."""

    why: str
    command: str


def verdict(accuracy: Sequence[AccuracyRow]) -> Verdict:
    """Judge the evaluation; `accuracy` as `rows.accuracy_rows` gives it."""
    whole = [row for row in accuracy if row.runtime not in NOT_SERVED and row.tokens is None]
    if broken := [row for row in whole if not isfinite(row.perplexity)]:
        said = f"Broken: the perplexity of {broken[0].runtime} is {broken[0].perplexity}."
        return Verdict("broken", said, broken[0].runtime)
    compared = [row for row in whole if row.perplexity_increase is not None]
    if not compared:
        return Verdict("unknown", "Not known yet: FP8 was not held against BF16 on any text.")
    worst = max(compared, key=lambda row: row.perplexity_increase or 0.0)
    rise, low, high = worst.perplexity_increase or 0.0, worst.increase_low, worst.increase_high
    if low is None or high is None:
        said = f"Not known: perplexity {changes_by(rise)}, {too_short(worst) or 'and nothing says how sure that is'}."
        return Verdict("unknown", said, worst.runtime, rise)
    bf16 = next((row.kl_fp32_nats for row in accuracy if row.runtime == "bf16"), None)
    sure = f"95 % interval {interval((low, high))}"
    if max(abs(low), abs(high)) <= SAME:
        return Verdict("same", f"Same model: perplexity {changes_by(rise)} against BF16 ({sure}).", worst.runtime, rise)
    if bf16 is not None and worst.kl_fp32_nats is not None and worst.kl_fp32_nats <= bf16:
        said = (
            f"Within the noise of BF16: perplexity {changes_by(rise)}, and FP8 is no farther from FP32 than BF16 is: "
            f"{nats(worst.kl_fp32_nats)} nats against {nats(bf16)} ({sure})."
        )
        return Verdict("noise", said, worst.runtime, rise)
    if low <= 0 <= high:
        cannot = f"and this text cannot tell that from none ({sure})"
        said = f"Within the noise of BF16: perplexity {changes_by(rise)}, {cannot}."
        return Verdict("noise", said, worst.runtime, rise)
    if high < 0:
        said = f"Not worse: perplexity {changes_by(rise)} against BF16, by chance ({sure})."
        return Verdict("better", said, worst.runtime, rise)
    return Verdict("worse", f"Worse: perplexity {changes_by(rise)} against BF16 ({sure}).", worst.runtime, rise)


def changes_by(fraction: float) -> str:
    """A change in words: `rises by 0.31 %`."""
    if round(100 * fraction, 2) == 0:
        return "does not change (by less than 0.01 %)"
    return f"{'rises' if fraction > 0 else 'falls'} by {100 * abs(fraction):.2f} %"


@dataclass(frozen=True)
class Standing:
    """The results of the run, for the files that are in it now; `name` is the run in its commands, and `tuned` the
    options of `fp8q tune` whose choice meets the budget.
    """

    name: str
    located: bool
    tuned: str | None
    engine: bool
    repository: bool


def step_table(steps: Sequence[NextStep]) -> Table[NextStep]:
    """Tabulate the next steps, most urgent first."""
    columns = (
        Column[NextStep]("why", lambda step: step.why, numeric=False),
        Column[NextStep]("command", lambda step: step.command, numeric=False),
    )
    return Table("What to do next", steps, columns, "Nothing.")


def budget(found: Verdict) -> str:
    """A target for the increase: half of the increase, to one digit; half a percent where that is no number."""
    return f"{50 * found.rise:.1g}%" if found.kind == "worse" else "0.5%"


def next_steps(found: Verdict, has: Standing) -> list[NextStep]:
    """List the steps after the verdict, most urgent first."""
    run = has.name
    if found.runtime is None:
        return [NextStep("Hold FP8 against BF16 on text that was held out.", f"fp8q validate {run}")]
    if found.kind == "unknown":
        return [NextStep("Evaluate on more text.", f"fp8q validate {run} --data TEXT")]
    steps = []
    if found.kind in ("worse", "broken"):
        if not has.located:
            steps.append(NextStep("See which tensors cost most.", f"fp8q sensitivity {run}"))
        tune = f"fp8q tune {run}"
        steps.append(
            NextStep("Make it anew by what was chosen for the budget.", f"{tune} {has.tuned} --apply")
            if has.tuned
            else NextStep(
                "Have the cheapest change chosen that meets a budget.", f"{tune} --max-ppl-increase {budget(found)}"
            )
        )
        steps.append(NextStep("Look for what is unstable.", f"fp8q doctor {run}"))
    if not has.engine:
        steps.append(NextStep("Build an engine, and prove what it runs in FP8.", f"fp8q build-engine {run}"))
    if not has.repository:
        steps.append(NextStep("Write the Triton model repository.", f"fp8q triton {run}"))
    return steps or [NextStep("Try it.", f"fp8q serve {run}")]
