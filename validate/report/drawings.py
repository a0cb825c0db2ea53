"""Choose the plots of a report: those that show something. Of a flat one a sentence says that nothing is to see."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...calibrate.measure.statistics import load_statistics
from ...core.columns import decibels, nats, share
from ...core.run import Run
from ..accuracy.document import load_divergences, load_token_losses
from ..sensitivity.document import Loss, load_sensitivity
from ..tuning.document import load_tuning
from . import loss_plots, plots
from .accuracy_rows import accuracy_rows
from .curves import error_shares, rounding_alone_db
from .loss_buckets import PositionRow, is_flat, position_rows
from .loss_plots import learned_weights, learning_plot
from .plots import Plot
from .rows import ModuleRow, module_rows, wrote

#: The decibels that layers differ by where none stands out, and that lie below what rounding alone leaves.
ALIKE_DB, BELOW_DB = 2.0, 3.0
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
    return load_sensitivity(run).modules if wrote(run, run.sensitivity, "sensitivity") else []


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
    if loss_plots.by_layer(located := losses_by_tensor(run)):
        drawn.plots["loss"] = loss_plots.loss_plot(located)
    if wrote(run, run.tuning, "tune"):
        drawn.plots["frontier"] = loss_plots.frontier_plot(load_tuning(run))
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
    rows, kl = position_rows(run), load_divergences(run)
    if rows and is_flat(rows):
        drawn.remarks["positions"] = _flat(rows)
        return
    if kl:
        drawn.plots["divergence"] = loss_plots.divergence_plot(kl)
    sampled = {row.runtime for row in accuracy_rows(run) if row.tokens is not None}
    nll = {name: values for name, values in load_token_losses(run).items() if name not in sampled}
    drawn.plots["positions"] = plots.position_plot(nll)


def _flat(rows: Sequence[PositionRow]) -> str:
    first, last = rows[0], rows[-1]
    ends = ", ".join(
        f"{nats(first.divergences[name])} and {nats(last.divergences[name])} nats ({name})"
        for name in last.divergences
        if name in first.divergences
    )
    detail = f": at the window’s beginning and its end it is {ends}" if ends else ""
    return f"The divergence from BF16 does not rise along the window{detail}. No error builds up in the cache."
