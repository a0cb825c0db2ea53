"""`training.html`: a training log by depth and step, with the verdicts of the checklist, all in one file."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...core.columns import Column, Table, magnitude, share
from ...core.files import replacing
from ...options import GradientFormat, Scaling
from ...quantize.training.training_log import KINDS, Kind, TrainingLog
from ..advice.checkup import Check, check_table
from ..advice.training_checks import TrainingCheckup, shares
from .plots import BLUE, INK, MUTED, VERMILLION, Plot, plot
from .report import page_template
from .rows import layer_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]
#: Columns that a picture has room for; more records are drawn by the largest of neighbours.
MOST_COLUMNS = 60
#: Shares below this are drawn as this.
LEAST_SHARE = 1e-6
SCALINGS: dict[Scaling, str] = {
    "delayed": "scaled by the amax of the records before", "current": "scaled by their own amax", "none": "not scaled",
}  # fmt: skip
TITLES = {"input": "inputs", "weight": "weights", "gradient": "gradients"}


@dataclass(frozen=True)
class DepthRow:
    """The worst of one decoder layer's tensors (`layer` None: outside of all) by kind: the largest amax of the last
    record, and the shares as the checklist judges them.
    """

    layer: int | None
    amax: dict[Kind, float]
    saturated: dict[Kind, float]
    underflow: dict[Kind, float]
    lost: dict[Kind, float]


def layers_of(log: TrainingLog, kind: Kind) -> dict[int | None, list[int]]:
    """Decoder layer -> the indices of its tensors of one kind, in the order of the model."""
    by_layer: dict[int | None, list[int]] = {}
    for index in log.of_kind(kind):
        by_layer.setdefault(layer_of(log.tensors[index]), []).append(index)
    return by_layer


def depth_rows(log: TrainingLog, gradients: GradientFormat) -> list[DepthRow]:
    """A row for each decoder layer, in order."""
    amax = log.column("amax")[-1]
    late = max(1, len(log.steps) // 4)
    by_share = {name: shares(log, gradients, name) for name in ("saturated", "underflow", "lost")}
    rows: dict[int | None, DepthRow] = {}
    for kind in KINDS:
        for layer, tensors in layers_of(log, kind).items():
            row = rows.setdefault(layer, DepthRow(layer, {}, {}, {}, {}))
            row.amax[kind] = _largest(amax[tensors])
            row.saturated[kind] = _largest(by_share["saturated"][1:, tensors])
            row.underflow[kind] = _largest(_mean(by_share["underflow"][-late:, tensors]))
            row.lost[kind] = _largest(_mean(by_share["lost"][-late:, tensors]))
    return sorted(rows.values(), key=lambda row: math.inf if row.layer is None else row.layer)


def _mean(values: Floats) -> Floats:
    """The mean of each column's values that are there; NaN where none is."""
    there = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        mean: Floats = np.where(there, values, 0.0).sum(axis=0) / there.sum(axis=0)
    return mean


def _largest(values: Floats) -> float:
    """The largest value that is there; NaN where none is."""
    if values.size and not np.isnan(values).all():
        return float(np.nanmax(values))
    return math.nan


def training_depth_table(log: TrainingLog, gradients: GradientFormat) -> Table[DepthRow]:
    """Tabulate a log by depth: for each decoder layer the worst of its tensors."""

    def column(part: str, kind: Kind, write: Any) -> Column[DepthRow]:
        def value(row: DepthRow) -> float | None:
            number = getattr(row, part).get(kind, math.nan)
            return None if math.isnan(number) else number

        return Column(f"{kind} {part}", value, write)

    columns = (
        Column[DepthRow]("layer", lambda row: "other" if row.layer is None else row.layer),
        *(column("amax", kind, magnitude) for kind in KINDS),
        *(column("saturated", kind, share) for kind in KINDS),
        *(column("underflow", kind, share) for kind in KINDS),
        *(column("lost", kind, share) for kind in KINDS),
    )
    note = (
        f"Inputs and weights in E4M3, gradients in {gradients.upper()}, {SCALINGS[log.head.scaling]}. amax: of the "
        "last record. Saturated: the worst record’s share of values beyond the scale. Underflow: share of non-zero "
        "values that become zero, and lost: share of the energy, both means over the last quarter of the records. Each "
        "is the layer’s worst tensor."
    )
    return Table("By depth", depth_rows(log, gradients), columns, "Nothing was recorded.", note)


def training_plots(log: TrainingLog, gradients: GradientFormat) -> list[Plot]:
    """Plot the loss and the gradient norm by step; then underflow, lost energy and amax, by depth and step."""
    plots = [_course(log)] if not np.isnan(log.loss).all() or not np.isnan(log.gradient_norm).all() else []
    lost = np.log10(np.maximum(shares(log, gradients, "lost"), LEAST_SHARE))
    under = np.log10(np.maximum(shares(log, gradients, "underflow"), LEAST_SHARE))
    with np.errstate(divide="ignore"):
        amax = np.log2(log.column("amax"))
    amax[np.isinf(amax)] = np.nan
    return [
        *plots,
        _by_depth(log, "Share of the energy that rounding loses", "log10 of the share", lost),
        _by_depth(log, "Share of values that become zero", "log10 of the share", under),
        _by_depth(log, "amax", "log2 of amax", amax),
    ]


