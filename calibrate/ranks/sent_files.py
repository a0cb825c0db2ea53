"""Send files from one rank to another: ranks need not share a disk."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .world import World

#: Bytes of a message.
MESSAGE_BYTES = 1 << 28


class FileChannel:
    """The connection of two ranks of `world`, whose process `group` it is: either sends files, and the other writes
    them.
    """

    def __init__(self, world: World, group: Any, other: int):
        """Connect this rank with the `other`."""
        self.world = world
        self.group = group
        self.other = other

    def send(self, files: Sequence[Path]) -> None:
        """Send `files`, none of them empty, which `receive` of the other rank writes under their names."""
        header = json.dumps({file.name: file.stat().st_size for file in files}).encode()
        self._send(torch.tensor([len(header)]))
        self._send(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for file in files:
            self._send(torch.from_numpy(np.memmap(file, np.uint8, "c")))

    def receive(self, folder: Path) -> None:
        """Write the files that the other rank sends into `folder`, which exists."""
        size = self._received(torch.empty(1, dtype=torch.int64))
        header = self._received(torch.empty(int(size), dtype=torch.uint8))
        sizes: dict[str, Any] = json.loads(header.numpy().tobytes())
        for name, bytes_of_file in sizes.items():
            file = np.memmap(folder / name, np.uint8, "w+", shape=(int(bytes_of_file),))
            self._received(torch.from_numpy(file))
            file.flush()

    def _send(self, values: torch.Tensor) -> None:
        for part in values.split(MESSAGE_BYTES):
            self.world.broadcast(part, self.world.rank, self.group)

    def _received(self, values: torch.Tensor) -> torch.Tensor:
        for part in values.split(MESSAGE_BYTES):
            self.world.broadcast(part, self.other, self.group)
        return values
