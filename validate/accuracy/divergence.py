"""Measure each scored token: its loss, and the divergence of its distribution from that of another runtime.

The logits of the runtimes that others are compared with are on disk (`StoredLogits`): with a vocabulary of 128,000 a
token's logits take a quarter of a megabyte in BF16, so those of a text do not fit into memory. They are written in the
type that they were computed in, each at the row of its token, and read a few rows at a time: five tables of a
vocabulary are needed together, which for a whole batch took most of the memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ...calibrate.measure import scoring
from ...core.files import replacing

if TYPE_CHECKING:
    import torch


#: Largest float32 table of positions by vocabulary at a time, in bytes: on a CPU, by its cache; on a GPU, by the number
#: of launches.
BLOCK_BYTES = 1 << 20
GPU_BLOCK_BYTES = 64 << 20
#: The positions of a table whatever the vocabulary is: on a CPU two of 152,000 took half as long again as four.
BLOCK_TOKENS = 8


class Quantity(NamedTuple):
    """A number that each token has: its `name`, and the runtime that it is measured `against`, where it is."""

    name: str
    against: str = ""


#: The loss of a token, and whether it and how much of the likeliest ones are the baseline's.
NLL = Quantity("nll")
TOP1 = Quantity("top1")
TOP5 = Quantity("top5")
#: A value for each scored token, in evaluation order.
TokenValues = dict[Quantity, npt.NDArray[np.float32 | np.bool_]]
#: The suffix of a file of logits, behind the type of its rows.
SUFFIX = ".logits"
#: Takes logits [tokens, vocabulary], and the rows that they are of, int64 [tokens].
Writer = Callable[["torch.Tensor", npt.NDArray[np.int64]], None]


class StoredLogits:
    """The logits of one runtime in `folder`: `rows` of `name`, a token each."""

    def __init__(self, folder: Path, name: str, rows: int):
        """Find the file of `rows` rows that was written there, if any."""
        self._folder = folder
        self._name = name
        self._rows = rows

    @property
    def _path(self) -> Path | None:
        return next(iter(self._folder.glob(f"{self._name}.*{SUFFIX}")), None)

    def exists(self) -> bool:
        """Tell whether the logits were written to their end."""
        return self._path is not None

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        """Write rows in the block; the file is kept where the block ends without an error."""
        import torch

        types: set[torch.dtype] = set()
        with replacing(self._folder / f"{self._name}{SUFFIX}") as partial, open(partial, "wb") as handle:

            def write(logits: "torch.Tensor", rows: npt.NDArray[np.int64]) -> None:
                types.add(logits.dtype)
                table = logits.cpu().contiguous().view(torch.uint8).numpy()
                for first, last in adjacent(rows):
                    handle.seek(int(rows[first]) * table.shape[1])
                    handle.write(table[first:last].data)

            yield write
        (dtype,) = types
        (self._folder / f"{self._name}{SUFFIX}").rename(
            self._folder / f"{self._name}.{str(dtype).removeprefix('torch.')}{SUFFIX}"
        )

    def read(self, rows: npt.NDArray[np.int64]) -> "torch.Tensor":
        """Return the logits [rows, vocabulary] of `rows` int64, in the type that they were written in."""
        import torch

        path = self._path
        assert path is not None, f"{self._name}: its logits were not written"
        dtype = getattr(torch, path.name.removesuffix(SUFFIX).rpartition(".")[2])
        width = path.stat().st_size // self._rows
        table = np.empty((len(rows), width), np.uint8)
        with open(path, "rb") as handle:
            for first, last in adjacent(rows):
                handle.seek(int(rows[first]) * width)
                handle.readinto(table[first:last].data)
        return torch.from_numpy(table).view(dtype)

    def remove(self) -> None:
        """Delete the file."""
        if path := self._path:
            path.unlink()


@dataclass(frozen=True)
class Baseline:
    """A `runtime` that others are compared with, and its stored `logits`; with `agreement` the likeliest tokens are
    compared too.
    """

    runtime: str
    logits: StoredLogits
    agreement: bool = False


def adjacent(rows: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cut ascending `rows` into runs of neighbours: (first, behind the last) in `rows`."""
    cuts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    return [*pairwise(cuts)]


def block_size(vocabulary: int, device: str = "cpu") -> int:
    """The number of positions whose logits are measured together."""
    largest = BLOCK_BYTES if device == "cpu" else GPU_BLOCK_BYTES
    return max(BLOCK_TOKENS, largest // (4 * vocabulary))


def kl_from(runtime: str) -> Quantity:
    """KL(`runtime` || this)."""
    return Quantity("kl", runtime)


def kl_to(runtime: str) -> Quantity:
    """KL(this || `runtime`)."""
    return Quantity("kl-reversed", runtime)


def measure_tokens(
    logits: "torch.Tensor",
    scored: npt.NDArray[np.bool_],
    ids: npt.NDArray[np.int64],
    token_rows: npt.NDArray[np.int64],
    baselines: Sequence[Baseline],
    write: Writer | None = None,
) -> TokenValues:
    """Measure `logits` [windows, positions, vocabulary] at the `scored` tokens of `ids` [windows, context], each by the
    logits at the position before it.

    `token_rows` int64 [windows, context]: the rows of the tokens in the stored logits of the baselines. `write`
    receives the logits of the scored tokens.
    """
    import torch

    context, vocabulary = logits.shape[1:]
    windows, positions = np.nonzero(scored)
    rows = torch.from_numpy(windows * context + positions - 1).to(logits.device)
    targets = torch.from_numpy(ids[scored]).to(logits.device)
    flat = logits.reshape(-1, vocabulary)
    stored_rows = token_rows[scored]
    size = block_size(vocabulary, logits.device.type)
    blocks = []
    for first in range(0, len(rows), size):
        some = flat[rows[first : first + size]]
        stored = stored_rows[first : first + size]
        if write:
            write(some, stored)
        others = {baseline: baseline.logits.read(stored).to(some.device) for baseline in baselines}
        blocks.append(measure_block(some, targets[first : first + size], others))
    return joined(blocks)


def measure_block(
    logits: "torch.Tensor", targets: "torch.Tensor", others: "Mapping[Baseline, torch.Tensor]"
) -> TokenValues:
    """Measure a block of logits [tokens, vocabulary] at `targets` [tokens], against the logits of the `others`."""
    log_q = scoring.log_softmax(logits)
    measured = {NLL: scoring.losses(log_q, targets)}
    for baseline, theirs in others.items():
        log_p = scoring.log_softmax(theirs)
        measured[kl_from(baseline.runtime)] = scoring.divergences(log_p, log_q).clamp_(min=0)
        measured[kl_to(baseline.runtime)] = scoring.divergences(log_q, log_p).clamp_(min=0)
        if baseline.agreement:
            measured[TOP1] = scoring.same_likeliest(log_p, log_q)
            measured[TOP5] = scoring.overlap(log_p, log_q)
    return {quantity: values.cpu().numpy() for quantity, values in measured.items()}


def joined(parts: Sequence[TokenValues]) -> TokenValues:
    """Concatenate the results of all parts."""
    quantities = [quantity for quantity in parts[0] if all(quantity in part for part in parts)]
    return {quantity: np.concatenate([part[quantity] for part in parts]) for quantity in quantities}
