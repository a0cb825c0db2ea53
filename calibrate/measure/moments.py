"""The input's second moments Σ x xᵀ over all tokens, which GPTQ needs; measured only on request.

One FP32 matrix [width, width] for each distinct tensor is more than the weights themselves: 33 GB for a Llama of 8 B
parameters. So they are summed in files that are mapped into memory, large ones one at a time, and the operating system
decides what stays in its cache. They are `.npy` files without pickles, `moments/<first module of the group>.npy`.
Unlike the histograms they are sums of rounded products: the same batches in the same order give the same bytes on the
same machine and number of threads; another order gives other last bits.

The first token of each window, on which the attention of all others rests, is no part of these sums: its inputs are
stored beside them, in `moments/<first module>.first.npy`, and enter when the moments are loaded, as often as they are
asked to (`docs/decisions/0082`). Inputs that are no [windows, tokens, width], as those of experts, are summed whole.

On a GPU with room for them the sums over batches stay there, in FP32, and `close` copies each of them once: at the end
of a layer where the model is streamed. Copied after each batch, those of an 8B would be 32.7 GB a batch. A sum of n
batches is off by at most n · 2^-24 of Σ |x_i x_j|, 8e-6 for 128 batches; GPTQ adds 1e-2 of the mean diagonal. Inputs in
BF16 are multiplied there by the units for BF16, whose products are exact and are added up in FP32.

A model that is streamed needs the sums of one layer at a time, if its weights are rounded when the layer has run
(`SpentMoments`): then none are stored.
"""

import mmap
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from ...core.files import reading, replacing
from ...core.run import Run
from ..model.memory import has_room
from .held_out import HELD_OUT, HeldOutTokens, load_inputs, save_inputs
from .statistics import Statistics

#: What the names of files with the first tokens of windows end in.
FIRST = ".first.npy"
#: Rows of second moments that are added at a time.
ADDED_ROWS = 512
#: Sums of more bytes than these leave the process's memory once a batch is added, which takes a fifth longer.
MAPPED_BYTES = 1 << 30
#: The tokens of each channel that correlations are shrunk for, and the share that is taken off whatever the tokens are.
DIAGONAL_TOKENS = 3
LEAST_SHARE = 0.1
#: Both, as the keys of codes have them.
SHRINKAGE = (DIAGONAL_TOKENS, LEAST_SHARE)
#: The dimensions of inputs whose first tokens are known: [windows, tokens, width].
WINDOWS_OF_TOKENS = 3


@contextmanager
def gathering(
    run: Run, wanted: bool, folder: Path | None = None, store: "Callable[[Path], SecondMoments] | None" = None
) -> "Iterator[SecondMoments | None]":
    """Open the store of second moments for a stage of `run`, first tokens apart; yields None unless they are `wanted`.

    `folder`: add the sums up there, so that a killed stage can go on; the folder stays, and `run.moments` gets hard
    links to its files. Older moments are removed first, and `run.moments` appears when the block ends without an error.
    `store` makes the store in a folder, where that is no `SecondMoments` of one process.
    """
    shutil.rmtree(run.moments, ignore_errors=True)
    if not wanted:
        yield None
        return
    with replacing(run.moments) as partial:
        moments = (store or store_alone)(folder or partial)
        yield moments
        moments.close()
        if folder is not None:
            shutil.copytree(folder, partial, copy_function=os.link)


def store_alone(folder: Path) -> "SecondMoments":
    """The store of one process in `folder`, first tokens apart."""
    return SecondMoments(folder, first_apart=True)


