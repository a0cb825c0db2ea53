"""Count the tokens that each expert of a mixture saw, from existing statistics: the histogram of the input of an
expert's last product has one value for each token and channel.
"""

from dataclasses import dataclass

from .statistics import Statistics


@dataclass(frozen=True)
class Coverage:
    """The experts of one layer: their module, the last product of each, and the tokens that each got."""

    experts: str
    products: tuple[str, ...]
    tokens: tuple[int, ...]


def coverage(statistics: Statistics) -> list[Coverage]:
    """The coverage of each layer that has experts, in order; none for statistics of a version without experts."""
    return [
        Coverage(experts, tuple(products), tuple(tokens_of(statistics, product) for product in products))
        for experts, products in (statistics.record.experts or {}).items()
    ]


def tokens_of(statistics: Statistics, product: str) -> int:
    """The number of tokens that reached `product`, whose input no other module reads."""
    tensor = statistics.tensors.get(f"{product}.input")
    return tensor.histogram.samples // len(tensor.amax_channels) if tensor else 0
