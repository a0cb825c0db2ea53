"""The tables and the picture of docs/accuracy.md, made from the result of `accuracy.py`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markdown import Figures, load, table

from fp8q.validate.report.plots import BLUE, GREEN, INK, MUTED, VERMILLION, Plot, plot
from pages.real import accuracy_real, chats_real

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BF16, MODELOPT, COMPRESSOR = "BF16", "ModelOpt", "llm-compressor"
TAIL = "fp8q, a tail of 64, gptq"
PEERS = ((MODELOPT, "ModelOpt `FP8_DEFAULT_CFG`"), (COMPRESSOR, "llm-compressor `FP8`"))
WAYS = [(1, "nearest"), (1, "gptq"), (2, "nearest"), (2, "gptq"), (2, "sequential")]
CACHES = ("off", "v", "fp8")
COLORS = {"nearest": BLUE, "gptq": VERMILLION, "sequential": GREEN}
Models = Mapping[str, Mapping[str, Figures]]


def name_of(terms: int, rounding: str, cache: str) -> str:
    """What a row of ours is called."""
    return f"fp8q, {terms} term{'s' * (terms == 2)}, {rounding}, cache {cache}"


def models() -> Models:
    """Model -> row -> its figures."""
    return {name: found["rows"] for name, found in load("accuracy")["results"].items()}


def way(terms: int, rounding: str) -> str:
    """How a row of ours is written."""
    return f"fp8q, {'one term' if terms == 1 else 'two terms'}, `{rounding}`"


def without_cache() -> list[tuple[str, str]]:
    """Key and title of each row that has no FP8 cache."""
    return [*PEERS] + [(name_of(terms, rounding, "off"), way(terms, rounding)) for terms, rounding in WAYS]


def cell(found: float, peer: float) -> str:
    """KL × 10⁶, and beside it the share of ModelOpt's."""
    return f"{found:.3g} ({found / peer:.3f})" if found < 1000 else f"{found:.0f} ({found / peer:.3f})"


def compared(titles: Iterable[tuple[str, str]]) -> str:
    """KL of rows on every model, under that of BF16 itself."""
    found = models()
    yardstick = ["BF16 itself", *(f"{rows[BF16]['bf16 arithmetic']:.3g}" for rows in found.values())]
    rows = [
        [title, *(cell(rows[name]["fp32"], rows[MODELOPT]["fp32"]) for rows in found.values())]
        for name, title in titles
        if all(name in rows for rows in found.values())  # a peer that was not installed
    ]
    return table(["", *found], [yardstick, *rows])


def accuracy() -> str:
    """What each way loses with quantized values in FP32 arithmetic."""
    return compared(without_cache())


def accuracy_as_served() -> str:
    """What each recipe loses on decoded tokens, with everything in BF16 arithmetic."""
    found, titles = load("as_served")["results"], dict(PEERS)
    names = [name for name in next(iter(found.values())) if name != BF16]
    yardstick = ["BF16 itself", *(f"{rows[BF16]:.3g}" for rows in found.values())]
    rows = [
        [
            titles.get(name, re.sub(", (nearest|gptq)$", r", `\1`", name)),
            *(cell(rows[name], rows[MODELOPT]) for rows in found.values()),
        ]
        for name in names
    ]
    return table(["", *found], [yardstick, *rows])


def cost(rows: Mapping[str, Figures], name: str) -> tuple[float, float]:
    """Bytes of a decode step and operations of a prompt's token, of what BF16 has."""
    step, operations = (rows[name][key] / rows[BF16][key] for key in ("step_bytes", "prefill_operations"))
    return step, operations


def accuracy_plot() -> Plot:
    """KL against both costs, a column for each model."""
    found = models()

    def draw(width: float) -> "Figure":
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, 5.4), layout="constrained")
        panels: Any = figure.subplots(2, len(found), sharey=True, sharex="row", squeeze=False)
        for column, (name, rows) in enumerate(found.items()):
            for kind, axes in enumerate(panels[:, column]):
                panel(axes, rows, kind, column == 0)
            panels[0, column].set_title(name, loc="left", color=INK)
        for row, label in enumerate(("bytes a decode step reads, of BF16's", "operations of a prompt, of BF16's")):
            panels[row, len(found) // 2].set_xlabel(label)
            panels[row, 0].set_ylabel("KL × 10⁶")
        return figure

    caption = (
        "KL to the FP32 model against what a decode step reads and what a prompt multiplies, as shares of BF16's. "
        "Hollow: one term; filled: two. Blue: nearest, vermillion: gptq, green: sequential. A line goes from a cache "
        "in BF16 over values in FP8 to all of it in FP8. Crosses: ModelOpt and llm-compressor. "
        "Black, and dotted: BF16 itself."
    )
    return plot("What accuracy costs", caption, draw)


def panel(axes: "Axes", rows: Mapping[str, Figures], kind: int, labelled: bool) -> None:
    """One model's rows against one cost: `kind` 0 bytes, 1 operations."""
    own = rows[BF16]["bf16 arithmetic"]
    axes.axhline(own, color=MUTED, linewidth=0.7, linestyle=(0, (1, 2)))
    axes.plot(1, own, color=INK, marker="o", markersize=4)
    if labelled:
        axes.annotate("BF16", (1, own), ha="right", xytext=(0, 3), textcoords="offset points", color=INK, fontsize=7)
    for terms, rounding in WAYS:
        names = [name for cache in CACHES if (name := name_of(terms, rounding, cache)) in rows]
        points: Sequence[tuple[float, float]] = [(cost(rows, name)[kind], rows[name]["fp32"]) for name in names]
        color = COLORS[rounding]
        axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=4, linewidth=0.8,
                  markerfacecolor=color if terms == 2 else "white")  # fmt: skip
    for peer in filter(rows.__contains__, (MODELOPT, COMPRESSOR)):
        axes.plot(cost(rows, peer)[kind], rows[peer]["fp32"], color=MUTED, marker="x", markersize=4)
    axes.set_yscale("log")
    axes.set_xlim(0.45, 1.05)


TABLES = (accuracy_real,)
CHAT_TABLES = (chats_real,)
DECISION_TABLES = (accuracy, accuracy_as_served)
PICTURES = {"docs/accuracy.svg": accuracy_plot}