class SecondMoments:
    """Add up x xᵀ of named tensors in files of one folder."""

    def __init__(self, folder: Path, going_on: Collection[str] = (), first_apart: bool = False):
        """Create `folder` and write into it; of the names `going_on` the sums there are added to. `first_apart`: store
        the first token of each window beside the sums.
        """
        self.folder = folder
        self._going_on = frozenset(going_on)
        self._first_apart = first_apart
        folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, np.memmap[tuple[int, int], np.dtype[np.float32]]] = {}
        self._on_gpu: dict[str, torch.Tensor] = {}
        self._first: dict[str, list[torch.Tensor]] = {}
        self._held_out: HeldOutTokens | None = None

    def hold_out(self, name: str, x: torch.Tensor, batch: int, batches: int) -> None:
        """Keep some tokens `x` [tokens, width] of the held-out `batch`, of so many `batches`, under `name`."""
        if self._held_out is None:
            self._held_out = HeldOutTokens(batches)
        self._held_out.add(name, x, batch)

    def add(self, name: str, x: torch.Tensor) -> None:
        """Add the tokens `x` [..., width], of any float type, to the moments `name`; first tokens that are stored apart
        are rounded to BF16, which they are where the model is.

        The first call for a name since `close` starts again from zero, unless it is to go on.
        """
        x = x.detach()
        if self._first_apart and x.dim() == WINDOWS_OF_TOKENS:
            self._first.setdefault(name, []).append(x[:, 0].to(torch.bfloat16, copy=True))
            x = x[:, 1:]
        tokens = x.flatten(0, -2)
        if not has_exact_units(tokens):
            tokens = tokens.float()
        if name not in self._files:
            self._open(name, tokens)
        if name in self._on_gpu:
            add_matmul(self._on_gpu[name], tokens, tokens)
        else:
            add_matmul(torch.from_numpy(self._files[name]), tokens, tokens)
            if self.bytes > MAPPED_BYTES:
                leave_to_cache(self._files[name])

    def _open(self, name: str, tokens: torch.Tensor) -> None:
        """Open the file of a tensor whose first `tokens` [tokens, width] have come, and hold its sums on their GPU if
        that has room.
        """
        path = moments_file(self.folder, name)
        again = name in self._going_on
        matrix = self._files[name] = np.load(path, mmap_mode="r+") if again else new_matrix(path, tokens.shape[1])
        if tokens.device.type != "cpu" and has_room(tokens.device, matrix.nbytes):
            held = torch.from_numpy(matrix).to(tokens.device) if again else None
            self._on_gpu[name] = torch.zeros(matrix.shape, device=tokens.device) if held is None else held

    @property
    def in_files(self) -> bool:
        """Tell whether any sums are added up in files, which then change with each batch."""
        return len(self._on_gpu) < len(self._files)

    @property
    def bytes(self) -> int:
        """The bytes of the sums."""
        return sum(file.nbytes for file in self._files.values())

    def copy(self, folder: Path) -> None:
        """Write sums and tokens to the new `folder`, and go on adding to them."""
        self.save()
        folder.mkdir()
        for name in self._files.keys() | self._going_on:
            shutil.copyfile(moments_file(self.folder, name), moments_file(folder, name))
        self._save_tokens(folder)

    def resume(self, step: int, batches: int) -> None:
        """Prepare to gather from `step` of a model that goes layer by layer on, for a text of so many `batches`."""

    def begin(self, step: int) -> None:
        """Prepare for the moments of `step`, which `end` ends."""

    def end(self, statistics: Statistics) -> None:
        """End a step of a model that goes layer by layer, whose tensors have these `statistics`."""
        self.close()

    def go_on(self, folder: Path, batches: int) -> None:
        """Go on with the sums and tokens that are in `folder`, of a text of so many `batches`; with nothing where it is
        not there.
        """
        sums = [file for file in sorted(folder.glob("*.npy")) if not file.name.endswith((FIRST, HELD_OUT))]
        for file in sums:
            shutil.copyfile(file, self.folder / file.name)
        self._going_on = frozenset(file.stem for file in sums)
        for file in sorted(folder.glob(f"*{FIRST}")):
            name = file.name.removesuffix(FIRST)
            tokens = load_inputs(file, "first tokens of windows")
            assert tokens is not None, "its file is there"
            self._first[name] = [tokens]
        self._held_out = HeldOutTokens(batches)
        self._held_out.load(folder)

    def save(self) -> None:
        """Write the sums to disk, and go on adding to them."""
        self._collect()
        for file in self._files.values():
            file.flush()

    def _collect(self) -> None:
        """Copy the sums that a GPU holds to their mapped files."""
        for name, total in self._on_gpu.items():
            torch.from_numpy(self._files[name]).copy_(total)

    def close(self) -> list[str]:
        """Write the sums and tokens to disk and close the files; return the names of the sums."""
        self.save()
        self._save_tokens(self.folder)
        names = list(self._files)
        self._files.clear()
        self._on_gpu.clear()
        self._first.clear()
        self._held_out = None
        return names

    def _save_tokens(self, folder: Path) -> None:
        for name, tokens in self._first.items():
            save_inputs(first_file(folder, name), torch.cat([part.to(tokens[-1].device) for part in tokens]))
        if self._held_out is not None:
            self._held_out.save(folder)


#: Rounds weights by the second moments in a folder, of tensors with these names, whose step has these statistics.
Spend = Callable[[Path, Sequence[str], Statistics], None]


class SpentMoments(SecondMoments):
    """The sums of one step at a time, which are spent when it ends and not stored.

    A step that a killed call was in begins anew, so nothing waits for the disk.
    """

    def __init__(self, folder: Path, spend: Spend):
        """Add up in `folder`, which is emptied, and `spend` what a step gave."""
        shutil.rmtree(folder, ignore_errors=True)
        super().__init__(folder, first_apart=True)
        self._spend = spend

    def save(self) -> None:
        """Make the sums readable in their files."""
        self._collect()

    def end(self, statistics: Statistics) -> None:
        """End a step: spend its sums and tokens, and remove them."""
        names = self.close()
        self._spend(self.folder, names, statistics)
        shutil.rmtree(self.folder)
        self.folder.mkdir()


