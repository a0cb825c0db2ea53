"""Second moments that several ranks add to one after the other, so that their bits are those of one process.

A sum of products in FP32 depends on the order of the batches. So ranks take neighbouring batches, and each goes on with
the sums of the rank before it: the last rank begins with the first batches, and rank 0 has the sums of all. A layer's
sums are handed on when it has run; while rank 0 runs a layer, rank 1 runs the next one, and so on. Nothing else waits.

A rank keeps what it handed on until the next rank has ended that layer. So ranks that were killed go on: each says at
which layer, and gets the sums of the layers before its own again.
"""

import shutil
from pathlib import Path
from typing import Any

from ...core.errors import InputError
from ..measure.moments import SecondMoments
from .world import FileChannel, World


class HandedMoments(SecondMoments):
    """The sums of one rank of `world`, which are those of all ranks where it is rank 0."""

    def __init__(self, world: World, folder: Path):
        """Add up in `folder`, which rank 0 has in the end as one process has it."""
        super().__init__(folder, first_apart=True)
        self.world = world
        self.root = folder
        self._pairs: list[Any] = []
        self._batches = 0
        self._step = 0
        self._next_wants = 0

    def resume(self, step: int, batches: int) -> None:
        """Say at which `step` this rank goes on, and hand on again what the next one lacks; a collective.

        Raises InputError where that is lost.
        """
        self._batches = batches
        self._pairs = self.world.paired([(rank, rank + 1) for rank in range(self.world.size - 1)])
        steps = [int(other["step"]) for other in self.world.gathered({"step": step})]
        if self.world.rank == 0:
            return
        self._next_wants = steps[self.world.rank - 1]
        for before in range(self._next_wants, step):
            if not self._of(before).is_dir():
                raise InputError(
                    self.world.members[self.world.rank]["name"],
                    "has no longer the second moments that another rank goes on from",
                    "run the same command again: it begins anew",
                )
            self._hand_on(self._of(before))

    def begin(self, step: int) -> None:
        """Go on with the sums of the rank before, once it has ended `step`."""
        self._step = step
        self._first.clear()
        if self.world.rank:
            self.folder = self._of(step)
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
        received = self.root.parent / "received"
        shutil.rmtree(received, ignore_errors=True)
        received.mkdir()
        if self.world.rank + 1 < self.world.size:
            behind = FileChannel(self.world, self._pairs[self.world.rank], self.world.rank + 1)
            behind.receive(received)
        self.go_on(received, self._batches)

    def close(self) -> list[str]:
        """End a step, and hand its sums on."""
        names = super().close()
        if self.world.rank and self._step >= self._next_wants:
            self._hand_on(self.folder)
            shutil.rmtree(self._of(self._step - 1), ignore_errors=True)  # the next rank has ended that step
        return names

    def _of(self, step: int) -> Path:
        return self.root / f"{step:05}"

    def _hand_on(self, folder: Path) -> None:
        """Send the files in `folder` to the rank before this one, in number."""
        before = FileChannel(self.world, self._pairs[self.world.rank - 1], self.world.rank - 1)
        before.send(sorted(folder.glob("*.npy")))