def _course(log: TrainingLog) -> Plot:
    """The loss and the norm of the gradient by step."""

    def draw(width: float) -> "Figure":
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, 3.6), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True)
        for axes, values, label, color in (
            (upper, log.loss, "loss", BLUE), (lower, log.gradient_norm, "gradient norm", VERMILLION),
        ):  # fmt: skip
            there = np.isfinite(values)
            axes.plot(
                log.steps[there], values[there], color=color, marker="o" if there.sum() < 40 else "", markersize=3
            )
            for step in log.steps[np.isinf(values)]:
                axes.axvline(step, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
            axes.set_ylabel(label)
        if (log.gradient_norm[np.isfinite(log.gradient_norm)] > 0).any():
            lower.set_yscale("log")
        lower.set_xlabel("step")
        return figure

    return plot("Course", "Loss and gradient norm at each recorded step; dotted where one is not finite.", draw)


def _by_depth(log: TrainingLog, title: str, label: str, values: Floats) -> Plot:
    """Draw `values` [records, tensors], a panel for each kind: layers upward, steps to the right, a layer's largest."""
    images = {kind: _image(values, list(layers_of(log, kind).values())) for kind in KINDS if log.of_kind(kind)}
    every = np.concatenate([image[np.isfinite(image)] for image in images.values()])
    low, high = (float(every.min()), float(every.max())) if len(every) else (0.0, 1.0)

    def draw(width: float) -> "Figure":
        from matplotlib.figure import Figure

        stacked = width < 6
        figure = Figure(figsize=(width, 6.0 if stacked else 2.6), layout="constrained")
        panels: Any = figure.subplots(*((len(images), 1) if stacked else (1, len(images))), squeeze=False)
        mesh = None
        for axes, (kind, image) in zip(panels.flat, images.items(), strict=True):
            edges = np.linspace(log.steps[0], max(log.steps[-1], log.steps[0] + 1), image.shape[1] + 1)
            mesh = axes.pcolormesh(
                edges, np.arange(image.shape[0] + 1), image, cmap="cividis", vmin=low, vmax=max(high, low + 1e-9)
            )
            axes.set_title(TITLES[kind], loc="left", color=INK)
            axes.set_yticks(np.arange(image.shape[0]) + 0.5, _names(log, kind), color=MUTED)
            axes.set_xlabel("step")
        assert mesh is not None, "a log has tensors"
        bar = figure.colorbar(mesh, ax=list(panels.flat), label=label)
        assert bar.solids is not None, "a colour bar has its colours"
        bar.solids.set_rasterized(False)  # an image in the page would need a wider content security policy
        return figure

    caption = (
        f"{title}: decoder layers upward, recorded steps to the right; the worst tensor of a layer"
        + (f", and of {math.ceil(len(log.steps) / MOST_COLUMNS)} neighbouring records" if _many(log) else "")
        + ". Blank: not there."
    )
    return plot(title, caption, draw)


def _many(log: TrainingLog) -> bool:
    return len(log.steps) > MOST_COLUMNS


def _image(values: Floats, layers: Sequence[list[int]]) -> Floats:
    """The largest of each layer's tensors and of neighbouring records, float64 [layers, columns]."""
    parts = np.array_split(np.arange(len(values)), min(len(values), MOST_COLUMNS))
    return np.array([[_largest(values[part][:, tensors]) for part in parts] for tensors in layers])


def _names(log: TrainingLog, kind: Kind) -> list[str]:
    """The number of each layer; every so many of them where there are many."""
    layers = list(layers_of(log, kind))
    every = math.ceil(len(layers) / 12)
    return [
        ("other" if layer is None else str(layer)) if place % every == 0 else "" for place, layer in enumerate(layers)
    ]


def write_training_page(log: TrainingLog, checkup: TrainingCheckup) -> Path:
    """Write `training.html` into the folder of the log; return its path."""
    page = page_template("training.html.j2").render(
        log=log,
        found=checkup,
        ran=ran(checkup),
        sentence=sentence(checkup),
        checks=check_table(checkup.checks, ran(checkup)),
        remedies=advice(checkup.checks),
        depth=training_depth_table(log, checkup.gradients),
        plots=training_plots(log, checkup.gradients),
    )
    path = log.path.with_suffix(".html")
    with replacing(path) as partial:
        partial.write_text(page, encoding="utf-8")
    return path


def advice(checks: Sequence[Check]) -> list[str]:
    """List what helps, the worst first: a line each, with the number of tensors that it is for."""
    tensors: dict[tuple[str, str], list[str]] = {}
    for check in checks:
        if check.remedy:
            tensors.setdefault((check.verdict, check.remedy), []).append(check.module or check.check)
    return [
        f"{verdict}: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {remedy}"
        for (verdict, remedy), names in tensors.items()
    ]


def ran(checkup: TrainingCheckup) -> str:
    """Name the recorded steps."""
    steps = (
        f"steps {checkup.first_step:,} to {checkup.last_step:,}"
        if checkup.records > 1
        else f"step {checkup.first_step:,}"
    )
    return f"{checkup.records:,} records, {steps}"


def sentence(checkup: TrainingCheckup) -> str:
    """The verdict in a sentence."""
    counts = {
        verdict: sum(check.verdict == verdict for check in checkup.checks) for verdict in ("bad", "watch", "unknown")
    }
    counted = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return f"Training in FP8, gradients in {checkup.gradients.upper()}: {checkup.verdict}" + (
        f" ({counted})" if counted else ""
    )
