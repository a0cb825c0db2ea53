"""`distill.json` and `adapter.json`: the held-out divergence while weights or an adapter were learned."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ...core.files import Strict, read_document
from ...core.run import Run

#: A moment is better than the beginning if it is so by more than so many standard errors. By chance alone a moment is
#: so with a probability of 0.0062 (normal distribution, one tail), and one of ten with 0.062 at most (Bonferroni).
CLEARLY = 2.5


class Moment(Strict):
    """The held-out divergence after `step` steps."""

    step: int
    kl: float = Field(description="KL(BF16 || FP8) on the held-out windows, nats a token")
    error: float = Field(default=0.0, description="standard error of its difference from the first moment's")


def best_of(moments: Sequence[Moment]) -> Moment:
    """Choose the moment with the least divergence, if that is clearly below the first one's, or else the first."""
    begun, least = moments[0], min(moments, key=lambda moment: moment.kl)
    return least if least.kl + CLEARLY * least.error < begun.kl else begun


def standard_error(differences: npt.NDArray[np.float64]) -> float:
    """The standard error of the mean of `differences` [windows]; 0 where one window does not tell."""
    return float(differences.std(ddof=1) / len(differences) ** 0.5) if len(differences) > 1 else 0.0


class BlockLoss(Strict):
    """The held-out loss of a decoder layer that learned by itself, with `--stream`: the squared error of its output
    over the square of the float layer's, the mean over tokens.
    """

    layer: int
    before: float = Field(description="on the inputs that the learned layers before it give")
    after: float = Field(description="at its best moment")
    step: int = Field(description="of that moment; 0: nothing was better, and its codes are those of rounding")
    codes: int = Field(description="the number of its codes")
    changed: int = Field(description="the number of codes that are others than rounding gave")
    stopped: int | None = Field(default=None, description="the step at which the loss was NaN or infinite, if any")

    @property
    def change(self) -> str:
        """State what learning changed, as a clause."""
        share = self.after / self.before - 1 if self.before else 0.0
        return f"layer {self.layer}: held-out error {share:+.0%}"


class LearningRecord(Strict):
    """The course of `fp8q distill`: the `best` moment wins; that of step 0 is the model as it was."""

    data: str = Field(description="the text that was learned from")
    tokens: int = Field(description="of the windows that were learned from")
    held_out: int = Field(description="tokens of the windows that were held out")
    steps: int = Field(description="that were planned")
    seconds: float
    moments: list[Moment] = Field(min_length=1)
    stopped: str | None = Field(default=None, description="why learning ended early")

    @property
    def start(self) -> Moment:
        """The moment before the first step."""
        return self.moments[0]

    @property
    def best(self) -> Moment:
        """The moment with the least divergence, where that is clearly less than at the start, or else the start."""
        return best_of(self.moments)

    def outcome(self, unchanged: str, changed: str) -> str:
        """State the outcome in a sentence that ends with `unchanged` where nothing got better, else with `changed`."""
        begun, best, least = self.start.kl, self.best, min(moment.kl for moment in self.moments)
        if best.step == 0:
            chance = f", of which the least, {least:.3e}, differs by chance" if least < begun else ""
            return (
                f"nothing better was found in {self.moments[-1].step:,} steps: the held-out KL is {begun:.3e} nats a "
                f"token as it was{chance}, and {unchanged}"
            )
        return (
            f"the held-out KL fell from {begun:.3e} to {best.kl:.3e} nats a token ({best.kl / begun - 1:+.0%}), by "
            f"step {best.step:,} of {self.steps:,}; {changed}"
        )


class Distillation(LearningRecord):
    """The outcome of learned weights. The checkpoint has those of the `best` moment; those of step 0 are the codes that
    rounding gave.
    """

    changed: float = Field(description="share of codes that are others than rounding gave")
    blocks: list[BlockLoss] | None = Field(default=None, description="with --stream: each decoder layer, in order")

    @property
    def conclusion(self) -> str:
        """The outcome in a sentence."""
        return self.outcome("the model is unchanged", f"{self.changed:.1%} of the codes changed")

    def followed_by(self, whole: "Distillation") -> "Distillation":
        """Join the outcome of layers that learned with that of the `whole` model, which began with their codes, or as
        they did where these were no better.
        """
        before = self.moments if self.best.step else self.moments[:1]
        later = [each.model_copy(update={"step": self.steps + each.step}) for each in whole.moments[1:]]
        return whole.model_copy(
            update={
                "steps": self.steps + whole.steps,
                "seconds": round(self.seconds + whole.seconds, 1),
                "moments": [*before, *(later if whole.best.step or not self.best.step else [])],
                "stopped": self.stopped or whole.stopped,
                "blocks": self.blocks,
            }
        )


class AdapterLearning(LearningRecord):
    """The outcome of a learned adapter. `adapter/` has that of the `best` moment, and is not there for step 0."""

    modules: int = Field(description="products that the adapter adds to")
    parameters: int = Field(description="numbers in A and B of all of them")

    @property
    def conclusion(self) -> str:
        """The outcome in a sentence."""
        return self.outcome(
            "no adapter is written", f"adapter/ has {self.parameters:,} numbers for {self.modules:,} products"
        )


def load_distillation(run: Run) -> Distillation:
    """Read `distill.json` of `run`; raises InputError where it is missing or malformed."""
    return read_document(run.require(run.distillation, "distill"), Distillation)


def load_adapter_learning(run: Run) -> AdapterLearning:
    """Read `adapter.json` of `run`; raises InputError where it is missing or malformed."""
    return read_document(run.require(run.adapter_learning, "adapter"), AdapterLearning)
