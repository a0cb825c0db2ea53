"""The checks that run the model: verdicts on the results of `activation_watch`, `hidden_states` and `loops`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...core.columns import magnitude, share
from ...quantize.scales.decisions import TensorScale
from . import criteria
from .checkup import AtDepth, Check, Remedies, finite, graded, unknown
from .scale_checks import ScaledTensor, relative_error

if TYPE_CHECKING:
    from ...calibrate.model.decoder import Layers
    from .activation_watch import LargestValues
    from .hidden_states import Divergences
    from .loops import Loops


def not_measured(why: str, remedy: str | None = None) -> list[Check]:
    """Return all checks of this file as unknown, where the model cannot be run."""
    return [unknown(criterion, f"not measured: {why}", remedy) for criterion in criteria.OF_THE_MODEL]


def norm_inputs(seen: "LargestValues", fp16: bool, remedies: Remedies) -> list[Check]:
    """Check that the inputs of norms are in range; `fp16`: the graphs compute in FP16."""
    values = [(name, seen.norms[name]) for name in seen.norms]
    first = next((value for _, value in values if value > 0), 0.0)

    def said(value: float) -> str:
        grown = f", {value / first:.3g} times the first norm's" if first and finite(value / first) else ""
        return f"{magnitude(value)}{grown}"

    def remedy(name: str, value: float) -> str:
        if not value <= criteria.SQUARE_OVERFLOWS:
            return "the float model itself overflows here; check its weights"
        return f"serve it in BF16, not in FP16: {remedies.bf16_graph()}"

    criterion = replace(criteria.NORM_INPUTS, limit=criteria.NORM_INPUTS_FP16) if fp16 else criteria.NORM_INPUTS
    return graded(criterion, values, said, remedy)


def attention_logits(seen: "LargestValues", cached: Collection[str], remedies: Remedies) -> list[Check]:
    """Check that a softmax in BF16 distinguishes the logits; `cached`: the tensors of the cache that are codes."""
    values = [(name, seen.logits[name]) for name in seen.logits]
    hot = {value: name for name, value in values}

    def said(value: float) -> str:
        rows = seen.hot[hot[value]]
        leads = f"a lead of {criteria.ONE_HOT_NATS} makes a row of the softmax one-hot in FP32"
        return f"{magnitude(value)} ({leads}: {share(rows[0] / max(rows[1], 1))} of the rows)"

    def remedy(name: str, value: float) -> str:
        if f"{name}.k" in cached:
            return remedies.in_bf16(f"{name}.k")
        return remedies.two(f"{name}.*")

    return graded(criteria.ATTENTION_LOGITS, values, said, remedy)


def cache_tokens(
    seen: "LargestValues", cached: Sequence[str], named: Callable[[int], str], remedies: Remedies
) -> list[Check]:
    """Check for tokens of keys and values that stand out, as attention sinks do; in a cache that stays in BF16 (not in
    `cached`) they are to be watched at most.
    """
    outliers = {tensor: seen.outlier(tensor) for tensor in seen.tokens}

    def said(tensor: str) -> str:
        token = outliers[tensor]
        return f"{token.ratio:.3g} times, position {token.position:,}, {named(token.token)}"

    checks = graded(
        criteria.CACHE_TOKENS,
        [(tensor, token.ratio) for tensor, token in outliers.items()],
        magnitude,
        lambda tensor, value: (
            remedies.in_bf16(tensor) if tensor in cached else f"leave it in BF16: {remedies.in_bf16(tensor)}"
        ),
    )
    return [
        check
        if check.module is None
        else check.model_copy(
            update={
                "said": said(check.module),
                "verdict": "watch" if check.verdict == "bad" and check.module not in cached else check.verdict,
            }
        )
        for check in checks
    ]


def gemm_errors(divergences: "Divergences", inputs: Mapping[str, TensorScale], remedies: Remedies) -> list[Check]:
    """Check the error that each GEMM makes by itself."""
    values = [(name, divergences.gemms[name].relative) for name in divergences.gemms]
    return graded(
        criteria.GEMM_ERRORS,
        values,
        share,
        lambda name, value: remedies.better(name, inputs[name]),
    )


def hidden_states(
    divergences: "Divergences", layers: "Layers | None", tensors: Sequence[ScaledTensor], remedies: Remedies
) -> list[Check]:
    """Name the first layer whose hidden states diverge, and the GEMM or cache tensor in it that errs most by itself;
    the worst layer where none diverges.

    `layers` None: the model is no chain of layers.
    """
    if layers is None:
        return [unknown(criteria.HIDDEN_STATES, criteria.HIDDEN_STATES.nothing)]
    values = [(index, divergences.error(index)) for index in sorted(divergences.errors)]
    apart = next(
        (layer_error for layer_error in values if not layer_error[1] <= criteria.HIDDEN_STATES.limit.watch), None
    )
    layer, error = apart or max(values, key=lambda layer_error: layer_error[1])
    cosine = divergences.cosine(layer)
    errors = _tensor_errors(divergences, tensors)
    inside = {name: value for name, value in errors.items() if layers.index(name) == layer}
    culprit = max(inside, key=lambda name: inside[name], default=None)
    module = f"{layers.prefix}.{layer}"
    worst = max((value for _, value in values), key=lambda value: (value != value, value))
    (check,) = graded(
        criteria.HIDDEN_STATES,
        [(module, worst)],
        lambda value: f"{share(error)}, cosine {cosine:.4f}{_further(layer, error, worst)}",
        lambda name, value: remedies.better(culprit) if culprit else remedies.located(),
    )
    depth = [AtDepth(module=f"{layers.prefix}.{index}", value=finite(value)) for index, value in values]
    blamed = f"; in it {culprit} errs most by itself, by {share(inside[culprit])}" if apart and culprit else ""
    return [check.model_copy(update={"value": finite(error), "said": check.said + blamed, "by_depth": depth})]


def _further(layer: int, error: float, worst: float) -> str:
    if worst != error:
        return f", {share(worst)} at the worst layer"
    return ""


def _tensor_errors(divergences: "Divergences", tensors: Sequence[ScaledTensor]) -> dict[str, float]:
    """Return the error that each GEMM, and each tensor of the cache, makes by itself."""
    cache = {tensor.name: relative_error(tensor) for tensor in tensors if tensor.name.endswith((".k", ".v"))}
    return {name: sums.relative for name, sums in divergences.gemms.items()} | cache


def loops(counts: "Loops | None", remedies: Remedies) -> Check:
    """Check for loops of FP8 where BF16 has none; None where prompts and answers do not fit the model."""
    if counts is None:
        return unknown(criteria.LOOPS, criteria.LOOPS.nothing)
    return Check(
        check=criteria.LOOPS.check,
        verdict=counts.verdict,
        value=float(counts.fp8),
        what=criteria.LOOPS.what,
        said=f"{counts.fp8} of {counts.prompts}; BF16 alone after {counts.bf16}, both after {counts.both}",
        remedy=None if counts.verdict == "good" else remedies.located(),
    )
