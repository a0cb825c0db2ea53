"""The picture of `fp8q bench`: for each prompt length, time between tokens and tokens a second over the batch sizes."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..bench.document import Bench, BenchRow
from .plots import INK, SERIES, Plot, figure_of, name_lines, plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def bench_plot(found: Bench) -> Plot:
    """Latency of a token (the line its medians, upright its 99th percentiles) above, throughput below."""
    prompts = sorted({row.prompt for row in found.rows})
    batches = sorted({row.batch for row in found.rows})
    names = dict.fromkeys(row.variant for row in found.rows)
    colors = {name: SERIES[number % len(SERIES)] for number, name in enumerate(names)}

    def draw(width: float) -> "Figure":
        figure = figure_of(width, 4.4)
        panels = figure.subplots(2, len(prompts), sharex=True, sharey="row", squeeze=False)
        for column, prompt in enumerate(prompts):
            for name in names:
                rows = [row for row in found.rows if (row.prompt, row.variant) == (prompt, name)]
                _lines(panels[:, column].tolist(), rows, colors[name])
            panels[0, column].set_title(f"prompts of {prompt:,} tokens", loc="left", color=INK)
        for axes, label in zip(panels[:, 0], ("between tokens, ms", "tokens a second"), strict=True):
            axes.set_ylabel(label)
            axes.set_ylim(0)
        last = [row for row in found.rows if (row.batch, row.prompt) == (found.rows[-1].batch, prompts[-1])]
        name_lines(panels[1, -1], {short(row.variant): (row.tokens_per_second, colors[row.variant]) for row in last})
        axes.set_xscale("log", base=2)  # shared by all panels, as the ticks are
        axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
        axes.minorticks_off()
        figure.supxlabel("batch size", color=INK, fontsize=8)
        return figure

    its = found.protocol
    emulated = " FP8 is emulated there, and nothing of this is its speed on a GPU." if its.emulated else ""
    caption = (
        f"{its.runtime} {its.version} on {its.device}: the median time from token to token and its 99th percentile, "
        f"and tokens a second of all rows, in answers of {its.tokens:,} tokens.{emulated}"
    )
    return plot("Latency and throughput", caption, draw)


def short(variant: str) -> str:
    """A variant's name as a picture has room for: of another run's path the last part."""
    precision, _, path = variant.partition(" ")
    return f"{precision} {Path(path).name}" if path else precision


def _lines(panels: "Sequence[Axes]", rows: Sequence[BenchRow], color: str) -> None:
    batches = [row.batch for row in rows]
    median, slow = [row.itl_p50_ms for row in rows], [row.itl_p99_ms for row in rows]
    panels[0].vlines(batches, median, slow, color=color, alpha=0.4)
    for axes, values in zip(panels, (median, [row.tokens_per_second for row in rows]), strict=True):
        axes.plot(batches, values, color=color, marker="o", markersize=2.5)
