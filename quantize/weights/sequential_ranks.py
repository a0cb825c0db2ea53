"""Round layer by layer in several ranks: each takes some of the batches through both models, and rounds some weights.

`InputSums` keeps batches of even and of odd number apart, since λ is fitted on one half and chosen on the other. So
one half of the ranks adds up the even batches and the rest the odd ones. In a half each rank goes on from the sums of
the one before it, as one process adds the batches one after the other: the sums, and the codes, are those of one
process bit for bit. A rank that is not the first of its half keeps what it has to add until then.

The sums of a pass then go to all ranks. The groups of a layer depend on each other, so the weights of one group are
shared out: each rank rounds some of them, and all get their codes, by which the quantized model goes on. Rank 0 keeps
them for the checkpoint, and the others until the layer has ended.

Experts are left out: tokens are routed otherwise in the two models, so that their sums are of all batches in one order.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from ...calibrate.ranks.shares import assigned, batch_numbers, half_ranks
from ...calibrate.ranks.world import FileChannel, World
from ...core.errors import InputError
from ...core.files import Strict
from ...options import ScaleGrid
from ..scales.decisions import TensorScale
from .channels import WeightMethod, WeightScaling
from .paired_inputs import InputSums
from .rounding_progress import Rounded


class SentScaling(Strict):
    """A `WeightScaling` that rank 0 sends to the others."""

    method: WeightMethod
    tensor_scales: dict[str, float]
    blocks: list[str]
    block_grid: ScaleGrid

    @classmethod
    def of(cls, scaling: WeightScaling) -> "SentScaling":
        """Describe `scaling`."""
        return cls(
            method=scaling.method,
            tensor_scales=dict(scaling.tensor_scales),
            blocks=sorted(scaling.blocks),
            block_grid=scaling.block_grid,
        )

    @property
    def scaling(self) -> WeightScaling:
        """The choice of scales."""
        return WeightScaling(self.method, self.tensor_scales, frozenset(self.blocks), self.block_grid)


class SequentialTask(Strict):
    """The rounding layer by layer that rank 0 tells the others to take part in, of windows in batches of `batch_size`.

    `activations`: see `SequentialRounding`; `key`: everything that the files in a rank's folder depend on, as JSON.
    """

    activations: dict[str, TensorScale | None]
    scaling: SentScaling
    batch_size: int
    key: str


class SharedRounding:
    """The part of one rank of `world` in rounding `count` batches layer by layer; a rank alone does everything."""

    def __init__(self, world: World, count: int):
        """Connect neighbours, a collective."""
        self.world = world
        self.halves = half_ranks(world.size)
        #: The numbers of the batches that this rank takes through the models.
        self.numbers = batch_numbers(world.rank, world.size, count)
        neighbours = [pair for members in self.halves for pair in pairwise(members)]
        self._between = dict(zip(neighbours, world.paired(neighbours), strict=True)) if neighbours else {}

    @property
    def alone(self) -> bool:
        """Tell whether one rank does everything."""
        return self.world.size == 1

    @property
    def waits(self) -> bool:
        """Tell whether another rank adds to this rank's sums before it."""
        return any(after == self.world.rank for _, after in self._between)

    def agreed(self, step: int) -> int:
        """The least of all ranks' `step`, a collective: a rank that was killed may have ended one less than another."""
        return min(int(document["step"]) for document in self.world.gathered({"step": step}))

    def bases(self, of_this_rank: Mapping[str, str]) -> dict[str, str]:
        """Return the bases of residuals that rank 0 has, a collective."""
        return dict(self.world.gathered({"bases": dict(of_this_rank)})[0]["bases"])

    def complete(self, sums: InputSums) -> None:
        """Give all ranks the sums of all batches, a collective.

        Raises InputError for sums of an input that the two models did not give the same tokens.
        """
        if self.alone:
            return
        if not sums.paired:
            raise InputError(
                sums.group.first,
                "gets other tokens in the quantized model than in the float one, whose sums ranks cannot share",
                "start one process, or use --weight-rounding gptq",
            )
        rank = self.world.rank
        for half, members in enumerate(self.halves):
            for before, after in pairwise(members):
                if rank in (before, after):
                    self._hand(sums, half, before, self._between[before, after])
                if rank == after:
                    sums.add_waiting(half)
        for half, members in enumerate(self.halves):
            self._hand(sums, half, members[-1], self.world.group)

    def _hand(self, sums: InputSums, half: int, source: int, group: object) -> None:
        """Give the rank `source`'s sums of one half to the others of `group`."""
        of_half = sums.halves[half]
        for tensor in (of_half.moments, of_half.lost):
            values = tensor.cpu()  # the tensor itself, where it is there
            self.world.broadcast(values, source, group)
            if source != self.world.rank:
                tensor.copy_(values)

    def own(self, weights: Mapping[str, torch.Tensor]) -> list[str]:
        """The modules, of those of a group with their `weights`, that this rank rounds."""
        return assigned({name: weight.numel() for name, weight in weights.items()}, self.world.size)[self.world.rank]

    def end_layer(self, rounded: Rounded) -> None:
        """Let go of the codes of a layer that has ended, on a rank that writes no checkpoint."""
        if self.world.rank:
            rounded.clear()

    def exchange(self, rounded: Rounded, names: Sequence[str]) -> None:
        """Give all ranks the codes of the modules that each has rounded, this one `names`; a collective."""
        if self.alone:
            return
        for rank in range(self.world.size):
            channel = FileChannel(self.world, self.world.group, rank)
            if rank == self.world.rank:
                channel.send(rounded.files_of(names))
            else:
                channel.receive(rounded.folder)
