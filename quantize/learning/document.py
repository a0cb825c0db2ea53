"""`distill.json` and `adapter.json`: the held-out divergence while weights or an adapter were learned."""

from pydantic import Field

from ...core.files import Strict, read_document
from ...core.run import Run


class Moment(Strict):
    """The held-out divergence after `step` steps."""

    step: int
    kl: float = Field(description="KL(BF16 || FP8) on the held-out windows, nats a token")


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
        """The moment with the least divergence; the earlier of equal ones."""
        return min(self.moments, key=lambda moment: moment.kl)

    def outcome(self, unchanged: str, changed: str) -> str:
        """State the outcome in a sentence that ends with `unchanged` where nothing got better, else with `changed`."""
        begun = self.start.kl
        best = self.best
        if best.step == 0:
            return (
                f"nothing better was found in {self.moments[-1].step:,} steps: the held-out KL is {begun:.3e} nats a "
                f"token as it was, and {unchanged}"
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

    def followed_by(self, end_to_end: "Distillation") -> "Distillation":
        """Join the outcome of learning layer by layer with that of `end_to_end` learning, which began with the codes of
        the layers, or as they did where these were no better.
        """
        later = [moment.model_copy(update={"step": self.steps + moment.step}) for moment in end_to_end.moments]
        return end_to_end.model_copy(
            update={
                "steps": self.steps + end_to_end.steps,
                "seconds": round(self.seconds + end_to_end.seconds, 1),
                "moments": [self.start, *later] if self.best.step else [end_to_end.start, *later[1:]],
                "stopped": "; ".join(filter(None, (self.stopped, end_to_end.stopped))) or None,
                "blocks": self.blocks,
            }
        )


class AdapterLearning(LearningRecord):
    """The outcome of a learned adapter. `adapter/` has that of the `best` moment, and is not there for step 0."""

    modules: int = Field(description="GEMMs that the adapter adds to")
    parameters: int = Field(description="numbers in A and B of all of them")

    @property
    def conclusion(self) -> str:
        """The outcome in a sentence."""
        return self.outcome(
            "no adapter is written", f"adapter/ has {self.parameters:,} numbers for {self.modules:,} GEMMs"
        )


def load_distillation(run: Run) -> Distillation:
    """Read `distill.json` of `run`; raises InputError where it is missing or malformed."""
    return read_document(run.require(run.distillation, "distill"), Distillation)


def load_adapter_learning(run: Run) -> AdapterLearning:
    """Read `adapter.json` of `run`; raises InputError where it is missing or malformed."""
    return read_document(run.require(run.adapter_learning, "adapter"), AdapterLearning)
