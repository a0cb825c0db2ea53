"""Inherit the static scales of activations and of the cache from an FP8 source checkpoint (`--inherit`).

The calibration text is run all the same, to measure what these scales do to it: saturation, underflow, and the distance
from the best scale. The modules of a group receive one tensor, which a graph quantizes once: where the checkpoint has
several scales for it, the largest is taken, as vLLM does for fused projections.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ...calibrate.measure.histogram import Histogram
from ...calibrate.measure.statistics import Statistics, coverage
from ...calibrate.model.gemms import attention_heads
from ...calibrate.model.source import Source
from ...core.errors import InputError
from ...options import Clipping, ScaleOptions
from ...options.declare import first_changed
from ..codes.formats import E4M3
from ..scales.activation_scales import described, group_of, unfit
from ..scales.cache_scales import attentions_of, bf16_attentions
from ..scales.decisions import CACHE_PARTS, INHERITED, Scales, Skipped, TensorScale
from ..scales.policy import ModelGemms, select
from .dequantized import FP8Source, InheritedCodes, fp8_source


def source_to_inherit(source: Source) -> FP8Source:
    """The FP8 checkpoint that `source` is; raises InputError where it is none."""
    fp8 = fp8_source(source)
    if fp8 is None:
        raise InputError(
            "--inherit", f"{source.name} is no FP8 checkpoint, so it has no scales to inherit", "leave it out"
        )
    return fp8


def check_inherit(source: Source, modules: Iterable[str], attentions: Iterable[str], options: ScaleOptions) -> None:
    """Raise InputError when `options` inherit and the checkpoint lacks a scale: of the input of one of `modules`, or of
    the cache of one of `attentions`.
    """
    if not options.inherit:
        return
    fp8 = source_to_inherit(source)
    for module in modules:
        if fp8.input_scale(source.stored(f"{module}.weight")) is None:
            raise InputError(
                "--inherit",
                f"{source.name} has no static scale of the input of {module}",
                "leave --inherit out, and it is measured",
            )
    for name in (f"{module}.{part}" for part in CACHE_PARTS[options.kv_cache] for module in attentions):
        if name not in fp8.cache_scales:
            raise InputError(
                "--inherit",
                f"{source.name} has no scale of the cache of {name}",
                "leave --kv-cache out, or --inherit, and it is measured",
            )
        scales = fp8.cache_scales[name]
        heads = attention_heads(source.text_config)[name[-1]]
        stored = "head" if scales.ndim > 1 else "tensor"
        if stored == "head" and len(scales) != heads:
            raise InputError(
                "--inherit",
                f"{source.name} has scales of {len(scales)} heads of the cache of {name}, and config.json {heads} "
                "heads",
                "leave --inherit out, and they are measured",
            )
        if stored != options.kv_scale:
            raise InputError(
                "--inherit",
                f"{source.name} has one scale a {stored} of the cache of {name}",
                f"give --kv-scale {stored}, or leave --inherit out, and they are measured",
            )


def inherited_scales(source: Source, statistics: Statistics, gemms: ModelGemms, options: ScaleOptions) -> Scales:
    """Take the scales of `source` for every tensor in `gemms`; the weights' scales follow when they are written."""
    chosen, skipped = select(gemms, options.skip, options.only)
    parts = CACHE_PARTS[options.kv_cache]
    in_bf16 = bf16_attentions(options.kv_skip, attentions_of(statistics), source.text_config.to_dict())
    activations, without_scale = inherited_activations(source, statistics, chosen)
    cache = inherited_cache(source, statistics, parts)
    return Scales.before_weights(activations, cache, in_bf16, skipped | without_scale)


def inherited_activations(
    source: Source, statistics: Statistics, modules: Sequence[str]
) -> tuple[dict[str, TensorScale], dict[str, Skipped]]:
    """The inherited input scales of `modules`, and the modules whose input, as measured, can have no scale."""
    fp8 = source_to_inherit(source)
    first = group_of(statistics.record.groups)
    stored = {module: fp8.input_scale(source.stored(f"{module}.weight")) or 0.0 for module in modules}
    experts = {name for layer in coverage(statistics) for name in layer.gemms}
    largest: dict[str, float] = {}
    for module, scale in stored.items():
        group = first.get(module, module)
        largest[group] = max(largest.get(group, 0.0), scale)
    scales: dict[str, TensorScale] = {}
    skipped: dict[str, Skipped] = {}
    for module in modules:
        group = first.get(module, module)
        tensor = statistics.tensors.get(f"{group}.input")
        reason = unfit(tensor.histogram if tensor else None)
        if module in experts and tensor is not None and not tensor.histogram.samples:
            reason = None  # no token was routed to it, so nothing is known that speaks against its scale
        if reason is not None or tensor is None:
            skipped[module] = reason or Skipped(reason="never observed", samples=0)
        else:
            scales[module] = _inherited_scale(tensor.histogram, largest[group])
    return scales, skipped


