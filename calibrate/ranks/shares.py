"""Divide work among ranks: batches whose sums are added in order, and pieces of known cost."""

from collections.abc import Mapping
from typing import TypeVar

Piece = TypeVar("Piece")


def assigned(costs: Mapping[Piece, int], ranks: int) -> list[list[Piece]]:
    """Assign each piece of work to one of so many `ranks`: the costliest first, to the rank with the least so far;
    among equals in their order.
    """
    shares: list[list[Piece]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for piece in sorted(costs, key=lambda piece: -costs[piece]):
        rank = sums.index(min(sums))
        shares[rank].append(piece)
        sums[rank] += costs[piece]
    return shares


def half_ranks(ranks: int) -> list[list[int]]:
    """The ranks that add up the batches of even number, and those that add up the batches of odd number, in the order
    in which they add; one rank alone adds both.
    """
    even = -(-ranks // 2)
    return [[*range(even)], [*range(even, ranks)] or [0]]


def batch_numbers(rank: int, ranks: int, count: int) -> list[int]:
    """The numbers, of `count` batches, of those that a rank adds up: neighbours in each half that it takes part in."""
    numbers: list[int] = []
    for half, members in enumerate(half_ranks(ranks)):
        if rank in members:
            place = members.index(rank)
            begin, end = (len(range(half, count, 2)) * turn // len(members) for turn in (place, place + 1))
            numbers += range(half, count, 2)[begin:end]
    return sorted(numbers)
