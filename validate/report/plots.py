"""Plots as SVG: one tensor against the E4M3 grid, the error of every layer, the loss along the window, and the times of
`fp8q bench`.

Drawn without pyplot (no global state), with text left as text and a fixed hash salt, so that equal runs make equal
bytes. Colours are Okabe and Ito's ("Color Universal Design", 2008), which colour-blind readers can distinguish; lines
are labelled directly, without a legend. Each plot is drawn twice, for a page and for a phone, because a shrunk plot
cannot be read; its colours follow the page's.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...calibrate.measure.histogram import Histogram
from ...core.columns import magnitude, noise, share
from ...quantize.codes.formats import E4M3
from ..bench.document import Bench, BenchRow
from .curves import Curve, ErrorShares, Floats, along_window, density, error_density, error_shares, rounding_alone_db
from .rows import ModuleRow
from .tables import lossless

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator


#: Colours, and the custom properties that stand for them in a page.
PAPER = "#ffffff"
INK = "#1c1c1c"
MUTED = "#666667"
FAINT = "#d8d8d9"
BLUE = "#0072b2"
VERMILLION = "#d55e00"
GREEN = "#009e73"
PURPLE = "#cc79a7"
ORANGE = "#e69f00"
SERIES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE)
PROPERTIES = {PAPER: "paper", INK: "ink", MUTED: "muted", FAINT: "faint"} | {
    color: f"series-{i}" for i, color in enumerate(SERIES)
}
#: Widths in inches, for a page and for a phone.
WIDE = 9.6
NARROW = 4.2
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "savefig.facecolor": PAPER,
    "axes.unicode_minus": True,
    "lines.linewidth": 1.4,
}


@dataclass(frozen=True)
class Plot:
    """One picture: a caption that also serves readers who cannot see it, and its SVG for a page and for a phone."""

    title: str
    caption: str
    wide: str
    narrow: str

    def _repr_svg_(self) -> str:
        """Render the plot for a notebook."""
        return self.wide

    def themed(self, narrow: bool) -> str:
        """Return the SVG for a page, its colours replaced by the page's properties `--paper`, `--ink` and so on."""
        svg = self.narrow if narrow else self.wide
        for color, name in PROPERTIES.items():
            svg = svg.replace(color, f"var(--{name})")
        return svg


def plot(title: str, caption: str, draw: Callable[[float], "Figure"]) -> Plot:
    """Draw a picture in both widths."""
    return Plot(title, caption, _svg(draw, WIDE), _svg(draw, NARROW))


def _svg(draw: Callable[[float], "Figure"], width: float) -> str:
    import matplotlib as mpl

    out = StringIO()
    with mpl.rc_context(STYLE | {"svg.hashsalt": f"fp8q {width}"}):
        draw(width).savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    used = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", svg))
    return re.sub(r' id="([^"]+)"', lambda attribute: attribute[0] if attribute[1] in used else "", svg)