def inherited_cache(source: Source, statistics: Statistics, parts: str) -> dict[str, TensorScale]:
    """The inherited scales of the keys (`k` in `parts`) and values (`v`) of every cache that has them."""
    scales = source_to_inherit(source).cache_scales
    return {
        name: _inherited_cache(tensor.histogram, scales[name])
        for name, tensor in statistics.tensors.items()
        if name.endswith(tuple(f".{part}" for part in parts)) and name in scales
    }


def inherited_codes(source: Source, options: ScaleOptions, anew: frozenset[str]) -> InheritedCodes | None:
    """The FP8 weights of `source` but those of `anew`; None where it is no FP8 checkpoint, and where `options` name a
    weight method, one scale for a whole weight, or a rounding.
    """
    fp8 = fp8_source(source)
    if fp8 is None or first_changed(options, ("weight_method", "weight_scale", "weight_rounding")):
        return None
    return InheritedCodes(source, fp8, anew)


def source_blocks(source: Source, modules: Iterable[str]) -> dict[str, str]:
    """Map those of `modules` that `source` stores in FP8 with a scale for each block to its sides, as `128x128`."""
    fp8 = fp8_source(source)
    stored = {module: fp8.weights.get(source.stored(f"{module}.weight")) for module in modules} if fp8 else {}
    return {
        module: f"{codes.block[0]}x{codes.block[1]}"
        for module, codes in stored.items()
        if codes and codes.block and codes.granularity == "block"
    }


def inherited_remarks(
    source: Source, groups: Mapping[str, Sequence[str]], scales: Scales, options: ScaleOptions
) -> Iterator[str]:
    """Yield notes where `source` is an FP8 checkpoint: which codes and scales were kept, and which were changed."""
    fp8 = fp8_source(source)
    if fp8 is None:
        return
    yield codes_summary(scales)
    for remark in fp8.checkpoint.declared.remarks:
        yield f"{fp8.checkpoint.declared.source.name}: {remark} is not read: the weights are code times scale"
    uncoded = [module for module in scales.weights if source.stored(f"{module}.weight") not in fp8.weights]
    if uncoded:
        yield (
            f"--only: {uncoded[0]}{f' and {len(uncoded) - 1} more' if len(uncoded) > 1 else ''} had no FP8 codes in "
            f"{source.name}, and {'have' if len(uncoded) > 1 else 'has'} now"
        )
    if options.inherit and fp8.cache_scales and not scales.kv_cache:
        parts = "fp8" if any(name.endswith(".k") for name in fp8.cache_scales) else "v"
        yield f"--inherit: {source.name} has scales of an FP8 cache, which --kv-cache {parts} takes too"
    for members in groups.values() if options.inherit else ():
        inputs = {name: fp8.input_scale(source.stored(f"{name}.weight")) for name in members if name in scales.weights}
        if len(set(inputs.values())) > 1:
            named = ", ".join([*inputs][:3]) + (f" and {len(inputs) - 3} more" if len(inputs) > 3 else "")
            yield f"--inherit: {named} read one tensor under different scales; the largest is taken"
            return


def codes_summary(scales: Scales) -> str:
    """Say in a sentence how many weights of an FP8 source checkpoint kept their codes."""
    inherited = sum(weight.method == INHERITED for weight in scales.weights.values())
    blocks = [weight.sqnr_db for weight in scales.weights.values() if weight.method.endswith(" blocks")]
    losses = [loss for loss in blocks if loss is not None]
    parts = [f"{inherited} of {len(scales.weights)} GEMMs keep their FP8 codes and scales as they were given"]
    if blocks:
        least = f", which leaves {min(losses):.1f} dB at the least" if losses else ""
        parts.append(f"{len(blocks)} had a scale for each block, and have one for each channel{least}")
    if anew := len(scales.weights) - inherited - len(blocks):
        parts.append(f"{anew} {'are' if anew > 1 else 'is'} quantized anew")
    return "; ".join(parts)


def _inherited_cache(histogram: Histogram, scales: npt.NDArray[np.float32]) -> TensorScale:
    """Describe the inherited `scales` of a cache tensor, float32 [1] or [heads, 1, 1]."""
    heads = scales.ravel().tolist() if scales.ndim > 1 else None
    return _inherited_scale(histogram, float(scales.max())).model_copy(update={"heads": heads})


def _inherited_scale(histogram: Histogram, scale: float) -> TensorScale:
    return described(histogram, E4M3, Clipping(), (INHERITED, scale * E4M3.max, scale))
