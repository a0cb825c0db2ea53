"""The picture of `fp8q distill`: the held-out divergence by step, from `distill.json`, start and best marked."""

from typing import TYPE_CHECKING

from ...core.run import Run
from .plots import BLUE, GREEN, MUTED, VERMILLION, Plot, figure_of, integers, plot
from .rows import wrote

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ...quantize.learning.document import Distillation


def learned_weights(run: Run) -> "Distillation | None":
    """Read what `run` learned; None where nothing was, or the checkpoint has other codes now."""
    from ...quantize.learning.document import load_distillation

    if not wrote(run, run.distillation, "distill"):
        return None
    found, quantized = load_distillation(run), run.record().stages.get("quantize")
    in_use = quantized is not None and run.distilled.name in quantized.inputs
    return found if in_use or found.best.step == 0 else None


def learning_plot(found: "Distillation") -> Plot:
    """The held-out KL by step while weights were learned."""
    moments, marked = found.moments, {"start": (found.start, VERMILLION), "best": (found.best, GREEN)}

    def draw(width: float) -> "Figure":
        figure = figure_of(width, 2.6)
        axes = figure.add_subplot()
        axes.plot([each.step for each in moments], [each.kl for each in moments], "o-", color=BLUE, markersize=3)
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
        f"The KL from BF16 on {found.held_out:,} held-out tokens while weights were learned from {found.tokens:,} of "
        f"{found.data}: {found.conclusion}."
    )
    return plot("Learning weights", caption, draw)
