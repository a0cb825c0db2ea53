"""The pictures of where the loss is made: the KL that each layer causes, from `sensitivity.json`.

Colours and sizes are those of `plots`.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .columns import nats
from .plots import BLUE, GREEN, MUTED, VERMILLION, Plot, figure_of, integers, plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .sensitivity.document import Loss

#: What each part of a bar is of, from the axis outwards.
KINDS = {"activation": (BLUE, "activations"), "weight": (VERMILLION, "weights"), "kv_cache": (GREEN, "cache")}


def by_layer(losses: "Sequence[Loss]") -> dict[str, dict[int, float]]:
    """Kind -> layer -> nats, summed over its tensors; what belongs to no layer is left out."""
    found: dict[str, dict[int, float]] = {kind: {} for kind in KINDS}
    for loss in losses:
        layer = re.search(r"\.(\d+)\.", loss.module)
        if layer:
            own = found[loss.kind]
            own[int(layer[1])] = own.get(int(layer[1]), 0.0) + loss.kl_nats
    return {kind: layers for kind, layers in found.items() if layers}


def loss_plot(losses: "Sequence[Loss]") -> Plot:
    """The KL of every layer of `losses` (worst first, at least one in a layer), by what is quantized there."""
    found = by_layer(losses)
    layers = sorted({layer for own in found.values() for layer in own})

    def draw(width: float) -> "Figure":
        figure = figure_of(width, 2.6)
        axes = figure.add_subplot()
        bottom = dict.fromkeys(layers, 0.0)
        for kind, own in found.items():
            heights = [own.get(layer, 0.0) for layer in layers]
            axes.bar(layers, heights, bottom=[bottom[layer] for layer in layers], color=KINDS[kind][0], width=0.8)
            bottom = {layer: bottom[layer] + height for layer, height in zip(layers, heights, strict=True)}
        axes.set_xlim(layers[0] - 0.6, layers[-1] + 0.6)
        for number, kind in enumerate(reversed(list(found))):
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


def _named(loss: "Loss") -> str:
    """A tensor in a sentence."""
    return (
        loss.module if loss.kind == "kv_cache" else f"the {loss.kind.replace('activation', 'input')} of {loss.module}"
    )
