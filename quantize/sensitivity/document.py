"""The tensors whose loss is located (`Site`), and `sensitivity.json`: the loss that each causes alone, worst first."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from ...core.files import FirstSchema, Strict, read_document
from ...core.run import Run
from ..scales.decisions import Scales

Kind = Literal["weight", "activation", "kv_cache"]
#: The variants that a site's KL is predicted for: as the run has it, and an activation in two terms, or under a scale
#: for each token.
AS_IT_IS = "as_it_is"
TWO_TERMS = "two_terms"
BY_TOKEN = "dynamic"  # noqa: S105  # a name of a form
#: Site -> variant -> nats.
Predicted = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Site:
    """A tensor of `kind`: the weight of `module`, the input of `module` and the other `members`, which receive the same
    tensor, or the cache tensor `module` (`<attention>.k` or `.v`).
    """

    module: str
    kind: Kind
    members: tuple[str, ...]

    @property
    def key(self) -> str:
        """Its name in files."""
        return f"{self.kind}:{self.module}"


class KlAfter(Strict):
    """A tensor's own KL after another choice, in nats; null where that changes nothing of it."""

    two_terms: float | None = None
    dynamic: float | None = None
    gptq: float | None = None
    bf16: float = 0.0

    @property
    def exact(self) -> float | None:
        """The loss that two codes leave."""
        return self.two_terms


class Loss(Strict):
    """One tensor; `measured`: the model was run with it alone quantized, and not only predicted from gradients."""

    module: str
    kind: Kind
    kl_nats: float = Field(description="mean KL(float || with this alone quantized) per token, in FP32 arithmetic")
    sqnr_db: float | None = None
    measured: bool
    kl_after: KlAfter
    shared_by: list[str] = Field(default=[], description="of an activation: the GEMMs that read it, where several")


class Sensitivity(Strict):
    """`sensitivity.json`; `tokens`: the predicted tokens of calibration `windows`, with a `prompt` those after it."""

    schema_: FirstSchema = 1
    windows: int
    tokens: int
    prompt: int | None = Field(
        default=None, description="tokens of a window that are read as a prompt, where the run has tails; null: none"
    )
    modules: list[Loss]


def ranked_losses(
    scales: Scales,
    sites: list[Site],
    tokens: int,
    predicted: Predicted,
    measured: dict[str, float],
    left: Mapping[str, float],
) -> list[Loss]:
    """Rank the losses of `sites`, worst first, from sums in nats over `tokens`; a site that no token reached causes
    none. `left`: module -> the share of its weight's loss that `gptq` would leave.
    """
    losses = [_loss(scales, site, tokens, predicted.get(site.key, {}), measured.get(site.key), left) for site in sites]
    return sorted(losses, key=lambda loss: -loss.kl_nats)


def _loss(
    scales: Scales,
    site: Site,
    tokens: int,
    predicted: dict[str, float],
    measured: float | None,
    left: Mapping[str, float],
) -> Loss:
    guess = predicted.get(AS_IT_IS, 0.0)
    nats = guess if measured is None else measured
    ratio = measured / guess if measured is not None and guess > 0 else 1.0
    after = {name: predicted[name] * ratio / tokens for name in (TWO_TERMS, BY_TOKEN) if name in predicted}
    return Loss(
        module=site.module,
        kind=site.kind,
        kl_nats=nats / tokens,
        sqnr_db=_sqnr_db(scales, site),
        measured=measured is not None,
        kl_after=KlAfter(
            two_terms=after.get(TWO_TERMS),
            dynamic=after.get(BY_TOKEN),
            gptq=nats / tokens * left[site.module] if site.kind == "weight" and site.module in left else None,
        ),
        shared_by=list(site.members) if len(site.members) > 1 else [],
    )


def _sqnr_db(scales: Scales, site: Site) -> float | None:
    if site.kind == "weight":
        return scales.weights[site.module].sqnr_db
    scale = (scales.activations if site.kind == "activation" else scales.kv_cache)[site.module]
    return scale.sqnr_db if scale.form.static else None


def load_sensitivity(run: Run) -> Sensitivity:
    """Read `sensitivity.json`; raises InputError when it is missing or not the file `fp8q sensitivity` wrote."""
    return read_document(run.require(run.sensitivity, "sensitivity"), Sensitivity)
