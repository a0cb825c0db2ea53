"""Store the hidden states that enter or leave a decoder layer, of all batches, in a file that is mapped to memory; and
the arguments of layers for a row with images, in a file of its own.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ..model.copies import Copies
from ..model.decoder import LayerCall, LayerOutput

#: What the places of tensors in a file are multiples of, as views of the largest type need it.
ALIGNED = 16
Batches = Mapping[int, npt.NDArray[np.int64]]


def states_bytes(batches: Batches, output: LayerOutput) -> int:
    """The bytes of the hidden states of all batches at one place."""
    return sum(ids.size for ids in batches.values()) * output.width * output.dtype.itemsize


def mapped_calls(calls: Sequence[LayerCall], path: Path) -> list[LayerCall]:
    """Write the tensors of `calls`, each once, to the file at `path`, and map them to memory from there, whose pages
    can leave it.
    """
    tensors: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.setdefault(id(tensor), tensor)
        return tensor

    for call in calls:
        call.with_tensors(note)
    ends = np.cumsum([-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors.values()] or [0])
    with open(path, "wb") as handle:
        os.posix_fallocate(handle.fileno(), 0, max(int(ends[-1]), 1))
    stored = torch.from_numpy(np.memmap(path, np.uint8, "r+"))
    mapped: dict[int, torch.Tensor] = {}
    for (key, tensor), end in zip(tensors.items(), ends.tolist(), strict=False):
        start = end - -(-tensor.nbytes // ALIGNED) * ALIGNED
        mapped[key] = stored[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        mapped[key].copy_(tensor)
    return [call.with_tensors(lambda tensor: mapped[id(tensor)]) for call in calls]


def files_in_turn(folder: Path, name: str) -> list[Path]:
    """The files of the hidden states that enter a layer of the model `name` and that leave it, in turn."""
    return [folder / f"{name}-{parity}" for parity in range(2)]


class HiddenStates:
    """The hidden states of all batches, one after the other, in a memory-mapped file, whose pages can leave memory."""

    def __init__(self, path: Path, batches: Batches, output: LayerOutput):
        """Map the file at `path`, or create it if it is missing or of another size.

        Its disk space is allocated at once: a write to a mapped page cannot report a full disk.
        """
        self.path = path
        self.dtype = output.dtype
        self.shapes = {batch: (*ids.shape, output.width) for batch, ids in batches.items()}
        self.starts = dict(zip(batches, np.cumsum([0, *self._sizes()]).tolist()))
        with open(path, "ab+") as handle:
            os.posix_fallocate(handle.fileno(), 0, sum(self._sizes()))
        self.bytes = np.memmap(path, np.uint8, "r+", shape=(sum(self._sizes()),))

    def _sizes(self) -> list[int]:
        return [int(np.prod(shape)) * self.dtype.itemsize for shape in self.shapes.values()]

    def _mapped(self, batch: int) -> torch.Tensor:
        shape = self.shapes[batch]
        start = self.starts[batch]
        values = self.bytes[start : start + int(np.prod(shape)) * self.dtype.itemsize]
        return torch.from_numpy(values).view(self.dtype).view(shape)

    def read(self, batch: int, device: str) -> torch.Tensor:
        """Copy the hidden states [windows, seq_len, width] of one batch to `device`."""
        return self._mapped(batch).to(device, copy=True)

    def write(self, batch: int, hidden: torch.Tensor) -> None:
        """Store the hidden states of one batch."""
        assert (tuple(hidden.shape), hidden.dtype) == (self.shapes[batch], self.dtype), "a chain keeps shape and type"
        self._mapped(batch).copy_(hidden)

    def on_device(self, copies: Copies) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each batch and its hidden states [windows, seq_len, width] on the device of `copies`.

        Where these run ahead, the hidden states of the next batch are on their way meanwhile.
        """
        batches = list(self.shapes)
        coming = copies.to_device(partial(self._mapped, batches[0]))
        for batch, following in zip_longest(batches, batches[1:]):
            hidden = coming()
            if following is not None:
                coming = copies.to_device(partial(self._mapped, following))
            yield batch, hidden

    @contextmanager
    def writing(self, copies: Copies) -> Iterator[Callable[[int, torch.Tensor], None]]:
        """Yield a function that begins to store the hidden states of a batch; all are stored when the block ends.

        It waits for those of the batch before, so that the host queues work for two batches at most.
        """
        before: list[Callable[[], None]] = []

        def write(batch: int, hidden: torch.Tensor) -> None:
            while before:
                before.pop()()
            before.append(copies.to_memory(hidden, partial(self.write, batch)))

        yield write
        while before:
            before.pop()()

    def flush(self) -> None:
        """Write all of it to the disk.

        mmap's own flush would hold Python's lock meanwhile, and so stop the heartbeat of a rank.
        """
        with open(self.path, "rb+") as handle:
            os.fsync(handle.fileno())
