"""Measure each scored token: its loss, and the divergence of its distribution from that of another runtime.

The logits of the runtimes that others are compared with are on disk (`StoredLogits`): with a vocabulary of 128,000 a
token's logits take a quarter of a megabyte in BF16, so those of a text do not fit into memory. They are written in the
type that they were computed in, and read a few rows at a time: five tables of a vocabulary are needed together, which
for a whole batch took most of the memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ...calibrate.measure import scoring
from ...core.files import replacing

if TYPE_CHECKING:
    import torch


#: Largest float32 table of positions by vocabulary at a time, in bytes.
BLOCK_BYTES = 1 << 20


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
#: Takes rows [rows, vocabulary] as they come.
Writer = Callable[["torch.Tensor"], None]


class StoredLogits:
    """The logits of one runtime in `folder`: rows of `name`, in the order they were written."""

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

            def write(rows: "torch.Tensor") -> None:
                types.add(rows.dtype)
                rows.cpu().contiguous().view(torch.uint8).numpy().tofile(handle)

            yield write
        (dtype,) = types
        (self._folder / f"{self._name}{SUFFIX}").rename(
            self._folder / f"{self._name}.{str(dtype).removeprefix('torch.')}{SUFFIX}"
        )

    def read(self, start: int, stop: int) -> "torch.Tensor":
        """Rows `start` to `stop` [rows, vocabulary], in the type that they were written in."""
        import torch

        path = self._path
        assert path is not None, f"{self._name}: its logits were not written"
        dtype = getattr(torch, path.name.removesuffix(SUFFIX).rpartition(".")[2])
        row = path.stat().st_size // self._rows
        data = np.fromfile(path, np.uint8, (stop - start) * row, offset=start * row)
        return torch.from_numpy(data).view(dtype).view(stop - start, -1)

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
    start: int,
    baselines: Sequence[Baseline],
    write: Writer | None = None,
) -> TokenValues:
    """Measure `logits` [windows, context, vocabulary] at the `scored` tokens of `ids` [windows, context], each by the
    logits at the position before it.

    `start`: the row of the first scored token in the stored logits of the baselines. `write` receives the logits of the
    scored tokens.
    """
    import torch

    context, vocabulary = logits.shape[1:]
    windows, positions = np.nonzero(scored)
    rows = torch.from_numpy(windows * context + positions - 1).to(logits.device)
    targets = torch.from_numpy(ids[scored]).to(logits.device)
    flat = logits.reshape(-1, vocabulary)
    size = max(1, BLOCK_BYTES // (4 * vocabulary))
    blocks = []
    for first in range(0, len(rows), size):
        some = flat[rows[first : first + size]]
        if write:
            write(some)
        stored = slice(start + first, start + first + len(some))
        others = {baseline: baseline.logits.read(stored.start, stored.stop).to(some.device) for baseline in baselines}
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
