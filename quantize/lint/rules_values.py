"""Rules C111 to C115 and C134: the values of scales.

The right size of a scale follows from the codes: value = code × scale, and the largest code is 448. A writer that
scales by amax stores amax / 448, so 448 × scale is the largest value that the scale can represent. No weight of a
decoder exceeds 448, and in no model do half of the inputs: so a median above 1 is an inverted scale, 448 / amax.
"""

import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from ...core.findings import Broken
from ..codes.formats import E4M3
from ..reading.fp8_tensors import Checkpoint, Float32s
from .rules import AGAIN, checkpoint_rule
from .rules_scales import form_scales, readable

#: The initial scale of loaders, which some exporters also write for NaN.
DEFAULT = 1.0
#: The scales that exporters write for an expert without tokens: 1.0, or ModelOpt's 0.5.
STARVED = (DEFAULT, 0.5)
#: The largest factor between an expert's scale and the median of its layer.
FAR = 32.0
#: The smallest scale from which on FP16 has every BF16 number, up to its largest: eight bits, the last 2^-24.
LEAST_IN_FP16 = 2.0**-17
EXPERT = re.compile(r"(.*\.experts)\.\d+\.(.+)", re.DOTALL)


def _values(checkpoint: Checkpoint, kind: str) -> Iterator[tuple[str, Float32s]]:
    for name, of in form_scales(checkpoint):
        if of == kind and readable(checkpoint, name):
            yield name, checkpoint.values(name).reshape(-1)


def _positive(values: Float32s) -> Float32s:
    return values[np.isfinite(values) & (values > 0)]


@checkpoint_rule("C111", "checkpoint-scale-value")
def checkpoint_scale_value(checkpoint: Checkpoint) -> Broken:
    """Scales are positive and finite: a zero, NaN or infinite scale makes every value it touches NaN or zero, and NaN
    is what an expert gets that saw no token.
    """
    for kind in ("weight", "input", "cache"):
        for name, values in _values(checkpoint, kind):
            bad = values[~(np.isfinite(values) & (values > 0))]
            if bad.size:
                counted = f"{bad.size} of {values.size} are not positive and finite"
                yield name, f"holds {bad[0]:g} ({counted}); leave the module in BF16, or {AGAIN}"


@checkpoint_rule("C112", "scale-default")
def scale_default(checkpoint: Checkpoint) -> Broken:
    """A scale is measured, and not the default of 1.0: that of no weight is 1.0 throughout, and the inputs' are not 1.0
    everywhere. With 1.0 a weight, most of whose values are below 0.1, keeps a few of its codes, and an input beyond 448
    is cut off.
    """
    for name, values in _values(checkpoint, "weight"):
        if np.all(values == DEFAULT):
            yield name, f"is 1.0 throughout ({values.size} of {values.size}); {AGAIN}"
    inputs = list(_values(checkpoint, "input"))
    if len(inputs) > 1 and all(np.all(values == DEFAULT) for _, values in inputs):
        yield inputs[0][0], f"is 1.0, and so are all {len(inputs)} scales of inputs; calibrate and {AGAIN}"


@checkpoint_rule("C113", "scale-reciprocal")
def scale_reciprocal(checkpoint: Checkpoint) -> Broken:
    """A scale is what a code is multiplied by, also where it is called weight_scale_inv: amax / 448, not 448 / amax.
    The largest code is 448, so a scale above 1 stands for values beyond 448: no weight is so large, and not half of the
    inputs are.
    """
    for name, values in _values(checkpoint, "weight"):
        if (positive := _positive(values)).size and (median := float(np.median(positive))) > 1:
            yield name, _reciprocal(median)
    inputs = [(name, float(np.median(positive_inputs))) for name, values in _values(checkpoint, "input")
              if (positive_inputs := _positive(values)).size]  # fmt: skip
    if inputs and (median := float(np.median([value for _, value in inputs]))) > 1:
        yield inputs[0][0], f"is one of {len(inputs)} scales of inputs whose median {_reciprocal(median)}"


def _reciprocal(scale: float) -> str:
    return (
        f"is {scale:.4g}, which stands for values up to {E4M3.max * scale:.4g}; its reciprocal for values up to "
        f"{E4M3.max / scale:.4g}; store that"
    )


def _experts(checkpoint: Checkpoint) -> Iterator[list[tuple[str, float]]]:
    """The input scales of the experts of a layer, by projection."""
    groups: dict[tuple[str, str], list[tuple[str, float]]] = defaultdict(list)
    for name, values in _values(checkpoint, "input"):
        if (match := EXPERT.fullmatch(name)) and values.size == 1 and _positive(values).size:
            groups[match[1], match[2]].append((name, float(values[0])))
    yield from (group for group in groups.values() if len(group) > 2)


@checkpoint_rule("C114", "starved-expert")
def starved_expert(checkpoint: Checkpoint) -> Broken:
    """The static input scale of an expert was measured: 1.0, or ModelOpt's 0.5, among others that are neither is what
    an expert gets that saw no token while measuring. C111 finds its NaN, and C104 that it has none.
    """
    for group in _experts(checkpoint):
        starved = [(name, value) for name, value in group if value in STARVED]
        if len(starved) < len(group) / 2:
            for name, value in starved:
                rest = float(np.median([other for _, other in group if other not in STARVED]))
                fault = f"is {value}, and the median of its layer's others {rest:.4g}"
                yield name, f"{fault}; give it the largest of those, or calibrate with more text"


@checkpoint_rule("C115", "expert-apart", "warning")
def expert_apart(checkpoint: Checkpoint) -> Broken:
    """The static input scale of an expert is within a factor of 32 of the median of its layer's: one further off was
    measured on a few tokens, which say little of others.
    """
    for group in _experts(checkpoint):
        median = float(np.median([value for _, value in group]))
        for name, value in group:
            if value not in STARVED and not 1 / FAR <= value / median <= FAR:
                yield name, f"is {value:.4g}, and the median of its layer's {median:.4g}; calibrate with more text"


@checkpoint_rule("C134", "scale-in-fp16", "warning")
def scale_in_fp16(checkpoint: Checkpoint) -> Broken:
    """In ModelOpt's layout with one scale a tensor, FP16 has those under 2^-17: TensorRT Edge-LLM 0.11 reads it,
    and holds scales in FP16. From 2^-17 on FP16 has every BF16 number; below, scales become multiples of 2^-24, up to
    2^-25 zero, and all values of the tensor others.
    """
    granularities = {codes.scheme.weights for codes in checkpoint.codes.values()}
    if checkpoint.declared.form != "modelopt" or "tensor" not in granularities:
        return
    for kind in ("weight", "input", "cache"):
        for name, values in _values(checkpoint, kind):
            positive = _positive(values)
            others = positive[positive.astype(np.float16) != positive]
            if others.size and (scale := float(others.min())) < LEAST_IN_FP16:
                fault = f"is {scale:.3g}, under 2^-17: TensorRT Edge-LLM holds it in FP16, as {np.float16(scale):.3g}"
                yield name, f"{fault}; leave the module in BF16, or take another server"
