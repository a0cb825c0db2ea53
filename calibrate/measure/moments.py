"""The input's second moments Σ x xᵀ over all tokens, which GPTQ needs; measured only on request.

One FP32 matrix [width, width] for each distinct tensor is more than the weights themselves: 33 GB for a Llama of 8 B
parameters. So they are summed in files that are mapped into memory, and the operating system decides what stays there.
They are `.npy` files without pickles, `moments/<first module of the group>.npy`. Unlike the histograms they are sums of
rounded products: the same batches in the same order give the same bytes on the same machine and number of threads;
another order gives other last bits.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from ...core.files import reading, replacing
from ...core.run import Run


@contextmanager
def gathering(run: Run, wanted: bool, folder: Path | None = None) -> "Iterator[SecondMoments | None]":
    """Open the store in which a stage of `run` adds up second moments, None unless they are `wanted`; `run.moments`
    holds them when the block ends well, and no older ones.

    `folder`: where they are added up when a killed stage is to go on from it; it stays, and shares its files with
    `run.moments`.
    """
    shutil.rmtree(run.moments, ignore_errors=True)
    if not wanted:
        yield None
        return
    with replacing(run.moments) as partial:
        moments = SecondMoments(folder or partial)
        yield moments
        moments.close()
        if folder is not None:
            shutil.copytree(folder, partial, copy_function=os.link)


class SecondMoments:
    """Adds up x xᵀ of the tensors it is shown, in files of one folder."""

    def __init__(self, folder: Path):
        """Write into `folder`, which is made."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, np.memmap[tuple[int, int], np.dtype[np.float32]]] = {}

    def add(self, name: str, x: torch.Tensor) -> None:
        """Add the tokens `x` [..., width], any float type, to the moments `name`; the first ones since `close` begin
        anew.
        """
        tokens = x.detach().flatten(0, -2).float()
        if name not in self._files:
            self._files[name] = new_matrix(moments_file(self.folder, name), tokens.shape[1])
        add_product(torch.from_numpy(self._files[name]), tokens, tokens)

    def close(self) -> list[str]:
        """Write the sums to disk and close the files; return their names."""
        names = list(self._files)
        for file in self._files.values():
            file.flush()
        self._files.clear()
        return names


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add Σ left rightᵀ over all tokens, of `left` [tokens, in] and `right` [tokens, out], to `total` float32 [in, out]
    in memory; tokens on the CPU take no further matrix.
    """
    if left.device.type == "cpu":
        total.addmm_(left.T, right)
    else:
        total.add_((left.T @ right).cpu())


def moments_file(folder: Path, name: str) -> Path:
    """Return the file that keeps the second moments of the group whose first module is `name`."""
    return folder / f"{name}.npy"


def new_matrix(path: Path, width: int) -> "np.memmap[tuple[int, int], np.dtype[np.float32]]":
    """Zeros [width, width] in a new file, mapped; its space is taken at once, for a full disk can only kill whoever
    writes to a mapped page.
    """
    matrix: np.memmap[tuple[int, int], np.dtype[np.float32]] = np.lib.format.open_memmap(
        path, "w+", np.float32, (width, width)
    )
    with open(path, "rb+") as handle:
        os.posix_fallocate(handle.fileno(), 0, path.stat().st_size)
    return matrix


def load_moments(folder: Path, name: str) -> torch.Tensor:
    """The moments `name`, float32 [width, width], in memory."""
    path = moments_file(folder, name)
    with reading(path, "second moments"):
        return torch.from_numpy(np.load(path, allow_pickle=False))
