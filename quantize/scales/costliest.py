"""Choose the weights that stay in BF16 since FP8 costs them most (`--bf16-weights`), and `costliest.json`.

A weight in BF16 costs a byte more for each of its numbers, so weights are taken in falling order of predicted loss a
byte, as long as they fit into the share of bytes. Weights that a server joins (q, k and v; gate and up) are one
candidate: it reads them in one precision. Experts are no candidates: a server holds those of a layer in one tensor, in
one precision, and they are most of a model's bytes.

On SmolLM2-135M 3 % more bytes leave nine tenths of what is left without them (`benchmarks/weight_levers.py`: `exact`
over GPTQ with a weighed first token). Losses are those of the codes that the run's rounding gives
(`docs/decisions/0081`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from pydantic import Field

from ...core.files import FirstSchema, Strict, read_document
from ...core.run import Run


class CostlyWeights(Strict):
    """Weights that a server joins, or one alone."""

    modules: list[str]
    kl_nats: float = Field(description="predicted KL(float || with these weights in FP8) per token")
    bytes_share: float = Field(description="the bytes that BF16 adds to them, of those of all weights in FP8")


class Costliest(Strict):
    """`costliest.json`: the weights that stay in BF16, the costliest a byte first, as predicted on calibration
    `windows`.
    """

    schema_: FirstSchema = 1
    windows: int
    kl_nats: float = Field(description="the predicted KL of all weights in FP8, per token")
    weights: list[CostlyWeights]

    @property
    def modules(self) -> list[str]:
        """The names of all modules whose weights stay."""
        return [module for weights in self.weights for module in weights.modules]


def costliest_weights(
    families: Iterable[Sequence[str]],
    losses: Mapping[str, float],
    numbers: Mapping[str, int],
    share: float,
    experts: Collection[str] = (),
) -> list[CostlyWeights]:
    """Choose among `families`, each the modules that a server joins, those of the largest loss a byte.

    `losses`: module -> predicted KL of its weight in FP8, nats a token; `numbers`: module -> the numbers of its weight,
    for all weights in FP8; `share`: the most bytes that BF16 may add, of the bytes of all weights in FP8; `experts`:
    the names of the modules that hold the experts of a layer.
    """
    total = sum(numbers.values())
    inside = tuple(f"{layer}." for layer in experts)
    candidates = [
        CostlyWeights(
            modules=[*family],
            kl_nats=sum(losses.get(module, 0.0) for module in family),
            bytes_share=sum(numbers[module] for module in family) / total,
        )
        for family in families
        if not any(module.startswith(inside) for module in family)
    ]
    left = share * total
    chosen: list[CostlyWeights] = []
    for weights in sorted(candidates, key=lambda one: -one.kl_nats / one.bytes_share):
        added = sum(numbers[module] for module in weights.modules)
        if weights.kl_nats > 0 and added <= left:
            left -= added
            chosen.append(weights)
    return chosen


def stay_reasons(costliest: Costliest, share: float) -> dict[str, str]:
    """Module -> the reason why its weight stays in BF16 (`ModelGemms.stay`); `share`: of `--bf16-weights`."""
    reason = f"its loss in FP8 is among the largest a byte (--bf16-weights {100 * share:g}%)"
    return dict.fromkeys(costliest.modules, reason)


def load_costliest(run: Run) -> Costliest:
    """Read `costliest.json`; raises InputError when it is missing or not the file that `fp8q calibrate` wrote."""
    return read_document(run.require(run.costliest, "costliest"), Costliest)
