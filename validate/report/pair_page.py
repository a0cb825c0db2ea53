"""`report.html` of two checkpoints: the decision, its causes, and the modules in which they differ, all in one file."""

from collections.abc import Callable, Sequence

from ...core.columns import Column, Table, count, increase, nats, number_column, share, text_column
from ..accuracy.decision import noise_floor
from ..accuracy.document import Accuracy, PositionBucket
from ..pair.document import CANDIDATE, HiddenError, ModuleError, PairComparison
from .report import page_template

#: Modules in the table of the page and of the command line; comparison.json has all.
SHOWN, SHOWN_IN_TERMINAL = 40, 8
#: How the runtimes are called on the page.
NAMES = {"bf16": "original, BF16", "fp32": "original, FP32", CANDIDATE: "candidate"}

#: Fields of a side's row: the title of the column, and how a value is written.
FIELDS: dict[str, tuple[str, Callable[[float], str]]] = {
    "perplexity": ("perplexity", "{:.4f}".format),
    "perplexity_increase": ("increase", increase),
    "kl_p99_nats": ("KL, 99th percentile", nats),
}


def pair_page(found: PairComparison) -> str:
    """Render the page, HTML."""
    accuracy = Accuracy(protocol=found.protocol, runtimes=found.runtimes)
    return page_template("pair.html.j2").render(
        found=found,
        kind=found.verdict.kind if found.passes or found.verdict.kind != "acceptable" else "worse",
        numbers=side_table(found),
        modules=module_error_table(found.modules[:SHOWN]),
        hidden=hidden_error_table(found.hidden),
        positions=pair_position_table(found.runtimes[CANDIDATE].by_position or []),
        floor=noise_floor(accuracy),
        more=max(0, len(found.modules) - SHOWN),
    )


def side_table(found: PairComparison) -> Table[tuple[str, object]]:
    """A row for each side: perplexity, its increase, KL both ways and flips."""

    def value(field: str) -> Column[tuple[str, object]]:
        title, write = FIELDS[field]
        return Column(title, lambda row: getattr(row[1], field), write)

    def divergence(title: str, direction: str) -> Column[tuple[str, object]]:
        def mean(row: tuple[str, object]) -> float | None:
            known = getattr(row[1], "divergences", None) or {}
            return known[direction].mean if direction in known else None

        return Column(title, mean, nats)

    def flips(row: tuple[str, object]) -> float | None:
        agreement = getattr(row[1], "top1_agreement", None)
        return None if agreement is None else 1 - agreement

    columns = (
        Column[tuple[str, object]]("model", lambda row: NAMES.get(row[0], row[0]), numeric=False),
        value("perplexity"),
        value("perplexity_increase"),
        divergence("KL(BF16 ‖ this)", "bf16||this"),
        divergence("KL(this ‖ BF16)", "this||bf16"),
        value("kl_p99_nats"),
        Column[tuple[str, object]]("other likeliest token", flips, share),
    )
    kl, other = found.kl_nats, found.flips
    note = (
        f"{found.protocol.told[0].upper()}{found.protocol.told[1:]}. 95 % intervals of the candidate over windows: KL "
        f"{nats(kl.low)} to {nats(kl.high)} nats, other likeliest tokens {share(other.low)} to {share(other.high)}. "
        "KL in nats a token."
    )
    return Table("Numbers", [*found.runtimes.items()], columns, "Nothing was measured.", note)


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
