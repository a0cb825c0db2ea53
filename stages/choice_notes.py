"""Lines on a run's choices of scales and codes that a user would not expect."""

from collections.abc import Collection, Iterator

from ..calibrate.measure.statistics import Statistics
from ..calibrate.model.source import Source
from ..options import BLOCK, ScaleOptions, WeightRounding
from ..quantize.codes.blocks import SIDE
from ..quantize.reading.inherited_scales import inherited_remarks
from ..quantize.scales import expert_scales
from ..quantize.scales.activation_scales import group_of
from ..quantize.scales.decisions import Scales
from ..quantize.scales.policy import mixed_experts_warning, mixed_group_warning, shared_input_notes, vision_tail_note
from ..quantize.weights.channels import LEAST_HELD_OUT
from .gradients import in_blocks_note


def choice_notes(source: Source, statistics: Statistics, scales: Scales, options: ScaleOptions) -> Iterator[str]:
    """Yield lines on the choices that a user would not expect: modules left in BF16, two terms because of a related
    module, experts with too few tokens, and modules in another precision than those that servers fuse them with.
    """
    for module, decision in scales.skipped.items():
        if decision.samples is not None:
            yield f"{module}: stays in BF16: {decision.reason}"
    yield from shared_input_notes(options, scales.of_text.forms)
    groups = statistics.record.groups
    least = options.min_expert_tokens
    compensated = options.weight_rounding != "nearest"
    if not options.inherit:
        few = expert_scales.starved(statistics, least)
        yield from expert_scales.starved_remarks(statistics, few, least, compensated)
    if ragged := ragged_note(statistics, scales):
        yield ragged
    if options.weighs_outputs and (in_blocks := scales.in_form(BLOCK)):
        yield in_blocks_note([*in_blocks])
    layers = statistics.record.experts or {}
    if options.weight_scale == "tensor" and layers:
        yield (
            "--weight-scale tensor: experts keep a scale for each channel, since servers have no form of experts with "
            "one a tensor that computes what was validated"
        )
    if compensated and (remark := judged_experts_note(scales, layers, options.weight_rounding)):
        yield remark
    split = mixed_group_warning(groups.values(), scales, layers), mixed_experts_warning(layers, scales)
    for remark in (*split, vision_tail_note(options, scales), *inherited_remarks(source, groups, scales, options)):
        if remark:
            yield remark


def judged_experts_note(scales: Scales, layers: Collection[str], rounding: WeightRounding) -> str | None:
    """Count the weights of experts that `rounding` rounded, and those that were rounded to nearest beside them; None
    without experts that it could round.

    `layers`: the names of the modules that hold the experts of a layer.
    """
    inside = tuple(f"{layer}." for layer in layers)
    experts = {name: weight for name, weight in scales.weights.items() if name.startswith(inside)}
    compensated = [name for name, weight in experts.items() if weight.rounding == rounding]
    nearest = {name: weight.held_out for name, weight in experts.items() if weight.rounding == "nearest"}
    few = [name for name, error in nearest.items() if error is None or error.tokens < LEAST_HELD_OUT]
    larger = [name for name in nearest if name not in set(few)]
    if not compensated and not nearest:
        return None
    reasons = [
        f"{len(names):,} ({names[0]}{' …' if len(names) > 1 else ''}) {'is' if len(names) == 1 else 'are'} rounded to "
        f"nearest, {reason}"
        for names, reason in (
            (larger, "where its error on held-out tokens is no smaller"),
            (few, "with too few tokens of their own to fit or to judge"),
        )
        if names
    ]
    return "; ".join(
        [
            f"--weight-rounding {rounding}: kept for {len(compensated):,} of {len(experts):,} weights of experts",
            *reasons,
        ]
    )


def ragged_note(statistics: Statistics, scales: Scales) -> str | None:
    """Name the modules in block form whose input is no multiple of 128 values; None where there are none."""
    first = group_of(statistics.record.groups)
    widths = {
        module: len(statistics.tensors[f"{first.get(module, module)}.input"].amax_channels)
        for module in scales.in_form(BLOCK)
    }
    ragged = [module for module, width in widths.items() if width % SIDE]
    if not ragged:
        return None
    return (
        f"--form block: {ragged[0]}{f' and {len(ragged) - 1} more' if len(ragged) > 1 else ''} read "
        f"{widths[ragged[0]]} values, no multiple of {SIDE}: the reference has a smaller group at the end, and servers "
        "refuse one; --form 'PATTERN=dynamic' gives such modules a scale for each token"
    )
