"""`compare.json`: the answers of a server or a checkpoint, their distances from the run's runtimes, the verdict."""

from typing import Any, Literal

from pydantic import Field

from ...core.columns import Column, Table, nats, share, text_column
from ...core.files import FirstSchema, Strict
from ..accuracy.document import Estimate

Verdict = Literal["validated", "undecided", "other-arithmetic", "other-model", "other-prompt"]


#: The names of the validated arithmetic, and of the original's, in verdicts.
VALIDATED = "as validated"
BF16 = "BF16"


class RuntimeDistance(Strict):
    """The distance from one runtime of the run. `validated`: the run is served by it."""

    runtime: str
    validated: bool
    kl_nats: Estimate | None = Field(
        default=None, description="KL(runtime || answers) over the tokens that both name and one rest: at most the KL"
    )
    rest: float | None = Field(default=None, description="mean probability of that rest, within which no KL is seen")
    flips: Estimate = Field(description="positions at which another token is the likeliest")
    loss_difference_nats: float | None = Field(default=None, description="mean of absolute values, a token")
    perplexity: float | None = Field(default=None, description="of this runtime, on the tokens the answers' is of")


class Noticed(Strict):
    """The power of a comparison: the least differences from what was validated that would not have passed."""

    kl_nats: float | None = None
    flips: float | None = Field(default=None, description="a share of positions")
    perplexity: float | None = Field(default=None, description="a relative change")

    def __str__(self) -> str:
        """Write the differences."""
        said = [] if self.kl_nats is None else [f"{self.kl_nats:.2g} nats of KL"]
        said += [] if self.flips is None else [f"{100 * self.flips:.2g}% flips"]
        said += [] if self.perplexity is None else [f"{100 * self.perplexity:.2g}% of perplexity"]
        return " or ".join([", ".join(said[:-1]), *said[-1:]] if len(said) > 1 else said)


class ModelComparison(Strict):
    """`compare.json`."""

    schema_: FirstSchema = 1
    answered: str = Field(description="the server's URL, or the checkpoint's path")
    model: str = Field(description="the server's name of it")
    form: str = Field(description="how log-probabilities were asked for")
    requests: int
    prompts: int
    sent: int = Field(description="tokens of all prompts")
    positions: int = Field(description="compared")
    which: str = Field(default="", description="positions of a prompt that are compared, and why not the others")
    perplexity: Estimate | None = Field(
        default=None, description="of the text's own tokens, where all of these have a log-probability"
    )
    runtimes: list[RuntimeDistance] = Field(description="the nearest first")
    verdict: Verdict
    arithmetics: list[str] = Field(default=[], description="that the answers fit, and between which nothing tells")
    sentence: str
    noticed: Noticed | None = Field(default=None, description="None where the verdict is not by limits")

    @property
    def passes(self) -> bool:
        """Tell whether the server loses no more than was validated: it is the validated model, or nothing tells it from
        that or from the original in BF16.
        """
        if self.verdict == "undecided":
            return {*self.arithmetics} <= {VALIDATED, BF16}
        return self.verdict == "validated"


def estimate(value: Estimate) -> str:
    """Write an estimate in nats."""
    return f"{nats(value.mean)} ({nats(value.low)} to {nats(value.high)})"


def estimated_share(value: Estimate) -> str:
    """Write an estimate of a share."""
    return f"{share(value.mean)} ({share(value.low)} to {share(value.high)})"


def comparison_table(comparison: ModelComparison) -> Table[RuntimeDistance]:
    """The distances from the run's runtimes, the nearest first."""
    columns: tuple[Column[Any], ...] = (
        text_column("runtime"),
        Column("validated", lambda row: "yes" if row.validated else "no", numeric=False),
        Column("KL, nats (95 %)", lambda row: row.kl_nats, estimate),
        Column("outside", lambda row: row.rest, share),
        Column("flips (95 %)", lambda row: row.flips, estimated_share),
        Column("loss, |difference|", lambda row: row.loss_difference_nats, nats),
        Column("perplexity", lambda row: row.perplexity, "{:.3f}".format),
    )
    return Table(f"{comparison.answered}: distance from the run's runtimes", comparison.runtimes, columns, "")