def figure_of(width: float, height: float) -> "Figure":
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def integers() -> "Locator":
    """Ticks at whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True)


def exponent(octave: float) -> str:
    """A tick label: `2⁻⁶`."""
    return "2" + f"{octave:.0f}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def histogram_plot(row: ModuleRow, histogram: Histogram) -> Plot:
    """The exact histogram of the tensor of `row` on a log2 axis, with its clip and the grid of E4M3, and where its
    squared error comes from.
    """
    assert row.scale is not None, "a tensor in FP8 has a scale"
    assert row.clip is not None, "a tensor in FP8 has a clip"
    scale = row.scale
    clip = row.clip
    grid = row.grid
    edges, values = density(histogram)
    error_edges, error = error_density(histogram, scale, grid)
    floor = float(np.log2(scale * grid.midpoints[0]))
    ceiling = float(np.log2(clip))
    rare = edges[np.searchsorted(np.cumsum(values * np.diff(edges)), 1e-3)]
    left = rare - 1 if rare - 1 > floor else floor - 1.5
    right = max(edges[-1], ceiling)

    def draw(width: float) -> "Figure":
        figure = figure_of(width, 3.1)
        axes = figure.add_subplot()
        axes.stairs(values, edges, fill=True, color=FAINT)
        axes.stairs(error, error_edges, color=VERMILLION)
        axes.vlines(
            np.log2(scale * E4M3.grid[1:].astype(np.float64)),
            0,
            0.035,
            color=BLUE,
            linewidth=0.7,
            transform=axes.get_xaxis_transform(),
        )
        axes.set_xlim(left, right + (right - left) * 0.9 / width)
        axes.set_ylim(0, 1.15 * max(values.max(), error.max()))
        _line_down(axes, ceiling, f"clip {magnitude(clip)}")
        if left < floor:
            _line_down(axes, floor, "rounds to 0 below")
        else:
            axes.annotate(
                f"← rounds to 0 below {exponent(floor)}",
                (0, 0.06),
                xycoords="axes fraction",
                xytext=(4, 0),
                textcoords="offset points",
                fontsize=8,
            )
        _on_the_rise(axes, edges, values, "values", MUTED)
        if error.any():
            _on_the_rise(axes, error_edges, error, "squared error", VERMILLION)
        axes.xaxis.set_major_locator(integers())
        axes.xaxis.set_major_formatter(lambda x, _: exponent(x))
        axes.set_xlabel("magnitude (blue: what E4M3 has at this scale)")
        axes.set_ylabel("share per octave")
        return figure

    caption = (
        f"{row.tensor}, {noise(row.sqnr_db)}. Grey: the share of its {histogram.samples:,} values in each octave, "
        "from the exact histogram; orange: the share of the "
        f"squared error. amax {magnitude(histogram.amax)}, clip {magnitude(clip)}, scale {magnitude(scale)}. "
        f"{_causes(row, error_shares(histogram, scale, grid))}"
    )
    return plot("The noisiest tensor on the E4M3 grid", caption, draw)


def _causes(row: ModuleRow, parts: ErrorShares) -> str:
    saturated = (
        f"{share(row.saturation)} of the values saturate and make {share(parts.saturation)} of the error"
        if row.saturation
        else "Nothing saturates"
    )
    zeroed = (
        f"{share(row.underflow)} of those above zero round to zero and make {share(parts.underflow)}"
        if row.underflow
        else "nothing rounds to zero"
    )
    return f"{saturated}; {zeroed}; rounding makes {share(parts.rounding)}."


def _line_down(axes: "Axes", x: float, text: str) -> None:
    axes.axvline(x, color=INK, linewidth=0.8, linestyle=(0, (3, 2)))
    axes.annotate(
        text,
        (x, 1),
        xycoords=("data", "axes fraction"),
        xytext=(3, 0),
        textcoords="offset points",
        va="top",
        color=INK,
        fontsize=8,
    )


def _on_the_rise(axes: "Axes", edges: Floats, heights: Floats, text: str, color: str) -> None:
    half = int(np.argmax(heights > heights.max() / 2))
    axes.annotate(
        text,
        (edges[half], heights.max() / 2),
        xytext=(-5, 2),
        textcoords="offset points",
        ha="right",
        va="bottom",
        color=color,
    )


def noisiest(rows: Sequence[ModuleRow]) -> ModuleRow:
    """The one of `rows` (at least one, all in FP8) whose input, or cache tensor, has the least signal to noise."""
    return min(rows, key=lambda row: lossless(row.sqnr_db))


def layer_plot(rows: Sequence[ModuleRow]) -> Plot:
    """Signal to noise of every input and weight of `rows` (all in FP8) in dB, a panel for each kind of module, along
    the layers.
    """
    kinds: dict[str, list[ModuleRow]] = {}
    for row in rows:
        kinds.setdefault(row.kind_of_module, []).append(row)
    measured = [db for row in rows for db in (row.sqnr_db, row.weight_sqnr_db) if db is not None]
    limits = min([*measured, 30.0]) - 0.5, max([*measured, rounding_alone_db()]) + 0.5

    def draw(width: float) -> "Figure":
        lines = -(-len(kinds) // (5 if width == WIDE else 3))
        columns = -(-len(kinds) // lines)
        figure = figure_of(width, 0.4 + 1.5 * lines)
        panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
        for axes in panels.flat[len(kinds) :]:
            axes.set_axis_off()
        for number, (axes, (kind, members)) in enumerate(zip(panels.flat, kinds.items(), strict=False)):
            _kind_panel(axes, kind, members, number == 0)
            axes.tick_params(labelbottom=number + columns >= len(kinds))
        panels[0, 0].set_ylim(limits)
        panels[0, 0].xaxis.set_major_locator(integers())
        figure.supxlabel("layer", color=MUTED, fontsize=8)
        figure.supylabel("signal to noise, dB", color=MUTED, fontsize=8)
        return figure

    worst = noisiest(rows)
    caption = (
        "Signal to noise of what each GEMM reads, by layer; 6 dB is one bit. The noisiest input is that of "
        f"{worst.module}, {noise(worst.sqnr_db)}. The dotted line, "
        f"{rounding_alone_db():.1f} dB, is what three mantissa bits leave of values spread evenly over the logarithm; "
        "what lies well below it saturates, underflows, or has outliers."
    )
    return plot("Error of every layer", caption, draw)


def _kind_panel(axes: "Axes", kind: str, members: Sequence[ModuleRow], labelled: bool) -> None:
    axes.axhline(rounding_alone_db(), color=MUTED, linewidth=0.7, linestyle=(0, (1, 2)))
    series = {
        ("input", BLUE, -5): [row.sqnr_db for row in members],
        ("weight", VERMILLION, 5): [row.weight_sqnr_db for row in members],
    }
    for (name, color, offset), decibels in series.items():
        known = [(row.layer or 0, db) for row, db in zip(members, decibels, strict=True) if db is not None]
        axes.plot(
            [layer for layer, _ in known], [db for _, db in known], color=color, marker="o", markersize=2.5, linewidth=1
        )
        if labelled and known:
            side = "top" if offset < 0 else "bottom"
            axes.annotate(
                name,
                known[-1],
                xytext=(0, offset),
                textcoords="offset points",
                ha="right",
                va=side,
                color=color,
                fontsize=8,
            )
    if labelled:
        alone = (0, rounding_alone_db())
        axes.annotate(
            "rounding alone",
            alone,
            xycoords=("axes fraction", "data"),
            xytext=(2, 2),
            textcoords="offset points",
            color=MUTED,
            fontsize=7,
        )
    axes.set_title(kind, loc="left", color=INK)


def position_plot(nll: Mapping[str, npt.NDArray[np.float32]], base: str = "bf16") -> Plot:
    """Plot the negative log-likelihood along the window in every runtime, and below it each one's difference from
    `base`, token by token.
    """
    spans = max(1, min(32, next(iter(nll.values())).shape[1] // 8))
    losses = {name: along_window(values, spans) for name, values in nll.items()}
    others = [name for name in nll if name != base and base in nll]
    differences = {name: along_window(nll[name].astype(np.float64) - nll[base], spans) for name in others}

    def draw(width: float) -> "Figure":
        figure = figure_of(width, 4.4 if differences else 2.4)
        panels = figure.subplots(
            2 if differences else 1, 1, sharex=True, squeeze=False, height_ratios=[2, 3] if differences else None
        )[:, 0]
        for name, curve in sorted(losses.items(), key=lambda item: item[0] == base):
            panels[0].plot(curve.position, curve.mean, color=_color(others, name), linewidth=1)
        _at_the_end(panels[0], {name: curve for name, curve in losses.items() if name not in others}, others)
        panels[0].set_ylabel("NLL, nats")
        panels[-1].set_xlabel("position in the window")
        for name, curve in differences.items():
            panels[1].fill_between(
                curve.position, curve.low, curve.high, color=_color(others, name), alpha=0.15, linewidth=0
            )
            panels[1].plot(curve.position, curve.mean, color=_color(others, name))
        if differences:
            panels[1].axhline(0, color=INK, linewidth=0.6)
            panels[1].set_ylabel(f"minus {base}, nats")
            _at_the_end(panels[1], differences, others)
        return figure

    return plot("Loss along the window", _position_caption(list(nll), base if differences else None), draw)


def _position_caption(names: Sequence[str], base: str | None) -> str:
    caption = f"Mean loss at each part of the window, over windows, in {', '.join(names)}."
    if base is None:
        return caption
    return (
        f"{caption} Below, what each adds to {base}’s loss on the same tokens, with two standard errors: a line that "
        "rises to the right is an error that builds up in the cache."
    )


def _at_the_end(axes: "Axes", curves: Mapping[str, Curve], others: Sequence[str]) -> None:
    name_lines(axes, {name: (float(curve.mean[-1]), _color(others, name)) for name, curve in curves.items()})


def name_lines(axes: "Axes", ends: Mapping[str, tuple[float, str]]) -> None:
    """Write the name of each line at its right end (its value there, and its colour), in the order of their ends, far
    enough apart to read.
    """
    low, high = axes.get_ylim()
    position = -1.0
    for name, (value, color) in sorted(ends.items(), key=lambda item: item[1][0]):
        position = max(position + 0.11, (value - low) / (high - low))
        axes.annotate(
            name,
            (1.01, position),
            xycoords="axes fraction",
            va="center",
            color=color,
            fontsize=8,
            annotation_clip=False,
        )


def _color(names: Sequence[str], name: str) -> str:
    if name in names:
        return SERIES[names.index(name) % len(SERIES)]
    return INK


def bench_plot(bench: Bench) -> Plot:
    """Latency of a token (the line its medians, upright its 99th percentiles) above, throughput below."""
    prompts = sorted({row.prompt for row in bench.rows})
    batches = sorted({row.batch for row in bench.rows})
    names = dict.fromkeys(row.variant for row in bench.rows)
    colors = {name: SERIES[number % len(SERIES)] for number, name in enumerate(names)}

    def draw(width: float) -> "Figure":
        figure = figure_of(width, 4.4)
        panels = figure.subplots(2, len(prompts), sharex=True, sharey="row", squeeze=False)
        for column, prompt in enumerate(prompts):
            for name in names:
                rows = [row for row in bench.rows if (row.prompt, row.variant) == (prompt, name)]
                _lines(panels[:, column].tolist(), rows, colors[name])
            panels[0, column].set_title(f"prompts of {prompt:,} tokens", loc="left", color=INK)
        for axes, label in zip(panels[:, 0], ("between tokens, ms", "tokens a second"), strict=True):
            axes.set_ylabel(label)
            axes.set_ylim(0)
        last = [row for row in bench.rows if (row.batch, row.prompt) == (bench.rows[-1].batch, prompts[-1])]
        name_lines(panels[1, -1], {short(row.variant): (row.tokens_per_second, colors[row.variant]) for row in last})
        axes.set_xscale("log", base=2)  # shared by all panels, as the ticks are
        axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
        axes.minorticks_off()
        figure.supxlabel("batch size", color=INK, fontsize=8)
        return figure

    its = bench.protocol
    emulated = " FP8 is emulated there, and nothing of this is its speed on a GPU." if its.emulated else ""
    caption = (
        f"{its.runtime} {its.version} on {its.device}: the median time from token to token and its 99th percentile, "
        f"and tokens a second of all rows, in answers of {its.tokens:,} tokens.{emulated}"
    )
    return plot("Latency and throughput", caption, draw)


def short(variant: str) -> str:
    """A variant's name as a picture has room for: of another run's path the last part."""
    precision, _, path = variant.partition(" ")
    if path:
        return f"{precision} {Path(path).name}"
    return precision


def _lines(panels: "Sequence[Axes]", rows: Sequence[BenchRow], color: str) -> None:
    batches = [row.batch for row in rows]
    median = [row.itl_p50_ms for row in rows]
    slow = [row.itl_p99_ms for row in rows]
    panels[0].vlines(batches, median, slow, color=color, alpha=0.4)
    for axes, values in zip(panels, (median, [row.tokens_per_second for row in rows]), strict=True):
        axes.plot(batches, values, color=color, marker="o", markersize=2.5)
