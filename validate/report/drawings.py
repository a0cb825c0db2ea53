"""Choose the plots of a report: those that show something. Of a flat one a sentence says that nothing is to see.

Plots of the loss are made here: the KL that each layer causes, from `sensitivity.json`; the KL along the window, token
by token; the price of less loss, from `tune.json`; and the held-out KL by step of `fp8q distill`, from `distill.json`.

Colours and sizes are those of `plots`.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...calibrate.measure.statistics import load_statistics
from ...core.columns import decibels, nats, share
from ...core.run import Run
from ...quantize.learning.document import Distillation, load_distillation
from ...quantize.scales.decisions import load_scales
from ...quantize.sensitivity.document import Loss, load_sensitivity
from ..accuracy.document import load_divergences, load_token_losses
from ..tuning.document import Point, Tuning, load_tuning
from . import plots
from .accuracy_rows import accuracy_rows
from .curves import along_window, error_shares, rounding_alone_db
from .loss_buckets import PositionRow, is_flat, position_rows
from .plots import BLUE, GREEN, MUTED, SERIES, VERMILLION, WIDE, Plot, figure_of, integers, name_lines, plot
from .rows import ModuleRow, module_rows, wrote

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: The colour and the label of each part of a bar, from the axis outwards.
KINDS = {"activation": (BLUE, "activations"), "weight": (VERMILLION, "weights"), "kv_cache": (GREEN, "cache")}


def by_layer(losses: Sequence[Loss]) -> dict[str, dict[int, float]]:
    """Kind -> layer -> nats, summed over its tensors; what belongs to no layer is left out."""
    by_kind: dict[str, dict[int, float]] = {kind: {} for kind in KINDS}
    for loss in losses:
        layer = re.search(r"\.(\d+)\.", loss.module)
        if layer:
            nats_by_layer = by_kind[loss.kind]
            nats_by_layer[int(layer[1])] = nats_by_layer.get(int(layer[1]), 0.0) + loss.kl_nats
    return {kind: layers for kind, layers in by_kind.items() if layers}


def loss_plot(losses: Sequence[Loss]) -> Plot:
    """The KL of every layer of `losses` (worst first, at least one in a layer), by what is quantized there."""
    by_kind = by_layer(losses)
    layers = sorted({layer for kind_nats in by_kind.values() for layer in kind_nats})

    def draw(width: float) -> "Figure":
        figure = figure_of(width, 2.6)
        axes = figure.add_subplot()
        bottom = dict.fromkeys(layers, 0.0)
        for kind, kind_nats in by_kind.items():
            heights = [kind_nats.get(layer, 0.0) for layer in layers]
            axes.bar(layers, heights, bottom=[bottom[layer] for layer in layers], color=KINDS[kind][0], width=0.8)
            bottom = {layer: bottom[layer] + height for layer, height in zip(layers, heights, strict=True)}
        axes.set_xlim(layers[0] - 0.6, layers[-1] + 0.6)
        for number, kind in enumerate(reversed(list(by_kind))):
            color, name = KINDS[kind]
            axes.annotate(name, (1.01, 0.9 - 0.12 * number), xycoords="axes fraction", color=color, fontsize=8)
        axes.xaxis.set_major_locator(integers())
        axes.set_xlabel("layer", color=MUTED)
        axes.set_ylabel("KL alone, nats")
        return figure

    caption = (
        "The KL that each tensor causes when it alone is quantized, summed over each layer’s. The worst is "
        f"{_named(losses[0])}, {nats(losses[0].kl_nats)} nats."
    )
    return plot("Loss of every layer", caption, draw)


def _named(loss: Loss) -> str:
    """A tensor in a sentence."""
    if loss.kind == "kv_cache":
        return loss.module
    return f"the {loss.kind.replace('activation', 'input')} of {loss.module}"


def divergence_plot(kl: Mapping[str, npt.NDArray[np.float32]]) -> Plot:
    """KL from BF16 along the window in every runtime of `kl`, float32 [windows, context], nats, NaN: not scored."""
    spans = max(1, min(32, next(iter(kl.values())).shape[1] // 8))
    curves = {name: along_window(values, spans) for name, values in kl.items()}
    colors = dict(zip(kl, itertools.cycle(SERIES), strict=False))

    def draw(width: float) -> "Figure":
        figure = figure_of(width, 2.6)
        axes = figure.add_subplot()
        for name, curve in curves.items():
            axes.fill_between(curve.position, curve.low, curve.high, color=colors[name], alpha=0.15, linewidth=0)
            axes.plot(curve.position, curve.mean, color=colors[name])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("position in the window", color=MUTED)
        axes.set_ylabel("KL from BF16, nats")
        name_lines(axes, {name: (float(curve.mean[-1]), colors[name]) for name, curve in curves.items()})
        return figure

    caption = (
        "How far each runtime’s next-token distribution is from BF16’s, at each part of the window, with two standard "
        "errors. A line that rises to the right is an error that builds up in the cache."
    )
    return plot("KL along the window", caption, draw)


def frontier_plot(tuning: Tuning) -> Plot:
    """Plot KL against cost: operations of a prompt, and bytes of weights."""

    def memory(point: Point) -> float:
        return point.weight_bytes / tuning.run.weight_bytes

    def prefill(point: Point) -> float:
        return point.prefill_flops_ratio

    panels = {"operations of a prompt": prefill, "bytes of weights over the run’s": memory}
    marked = {"the run": (tuning.run, VERMILLION)} | ({"chosen": (tuning.chosen, GREEN)} if tuning.chosen else {})

    def draw(width: float) -> "Figure":
        wide = width == WIDE
        figure = figure_of(width, 2.8 if wide else 5.0)
        drawn = figure.subplots(*((1, 2) if wide else (2, 1)), sharey=wide, squeeze=False)
        for axes, (title, cost) in zip(drawn.flat, panels.items(), strict=True):
            steps = sorted(tuning.frontier, key=cost)
            axes.plot([cost(step) for step in steps], [step.kl_nats for step in steps], "o", color=BLUE, markersize=3)
            for name, (point, color) in marked.items():
                axes.plot([cost(point)], [point.kl_nats], "o", color=color, markersize=5)
                axes.annotate(
                    name, (cost(point), point.kl_nats), xytext=(5, 3), textcoords="offset points", color=color
                )
            axes.set_yscale("log")
            axes.set_xlabel(title, color=MUTED)
        figure.axes[0].set_ylabel("KL, nats")
        return figure

    caption = (
        "What less loss costs: each point is a mix of one term, tails, two terms and BF16, of rounding and of the "
        "cache’s form, that nothing cheaper betters, as predicted; the run and what was chosen are measured."
    )
    return plot("Loss against cost", caption, draw)


def learned_weights(run: Run) -> Distillation | None:
    """Read what `run` learned; None where nothing was, or the checkpoint has other codes now."""
    if not wrote(run, run.distillation, "distill"):
        return None
    distillation = load_distillation(run)
    quantized = run.record().stages.get("quantize")
    in_use = quantized is not None and run.distilled.name in quantized.inputs
    if in_use or distillation.best.step == 0:
        return distillation
    return None


def learning_plot(distillation: Distillation) -> Plot:
    """The held-out KL by step while weights were learned."""
    moments = distillation.moments
    marked = {"start": (distillation.start, VERMILLION), "best": (distillation.best, GREEN)}

    def draw(width: float) -> "Figure":
        figure = figure_of(width, 2.6)
        axes = figure.add_subplot()
        axes.plot([point.step for point in moments], [point.kl for point in moments], "o-", color=BLUE, markersize=3)
        for name, (moment, color) in marked.items():
            axes.plot([moment.step], [moment.kl], "o", color=color, markersize=5)
            where = (moment.step, moment.kl)
            axes.annotate(name, where, xytext=(5, 4), textcoords="offset points", color=color)
        axes.margins(x=0.08, y=0.15)
        axes.xaxis.set_major_locator(integers())
        axes.set_xlabel("step", color=MUTED)
        axes.set_ylabel("held-out KL, nats")
        return figure

    caption = (
        f"The KL from BF16 on {distillation.held_out:,} held-out tokens while weights were learned from "
        f"{distillation.tokens:,} of {distillation.data}: {distillation.conclusion}."
    )
    return plot("Learning weights", caption, draw)


#: The decibels that layers differ by where none stands out, and that lie below what rounding alone leaves.
ALIKE_DB = 2.0
BELOW_DB = 3.0
#: The share of a tensor's error that rounding makes where its histogram has nothing else to show.
ALL_ROUNDING = 0.99


@dataclass(frozen=True)
class Drawings:
    """The plots of a report by name, and for each that was left out as flat a remark in its place."""

    plots: dict[str, Plot] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)


def losses_by_tensor(run: Run) -> list[Loss]:
    """List the loss that each tensor causes alone, worst first; nothing where that is not known of the files that are
    here now.
    """
    if wrote(run, run.sensitivity, "sensitivity"):
        return load_sensitivity(run).modules
    return []


def report_plots(run: Run) -> dict[str, Plot]:
    """The plots of the report that show something: `histogram` (of the noisiest tensor) and `layers` where something is
    in FP8, `loss` where it was located, `frontier` where it was tuned, `learning` where its weights were learned,
    `positions` and `divergence` where the run was evaluated.
    """
    return drawings(run).plots


def drawings(run: Run) -> Drawings:
    """Draw what shows something, and say of the rest what it would show."""
    drawn = Drawings()
    _draw_errors(run, drawn)
    if by_layer(located := losses_by_tensor(run)):
        drawn.plots["loss"] = loss_plot(located)
    if wrote(run, run.tuning, "tune"):
        drawn.plots["frontier"] = frontier_plot(load_tuning(run))
    if (learned := learned_weights(run)) is not None:
        drawn.plots["learning"] = learning_plot(learned)
    if wrote(run, run.tokens, "validate"):
        _draw_positions(run, drawn)
    return drawn


def _draw_errors(run: Run, drawn: Drawings) -> None:
    rows = [row for row in module_rows(run) if row.scale is not None]
    if not rows:
        return
    worst = plots.noisiest(rows)
    histogram = load_statistics(run).tensors[str(worst.tensor)].histogram
    assert worst.scale is not None, "a tensor in FP8 has a scale"
    rounding = error_shares(histogram, worst.scale, worst.grid).rounding
    if rounding < ALL_ROUNDING:
        drawn.plots["histogram"] = plots.histogram_plot(worst, histogram)
    else:
        drawn.remarks["histogram"] = (
            f"Of the noisiest tensor, {worst.tensor}, rounding makes {share(rounding)} of the error, and another scale "
            "would mend nothing."
        )
    reached = load_scales(run).of_text.weights
    rows = [row for row in rows if row.kind == "cache" or row.module in reached]  # layers of towers have numbers too
    if remark := no_outlier(rows):
        drawn.remarks["layers"] = remark
    else:
        drawn.plots["layers"] = plots.layer_plot(rows)


def no_outlier(rows: Sequence[ModuleRow]) -> str:
    """State that no layer's error stands out among those of its kind; empty where one does."""
    kinds: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for what, value in (("input", row.sqnr_db), ("weight", row.weight_sqnr_db)):
            if value is not None:
                kinds.setdefault((row.kind_of_module, what), []).append(value)
    measured = [value for values in kinds.values() for value in values]
    if not measured or min(measured) < rounding_alone_db() - BELOW_DB:
        return ""
    if any(max(values) - min(values) > ALIKE_DB for values in kinds.values()):
        return ""
    return (
        f"No layer stands out: the signal to noise of every input and weight is {decibels(min(measured))} to "
        f"{decibels(max(measured))} dB, and rounding to three mantissa bits alone leaves "
        f"{decibels(rounding_alone_db())} dB."
    )


def _draw_positions(run: Run, drawn: Drawings) -> None:
    rows = position_rows(run)
    kl = load_divergences(run)
    if rows and is_flat(rows):
        drawn.remarks["positions"] = _flat(rows)
        return
    if kl:
        drawn.plots["divergence"] = divergence_plot(kl)
    sampled = {row.runtime for row in accuracy_rows(run) if row.tokens is not None}
    nll = {name: values for name, values in load_token_losses(run).items() if name not in sampled}
    drawn.plots["positions"] = plots.position_plot(nll)


def _flat(rows: Sequence[PositionRow]) -> str:
    first = rows[0]
    last = rows[-1]
    ends = ", ".join(
        f"{nats(first.divergences[name])} and {nats(last.divergences[name])} nats ({name})"
        for name in last.divergences
        if name in first.divergences
    )
    detail = f": at the window’s beginning and its end it is {ends}" if ends else ""
    return f"The divergence from BF16 does not rise along the window{detail}. No error builds up in the cache."
