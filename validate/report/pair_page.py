"""`report.html` of two checkpoints: the decision, its causes, and the modules in which they differ, all in one file."""

from collections.abc import Callable, Sequence

from ...core.columns import Column, Table, count, increase, nats, number_column, share, text_column
from ..accuracy.decision import noise_floor
from ..accuracy.document import Accuracy, PositionBucket, RuntimeAccuracy
from ..pair.document import CANDIDATE, HiddenError, ModuleError, PairComparison
from .report import page_template

#: Modules in the table of the page and of the command line; comparison.json has all.
SHOWN = 40
SHOWN_IN_TERMINAL = 8
#: How the runtimes are called on the page.
NAMES = {"bf16": "original, BF16", "fp32": "original, FP32", CANDIDATE: "candidate"}

#: One side's row: its name among the runtimes, and its numbers.
Side = tuple[str, RuntimeAccuracy]


def pair_page(comparison: PairComparison) -> str:
    """Render the page, HTML."""
    accuracy = Accuracy(protocol=comparison.protocol, runtimes=comparison.runtimes)
    return page_template("pair.html.j2").render(
        comparison=comparison,
        kind=comparison.verdict.kind,
        numbers=side_table(comparison),
        modules=module_error_table(comparison.modules[:SHOWN]),
        hidden=hidden_error_table(comparison.hidden),
        positions=pair_position_table(comparison.runtimes[CANDIDATE].by_position or []),
        floor=noise_floor(accuracy),
        more=max(0, len(comparison.modules) - SHOWN),
    )


def side_table(comparison: PairComparison) -> Table[Side]:
    """A row for each side: perplexity, its increase, KL both ways and flips."""

    def mean_kl(direction: str) -> Callable[[Side], float | None]:
        def mean(side: Side) -> float | None:
            divergence = (side[1].divergences or {}).get(direction)
            return divergence.mean if divergence else None

        return mean

    def flips(side: Side) -> float | None:
        agreement = side[1].top1_agreement
        return None if agreement is None else 1 - agreement

    columns = (
        Column[Side]("model", lambda side: NAMES.get(side[0], side[0]), numeric=False),
        Column[Side]("perplexity", lambda side: side[1].perplexity, "{:.4f}".format),
        Column[Side]("increase", lambda side: side[1].perplexity_increase, increase),
        Column[Side]("KL(BF16 ‖ this)", mean_kl("bf16||this"), nats),
        Column[Side]("KL(this ‖ BF16)", mean_kl("this||bf16"), nats),
        Column[Side]("KL, 99th percentile", lambda side: side[1].kl_p99_nats, nats),
        Column[Side]("other likeliest token", flips, share),
    )
    protocol = comparison.protocol.description
    kl = comparison.kl_nats
    other = comparison.flips
    note = (
        f"{protocol[0].upper()}{protocol[1:]}. 95 % intervals of the candidate over windows: KL "
        f"{nats(kl.low)} to {nats(kl.high)} nats, other likeliest tokens {share(other.low)} to {share(other.high)}. "
        "KL in nats a token."
    )
    return Table("Numbers", [*comparison.runtimes.items()], columns, "Nothing was measured.", note)


def module_error_table(modules: Sequence[ModuleError]) -> Table[ModuleError]:
    """The output errors of modules, worst first."""
    columns = (
        text_column("module"),
        number_column("output error", share, "error"),
        number_column("gain", lambda value: f"{value:.4f}", "gain"),
        number_column("correlation", lambda value: f"{value:.5f}", "correlation"),
    )
    note = (
        "Each module of the candidate ran on the inputs of the original’s. Error: root of the squared differences over "
        "the squared outputs; empty where it is not finite. Gain: 1 where outputs are of the same size. Rounding to "
        "E4M3 on both sides of a GEMM gives an error of about 4 %, of weights alone about 3 %."
    )
    return Table("Modules", modules, columns, "Modules were not compared (`--module-windows`).", note)


def hidden_error_table(hidden: Sequence[HiddenError]) -> Table[HiddenError]:
    """The distance of hidden states by depth."""
    columns = (
        Column[HiddenError]("after layer", lambda row: row.layer, count),
        number_column("error", share, "error"),
    )
    note = "Each model ran by itself, so errors of earlier layers are in those of later ones. 0: the embedding."
    return Table("Hidden states", hidden, columns, "Hidden states were not compared (`--module-windows`).", note)


def pair_position_table(buckets: Sequence[PositionBucket]) -> Table[PositionBucket]:
    """The candidate's loss and divergence by position in a window."""
    columns = (
        Column[PositionBucket]("positions", lambda row: f"{row.first:,} to {row.last:,}", numeric=False),
        number_column("tokens", count),
        number_column("loss over BF16, nats", nats, "nll_increase_nats"),
        number_column("KL, nats", nats, "kl_mean_nats"),
    )
    return Table("By position", buckets, columns, "Nothing was measured.")
