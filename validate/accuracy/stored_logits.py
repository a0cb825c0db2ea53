"""Logits on disk, for the runtimes that others are compared with.

With a vocabulary of 128,000 a token's logits take a quarter of a megabyte in BF16, so those of a text do not fit into
memory. They are written in the type that they were computed in, and read a few rows at a time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...core.files import replacing

if TYPE_CHECKING:
    import torch

#: What the name of such a file ends in, behind the type of its rows.
SUFFIX = ".logits"
#: Takes rows [rows, vocabulary] as they come.
Writer = Callable[["torch.Tensor"], None]


class StoredLogits:
    """The logits of one runtime in `folder`: rows of `name`, in the order they were written."""

    def __init__(self, folder: Path, name: str, rows: int):
        """Find the file of `rows` rows that was written there, if any."""
        self._folder, self._name, self._rows = folder, name, rows

    @property
    def _path(self) -> Path | None:
        return next(iter(self._folder.glob(f"{self._name}.*{SUFFIX}")), None)

    def exists(self) -> bool:
        """Tell whether all rows are there."""
        return self._path is not None

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        """Write the rows; they are there when the block has ended well."""
        import torch

        types = set[torch.dtype]()
        with replacing(self._folder / f"{self._name}{SUFFIX}") as partial, open(partial, "wb") as handle:

            def write(rows: "torch.Tensor") -> None:
                types.add(rows.dtype)
                rows.cpu().contiguous().view(torch.uint8).numpy().tofile(handle)

            yield write
        (dtype,) = types
        (self._folder / f"{self._name}{SUFFIX}").rename(
            self._folder / f"{self._name}.{str(dtype).removeprefix('torch.')}{SUFFIX}"
        )

    def read(self, start: int, stop: int) -> "torch.Tensor":
        """Rows `start` to `stop` [rows, vocabulary], in their own type."""
        import torch

        path = self._path
        assert path is not None, f"{self._name}: its logits were not written"
        dtype = getattr(torch, path.name.removesuffix(SUFFIX).rpartition(".")[2])
        row = path.stat().st_size // self._rows
        data = np.fromfile(path, np.uint8, (stop - start) * row, offset=start * row)
        return torch.from_numpy(data).view(dtype).view(stop - start, -1)

    def remove(self) -> None:
        """Give the disk back."""
        if path := self._path:
            path.unlink()
