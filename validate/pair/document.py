"""`comparison.json`: what `fp8q compare ORIGINAL` measured of `--model CANDIDATE` or `--url URL`."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from ...calibrate.text.evaluation import Protocol
from ...core.errors import GateError
from ...core.files import FirstSchema, Strict
from ..accuracy.document import Estimate, RuntimeAccuracy, Verdict

#: The name of the candidate among the runtimes; the original's are `bf16` and `fp32`.
CANDIDATE = "candidate"
#: Who made a model of a checkpoint's files.
LoadedBy = Literal["transformers", "fp8q", "its server"]


class CheckpointIdentity(Strict):
    """One side: its directory's name, the digest of its weights and config.json, and how it declares itself.

    Of a server: the model's name and its address, and the digest of the answers.
    """

    name: str
    sha256: str
    quantization: str | None = Field(default=None, description="`quant_method` and format of config.json; null: none")
    loaded_by: LoadedBy = "transformers"


class ModuleError(Strict):
    """The output of one module of the candidate against the original's, for the inputs that the original's receives.

    Sums run over all tokens of the windows and all output channels, in float64.
    """

    module: str
    error: float | None = Field(
        default=None,
        description="|theirs - ours| / |ours|, root of the sums of squares; null: not finite, or another shape",
    )
    gain: float | None = Field(
        default=None, description="<theirs, ours> / |ours|²: 1 for the same outputs, 8 for outputs eight times as large"
    )
    correlation: float | None = Field(default=None, description="<theirs, ours> / (|theirs| |ours|)")
    part_error: float | None = Field(
        default=None,
        description="error of the output of the part of the decoder layer that it is in (attention, MLP, norm), where "
        "each layer runs as one on the input of the original's; null: outside of the layers, or not finite",
    )
    next_part: str | None = Field(default=None, description="the part of the layer that runs behind that one")


class TableError(Strict):
    """An embedding of which rows are not the original's, by their numbers: `outside` of its `rows`, the `first` to the
    `last`.
    """

    module: str
    rows: int
    outside: int
    first: int
    last: int
    worst: float | None = Field(description="the largest relative error of a row; null: not finite")


class HiddenError(Strict):
    """The distance of a hidden state, each model run by itself: |theirs - ours| / |ours|. `layer` 0: the embedding."""

    layer: int
    error: float | None = Field(default=None, description="null: not finite")


class Cause(Strict):
    """One difference that explains a loss, or that only a server would show.

    An `error` makes served answers wrong; a `warning` may.
    """

    rule: str
    severity: Literal["error", "warning"]
    subject: str
    fault: str
    remedy: str

    def __str__(self) -> str:
        """Format the cause as one line."""
        return f"{self.subject}: {self.fault}; {self.remedy}"


class PairComparison(Strict):
    """`comparison.json`."""

    schema_: FirstSchema = 1
    key: str = Field(description="SHA-256 of what the results depend on")
    tokens_sha256: str = Field(default="", description="SHA-256 of tokens.npz, from which the verdict is told again")
    original: CheckpointIdentity
    candidate: CheckpointIdentity
    protocol: Protocol
    runtimes: dict[str, RuntimeAccuracy]
    flips: Estimate = Field(description="share of positions whose likeliest token differs, interval over windows")
    kl_nats: Estimate = Field(description="mean KL(original in BF16 || candidate), interval over windows")
    verdict: Verdict
    modules: list[ModuleError] = Field(description="worst first")
    hidden: list[HiddenError]
    causes: list[Cause]
    notes: list[str] = Field(default=[])
    unseen: list[str] = Field(default=[], description="what the windows do not show")

    @property
    def passes(self) -> bool:
        """Tell whether the candidate may take the original's place: no loss beyond the limit, and no error."""
        return self.verdict.kind == "acceptable" and not any(cause.severity == "error" for cause in self.causes)

    @property
    def sentence(self) -> str:
        """State the decision in one sentence, with the worst cause where there is one."""
        errors = [cause for cause in self.causes if cause.severity == "error"]
        if not errors:
            return self.verdict.sentence
        more = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
        return f"{self.verdict.sentence}; {errors[0].subject}: {errors[0].fault}{more}"


def by_causes(verdict: Verdict, causes: Sequence[Cause]) -> Verdict:
    """Return the verdict on losses, or where these are within the limits and a cause is an error, that the candidate is
    another model all the same.
    """
    if verdict.kind != "acceptable" or not any(cause.severity == "error" for cause in causes):
        return verdict
    losses = verdict.sentence.partition(": ")[2]
    sentence = f"Different: these windows are within the limits ({losses}), and what is served is not the same"
    return verdict.model_copy(update={"kind": "different", "sentence": sentence})


def check_pair(comparison: PairComparison) -> None:
    """Raise GateError unless the candidate may take the original's place."""
    if not comparison.passes:
        raise GateError(comparison.candidate.name, comparison.sentence)
