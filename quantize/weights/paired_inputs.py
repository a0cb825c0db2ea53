"""Add up the second moments of GEMMs' inputs in two models, the float one and the quantized one.

Each pass runs all batches through a layer of both models. A pass serves one input, or several that do not depend on one
another: the inputs of the last GEMMs of a layer's experts, which follow from the input that all experts share. With
a pass for each, a layer of 128 experts would be run 132 times where a dense one is run 5 times. The sums of a pass are
held in memory: `HELD_BYTES` at most where they are of more than one input.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from ...calibrate.measure.held_out import HeldOutTokens, expert_number, input_name
from ...calibrate.measure.moments import add_matmul
from .ridge_target import MomentSums

#: Bytes that the sums of one pass may take where they are of several inputs.
HELD_BYTES = 1 << 30
#: The input of a GEMM, float32 [tokens, in], and the residual that the GEMM is added to, float32 [tokens, out].
InputAndResidual = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class GroupInput:
    """The input that a group of GEMMs reads.

    `first`: the group's first module, by which the group is called. `members`: the modules of the group that are
    rounded; the activation scale of the first of them quantizes the input. `base`: the module whose input is the
    residual that the GEMM is added to; empty where that is the input of the layer, None where no residual is known.
    `paired`: both models give the group the same tokens, so that the loss of its GEMMs (M of `ridge_target`) is
    added up beside H. `sides`: the number of input channels, and of output channels of all members together.
    """

    first: str
    members: tuple[str, ...]
    base: str | None
    paired: bool
    sides: tuple[int, int]

    @property
    def sum_bytes(self) -> int:
        """The bytes that the sums of this input take."""
        width, out = self.sides
        return 2 * 4 * width * (width + (out if self.paired else 0))


def passes(inputs: Iterable[GroupInput], independent: Collection[str]) -> Iterator[list[GroupInput]]:
    """Split `inputs`, in their order, into lists that share a pass.

    Only neighbours whose GEMMs are `independent`, and whose sums fit into `HELD_BYTES`, share one.
    """
    together: list[GroupInput] = []
    for group in inputs:
        fits = sum(member.sum_bytes for member in (*together, group)) <= HELD_BYTES
        if together and not (fits and are_independent(together, group, independent)):
            yield together
            together = []
        together.append(group)
    if together:
        yield together


def are_independent(together: Iterable[GroupInput], group: GroupInput, independent: Collection[str]) -> bool:
    """Tell whether no input depends on the GEMM of another: all are inputs of the experts of one mixture."""
    every = [member.first for member in (*together, group)]
    of_experts = all(first in independent for first in every)
    return of_experts and len({first.rpartition(".experts.")[0] for first in every}) == 1


class InputSums:
    """The sums of one input: over the batches of even index, and over those of odd index.

    `paired`: whether both models gave the input the same tokens in every batch. Where they did not, only the moments of
    both halves together are meaningful.
    """

    def __init__(
        self,
        group: GroupInput,
        read: Callable[[str], torch.Tensor],
        device: str = "cpu",
        batches: int = 1,
        waits: bool = False,
    ):
        """Begin with zeros on `device`, where the batches are; `read` gives the weight [out, in] of a module by its
        name, where the model has it. `batches`: how many there are, some of them held out where the group is of
        experts. `waits`: another rank adds its batches first, so that those of this one are kept until
        `add_waiting`.
        """
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] | None = [] if waits else None
        self.held_out = HeldOutTokens(batches)
        self.group = group
        self.read = read
        self.paired = group.paired
        self._device = device
        width, out = group.sides
        out = out if group.paired else 0  # M of all experts of a layer is not held
        self.halves = MomentSums(width, out, device), MomentSums(width, out, device)

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights of the GEMMs where the batches are, and where they are rounded: read once a pass."""
        return {name: self.read(name).to(self._device) for name in self.group.members}

    def add(
        self,
        half: int,
        float_input: InputAndResidual | None,
        quantized_input: InputAndResidual | None,
        tokens: torch.Tensor | None,
        size: int,
    ) -> None:
        """Add a batch of `size` tokens to one half.

        `float_input`, `quantized_input`: input and residual in either model, None where no token reached the input.
        `tokens` float32 [tokens, in]: the quantized model's input after quantization, as its GEMM multiplies it.
        """
        if quantized_input is None or tokens is None:
            self.paired = False
            return
        self.paired = self.paired and float_input is not None and len(float_input[0]) == len(tokens) == size
        if self.paired and float_input is not None:
            drift = float_input[0] - tokens
            lost = torch.cat([drift @ weight.to(drift).T for weight in self.weights.values()], dim=1)
            residual_lost = None if self.group.base is None else float_input[1] - quantized_input[1]
            lost = lost if residual_lost is None else lost + residual_lost
            if self._waiting is None:
                self.halves[half].add(tokens, lost)
            else:
                self._waiting.append((tokens, lost))
        else:
            add_matmul(self.halves[0].moments, tokens, tokens)

    def add_waiting(self, half: int) -> None:
        """Add the batches that were kept to one half, which has those of the ranks before this one."""
        while self._waiting:
            self.halves[half].add(*self._waiting.pop(0))

    def hold_out(self, tokens: torch.Tensor | None, chosen: torch.Tensor | None, batch: int) -> None:
        """Keep some tokens of each expert from the held-out `batch`.

        `tokens` float32 [tokens, in]: of the input, None where no token reached it; `chosen` int64 [tokens, chosen]:
        the experts of each token, where all experts of the layer share the input.
        """
        if tokens is None:
            return
        for name in {input_name(member) for member in self.group.members}:
            routed = tokens if chosen is None else tokens[(chosen == expert_number(name)).any(1)]
            self.held_out.add(name, routed, batch)
