"""Experts that saw too little to have a scale of their own.

What goes into an expert's last product is seen by the tokens that were routed to it, and its amax settles slowly: on a
trained Mixtral a stretch of 32 tokens finds 0.69 of it in the median and 0.41 in the worst tenth, one of 512 0.90 and
0.77 (`benchmarks/expert_tokens.py`). A scale that is too small clips; one that is too large costs nothing until values
underflow, since E4M3's error is relative. So an expert below `--min-expert-tokens` takes the largest amax of its
layer's experts. That is right for experts alone, which are interchangeable parts of one layer: whatever else was never
observed stays in BF16.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...calibrate.measure.coverage import Coverage, coverage
from ...calibrate.measure.histogram import Histogram
from ...calibrate.measure.statistics import Statistics

#: How the method of a scale begins that is not of the expert's own amax.
BORROWED = "amax of other experts"


@dataclass(frozen=True)
class Starved:
    """Of an expert's last product, the tokens that it saw, and what has the largest amax of its layer's other experts,
    or is its own where that is larger; None where none of them saw anything finite.
    """

    tokens: int
    larger: Histogram | None

    @property
    def method(self) -> str:
        """The method by which its scale was chosen."""
        return f"{BORROWED} ({self.tokens:,} tokens)"


def starved(statistics: Statistics, least: int) -> dict[str, Starved]:
    """The last products of all experts that saw fewer than `least` tokens."""
    found: dict[str, Starved] = {}
    for layer in coverage(statistics):
        enough = [product for product, tokens in _counted(layer) if tokens >= least]
        for product, tokens in _counted(layer):
            if tokens < least:
                others = [statistics.tensors[f"{name}.input"].histogram for name in enough or layer.products]
                own = statistics.tensors[f"{product}.input"].histogram
                fit = [each for each in (*others, own) if each.amax > 0 and not each.nans + each.infinities]
                found[product] = Starved(tokens, max(fit, key=lambda each: each.amax, default=None))
    return found


def _counted(layer: Coverage) -> Iterable[tuple[str, int]]:
    return zip(layer.products, layer.tokens, strict=True)


def starved_remarks(statistics: Statistics, found: Mapping[str, Starved], least: int, compensated: bool) -> list[str]:
    """List the notes on experts that are `found` to have seen fewer than `least` tokens, layer by layer; `compensated`:
    whether other weights are rounded by what they get.
    """
    lines: list[str] = []
    for layer in coverage(statistics):
        few = [(number, found[name].tokens) for number, name in enumerate(layer.products) if name in found]
        if few:
            named = ", ".join(f"{number} ({tokens:,})" for number, tokens in sorted(few, key=lambda each: each[1])[:4])
            lines.append(
                f"{layer.experts}: {len(few)} of {len(layer.products)} experts saw fewer than {least:,} tokens "
                f"({'expert' if len(few) == 1 else 'experts'} {named}{' …' if len(few) > 4 else ''})"
            )
    if not lines:
        return []
    more = f"; so in {len(lines) - 3} more layers" if len(lines) > 3 else ""
    taken = "their last products take the largest amax of the layer's other experts"
    rounded = " and their codes are each weight's nearest" if compensated else ""
    return [*lines[:3], f"{taken}{rounded}{more}; measure more --samples, or --all-experts"]
