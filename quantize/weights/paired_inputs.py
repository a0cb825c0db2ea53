"""Add up the inputs of products in two models, the float one and the quantized one, over passes of all batches: of one
input a pass, or of several that do not depend on one another.

Such are the last products of a layer's experts, whose inputs follow from what all experts share alone. With a pass for
each, a layer of 128 experts would be run 132 times where a dense one is run 5 times. The sums of a pass are held in
memory, `HELD_BYTES` at most where they are of more than one input.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from ...calibrate.measure.moments import add_product
from .ridge_target import MomentSums

#: The sums of one pass.
HELD_BYTES = 1 << 30
#: What a place gets, float32 [tokens, in], and what its product is added to.
InputAndResidual = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class GroupInput:
    """An input: of the group of `first`, decided as that of the first of `members`, those that are rounded; their
    product is added to what `base` gets (empty: to what the layer gets; None: to nothing that is known). `whole`:
    whether the loss of products is known, beside H; `sides`: the input channels, and the output channels of all.
    """

    first: str
    members: tuple[str, ...]
    base: str | None
    whole: bool
    sides: tuple[int, int]

    @property
    def held(self) -> int:
        """The bytes of its sums."""
        width, out = self.sides
        return 2 * 4 * width * (width + (out if self.whole else 0))


def passes(places: Iterable[GroupInput], apart: Collection[str]) -> Iterator[list[GroupInput]]:
    """`places` in order, as many together as a pass can gather: neighbours of `apart`, the products whose inputs do not
    depend on one another; all else alone.
    """
    together: list[GroupInput] = []
    for place in places:
        fits = sum(each.held for each in (*together, place)) <= HELD_BYTES
        if together and not (fits and are_independent(together, place, apart)):
            yield together
            together = []
        together.append(place)
    if together:
        yield together


def are_independent(together: Iterable[GroupInput], place: GroupInput, apart: Collection[str]) -> bool:
    """Tell whether no place's input depends on another's product: those of one mixture's experts."""
    every = [each.first for each in (*together, place)]
    return all(first in apart for first in every) and len({first.rpartition(".experts.")[0] for first in every}) == 1


class InputSums:
    """The sums of one place, over every other batch and over those between. `same`: whether the two models give it the
    same tokens: where they do not, only the moments of both halves together mean anything.
    """

    def __init__(self, place: GroupInput, read: Callable[[str], torch.Tensor]):
        """Of products whose weights [out, in] `read` gives by name."""
        self.place, self.read, self.same = place, read, place.whole
        width, out = place.sides
        out = out if place.whole else 0  # M of all experts of a layer is not held
        self.halves = MomentSums(width, out), MomentSums(width, out)

    @cached_property
    def rows(self) -> dict[str, torch.Tensor]:
        """The weights of the products, read when they are first asked for: of experts, after the pass."""
        return {name: self.read(name) for name in self.place.members}

    def add(
        self,
        half: int,
        exact: InputAndResidual | None,
        got: InputAndResidual | None,
        tokens: torch.Tensor | None,
        size: int,
    ) -> None:
        """Add a batch of `size` tokens: what the place gets `exact`ly and what it has `got`, `tokens` [tokens, in] as
        its product reads them; None where it was not reached.
        """
        if got is None or tokens is None:
            self.same = False
            return
        self.same = self.same and exact is not None and len(exact[0]) == len(tokens) == size
        if self.same and exact is not None:
            drift = exact[0] - tokens
            lost = torch.cat([drift @ weight.to(drift).T for weight in self.rows.values()], dim=1)
            self.halves[half].add(tokens, lost if self.place.base is None else lost + (exact[1] - got[1]))
        else:
            add_product(self.halves[0].moments, tokens, tokens)
