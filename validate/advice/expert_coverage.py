"""Show which experts of a mixture saw the calibration text: a row for each layer, with the experts that saw least."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ...calibrate.measure.statistics import Statistics, coverage
from ...core.columns import Column, Table, count, text_column
from ...quantize.scales.decisions import Scales
from ...quantize.scales.expert_scales import BORROWED

#: Experts of a layer that are named.
NAMED = 4
SHOWN_ALL = "Every expert was shown every token (--all-experts), whichever it was routed to."


@dataclass(frozen=True)
class ExpertRow:
    """The experts of a layer, by number: the tokens that each saw, and the experts that take another's amax."""

    experts: str
    tokens: tuple[int, ...]
    borrowed: tuple[int, ...]

    @property
    def least(self) -> str:
        """The experts that saw the fewest tokens, the fewest first."""
        order = sorted(range(len(self.tokens)), key=lambda number: self.tokens[number])
        return ", ".join(f"{number} ({self.tokens[number]:,})" for number in order[:NAMED])


def expert_rows(statistics: Statistics, scales: Scales) -> list[ExpertRow]:
    """A row for each layer that has experts, in order."""
    methods = {module: scale.method for module, scale in scales.activations.items()}
    return [
        ExpertRow(
            layer.experts,
            layer.tokens,
            tuple(number for number, gemm in enumerate(layer.gemms) if methods.get(gemm, "").startswith(BORROWED)),
        )
        for layer in coverage(statistics)
    ]


def expert_table(rows: Sequence[ExpertRow], all_experts: bool) -> Table[ExpertRow]:
    """The tokens that experts saw; `all_experts`: whether they were shown others than those routed to them."""
    columns = (
        text_column("experts"),
        Column[ExpertRow]("how many", lambda row: len(row.tokens), count),
        Column[ExpertRow]("fewest tokens", lambda row: min(row.tokens), count),
        Column[ExpertRow]("median", lambda row: int(median(row.tokens)), count),
        Column[ExpertRow]("most", lambda row: max(row.tokens), count),
        text_column("seen least", "least"),
        Column[ExpertRow]("with another’s amax", lambda row: len(row.borrowed) or None, count),
    )
    note = SHOWN_ALL if all_experts else ""
    return Table("Tokens each expert saw", rows, columns, "None: the model is no mixture of experts.", note)
