"""Choose scales for starved experts: those that too few calibration tokens were routed to.

The input of an expert's last GEMM is measured on the tokens that were routed to the expert, and its amax converges
slowly. On a trained Mixtral 32 tokens find 0.69 of the amax in the median and 0.41 in the worst tenth; 512 tokens find
0.90 and 0.77 (`benchmarks/expert_tokens.py`). Too small a scale clips; too large a scale costs nothing until values
underflow, since E4M3's error is relative. So an expert that saw fewer than `--min-expert-tokens` takes the largest amax
of the experts in its layer. This is right for experts only, which are interchangeable parts of one layer: any other
module that was never observed stays in BF16.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...calibrate.measure.histogram import Histogram
from ...calibrate.measure.statistics import Coverage, Statistics, coverage

#: How the method of a scale begins that follows from the amax of other experts.
BORROWED = "amax of other experts"


@dataclass(frozen=True)
class Starved:
    """The last GEMM of a starved expert: the tokens that it saw, and the histogram that its scale follows from.

    `larger`: the histogram of the largest amax among this expert and the others of its layer, without NaN or infinity;
    None where there is none.
    """

    tokens: int
    larger: Histogram | None

    @property
    def method(self) -> str:
        """The method of the scale, as scales.json names it."""
        return f"{BORROWED} ({self.tokens:,} tokens)"


def starved(statistics: Statistics, least: int) -> dict[str, Starved]:
    """The last GEMMs of all experts that saw fewer than `least` tokens, by module."""
    gemms: dict[str, Starved] = {}
    for layer in coverage(statistics):
        enough = [gemm for gemm, tokens in _counted(layer) if tokens >= least]
        for gemm, tokens in _counted(layer):
            if tokens < least:
                others = [statistics.tensors[f"{name}.input"].histogram for name in enough or layer.gemms]
                expert_histogram = statistics.tensors[f"{gemm}.input"].histogram
                fit = [
                    histogram
                    for histogram in (*others, expert_histogram)
                    if histogram.amax > 0 and not histogram.nans + histogram.infinities
                ]
                gemms[gemm] = Starved(tokens, max(fit, key=lambda histogram: histogram.amax, default=None))
    return gemms


def _counted(layer: Coverage) -> Iterable[tuple[str, int]]:
    return zip(layer.gemms, layer.tokens, strict=True)


def starved_remarks(
    statistics: Statistics, few_tokens: Mapping[str, Starved], least: int, compensated: bool
) -> list[str]:
    """List notes on the starved experts, those that saw fewer than `least` tokens, layer by layer.

    `compensated`: other weights are rounded by their second moments, those of starved experts to nearest.
    """
    lines: list[str] = []
    for layer in coverage(statistics):
        few = [(number, few_tokens[name].tokens) for number, name in enumerate(layer.gemms) if name in few_tokens]
        if few:
            named = ", ".join(
                f"{number} ({tokens:,})" for number, tokens in sorted(few, key=lambda expert: expert[1])[:4]
            )
            lines.append(
                f"{layer.experts}: {len(few)} of {len(layer.gemms)} experts saw fewer than {least:,} tokens "
                f"({'expert' if len(few) == 1 else 'experts'} {named}{' …' if len(few) > 4 else ''})"
            )
    if not lines:
        return []
    more = f"; so in {len(lines) - 3} more layers" if len(lines) > 3 else ""
    taken = "their last GEMMs take the largest amax of the layer's other experts"
    rounded = " and their codes are each weight's nearest" if compensated else ""
    return [*lines[:3], f"{taken}{rounded}{more}; measure more --samples, or --all-experts"]