def has_exact_units(x: torch.Tensor) -> bool:
    """Tell whether a GPU's units for 16-bit floats multiply `x`: their products are exact in FP32, in which they are
    added up, and the units for FP32 take some twelve times as long.
    """
    return x.device.type == "cuda" and x.dtype in (torch.bfloat16, torch.float16)


def add_matmul(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add Σ left rightᵀ over all tokens to `total`, float32 [in, out].

    `left` [tokens, in], `right` [tokens, out], both float32, or of 16 bits where `has_exact_units`. Tokens in float32
    on the device of `total` need no temporary matrix.
    """
    if has_exact_units(left):
        total.add_(torch.mm(left.T, right, out_dtype=torch.float32).to(total.device))
    elif left.device == total.device:
        total.addmm_(left.T, right)
    else:
        total.add_((left.T @ right).cpu())


def moments_file(folder: Path, name: str) -> Path:
    """Return the file of the second moments of the group whose first module is `name`."""
    return folder / f"{name}.npy"


def new_matrix(path: Path, width: int) -> "np.memmap[tuple[int, int], np.dtype[np.float32]]":
    """Create a file of zeros [width, width] and map it into memory.

    Its disk space is allocated at once: a disk that fills up later could only kill the process that writes to a mapped
    page.
    """
    matrix: np.memmap[tuple[int, int], np.dtype[np.float32]] = np.lib.format.open_memmap(
        path, "w+", np.float32, (width, width)
    )
    with open(path, "rb+") as handle:
        os.posix_fallocate(handle.fileno(), 0, path.stat().st_size)
    return matrix


def leave_to_cache(matrix: "np.memmap[tuple[int, int], np.dtype[np.float32]]") -> None:
    """Take the pages of a mapped `matrix` out of this process's memory; its numbers stay in the operating system's
    cache of files, which writes them to disk when it needs the room.
    """
    mapped = matrix.base
    assert isinstance(mapped, mmap.mmap), "a file that is mapped"
    mapped.madvise(mmap.MADV_DONTNEED)


def first_file(folder: Path, name: str) -> Path:
    """Return the file of the first tokens of windows of the group whose first module is `name`: their BF16 bits, int16
    [windows, width].
    """
    return folder / f"{name}{FIRST}"


def load_moments(folder: Path, name: str, first: float = 1.0, window: int | None = None) -> torch.Tensor:
    """Load the moments `name` into memory, float32 [width, width].

    Where the first tokens of windows were stored apart, they are added `first` times, after the sums of the others, so
    many to a `window` with it, were shrunk by their `chance_share`; other sums hold all tokens alike, and stay as they
    are. `window` None: nothing is shrunk.
    """
    path = moments_file(folder, name)
    with reading(path, "second moments"):
        moments = torch.from_numpy(np.load(path, allow_pickle=False))
    tokens = load_inputs(first_file(folder, name), "first tokens of windows")
    if tokens is not None:
        if window is not None:
            shrink(moments, chance_share((window - 1) * len(tokens), len(moments)))
        moments.addmm_(tokens.float().T, tokens.float(), alpha=first)
    return moments


def add_moments(folders: Sequence[Path], out: Path) -> None:
    """Write to the folder `out`, which exists, the sums of the second moments in `folders`, and their tokens one after
    the other, in this order.

    Sums are added in FP64 and rounded once, so that they do not depend on the order but for their last bits.
    """
    for name in sorted({path.name for folder in folders for path in folder.glob("*.npy")}):
        paths = [folder / name for folder in folders if (folder / name).is_file()]
        with reading(paths[0].parent, "second moments"):
            parts = [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths]
        if name.endswith((FIRST, HELD_OUT)):
            np.save(out / name, np.concatenate(parts))
            continue
        total = new_matrix(out / name, len(parts[0]))
        for start in range(0, len(total), ADDED_ROWS):
            rows = slice(start, start + ADDED_ROWS)
            total[rows] = np.sum([part[rows] for part in parts], axis=0, dtype=np.float64)
        total.flush()


def chance_share(tokens: int, width: int) -> float:
    """The share of the correlations of `width` channels that is taken for chance where `tokens` show them, 0 to 1: as
    if `DIAGONAL_TOKENS` uncorrelated ones a channel had been seen besides, and `LEAST_SHARE` at least
    (`docs/decisions/0131`).
    """
    known = DIAGONAL_TOKENS * width
    return max(LEAST_SHARE, known / (known + tokens))


def shrink(moments: torch.Tensor, shrinkage: float) -> torch.Tensor:
    """Shrink second moments float32 [in, in] in place toward their diagonal, and return them: correlations that few
    tokens show are chance in part (Ledoit and Wolf 2004, "A well-conditioned estimator for large-dimensional covariance
    matrices"). `shrinkage`: the share that is taken off each of them, 0 to 1.
    """
    diagonal = moments.diagonal().clone()
    moments.mul_(1 - shrinkage).diagonal().copy_(diagonal)
    return moments
