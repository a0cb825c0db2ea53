"""Measure each scored token: its loss, and the divergence of its distribution from that of another runtime.

KL(p || q) = Σ p (log p - log q) over the vocabulary, in nats, includes differences that perplexity, which depends on
one token's probability, averages away. Top-1 agreement: both runtimes have the same likeliest token. Top-5 agreement:
the share of the baseline's five likeliest tokens that are among this runtime's five, in any order. (The baseline's
likeliest token alone is nearly always among these five, 100.00 % on the demo.)

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

from ...core.files import replacing

if TYPE_CHECKING:
    import torch


#: Largest float32 table of positions by vocabulary at a time, in bytes.
BLOCK_BYTES = 1 << 20
#: The number of likeliest tokens that are compared.
TOP = 5


class Quantity(NamedTuple):
    """A number that each token has: its `name`, and the runtime that it is measured `against`, where it is."""

    name: str
    against: str = ""


#: The loss of a token, and whether it and how much of the likeliest ones are the baseline's.
NLL, TOP1, TOP5 = Quantity("nll"), Quantity("top1"), Quantity("top5")
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
        self._folder, self._name, self._rows = folder, name, rows

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
        blocks.append(measure_block(some.float(), targets[first : first + size], others))
    return joined(blocks)


def measure_block(
    logits: "torch.Tensor", targets: "torch.Tensor", others: "Mapping[Baseline, torch.Tensor]"
) -> TokenValues:
    """Measure a block of logits [tokens, vocabulary] at `targets` [tokens], against the logits of the `others`."""
    log_q = logits.log_softmax(dim=-1)
    measured = {NLL: -log_q.gather(1, targets[:, None])[:, 0]}
    for baseline, theirs in others.items():
        log_p = theirs.float().log_softmax(dim=-1)
        measured[kl_from(baseline.runtime)] = divergence(log_p, log_q)
        measured[kl_to(baseline.runtime)] = divergence(log_q, log_p)
        if baseline.agreement:
            measured[TOP1] = log_p.argmax(-1) == log_q.argmax(-1)
            measured[TOP5] = overlap(log_p, log_q)
    return {quantity: values.cpu().numpy() for quantity, values in measured.items()}


def divergence(log_p: "torch.Tensor", log_q: "torch.Tensor") -> "torch.Tensor":
    """KL(p || q) in nats for each row of two [tokens, vocabulary]."""
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp_(min=0)


def overlap(log_p: "torch.Tensor", log_q: "torch.Tensor") -> "torch.Tensor":
    """Compute the share of the likeliest tokens of p that are among those of q, for each row of two [tokens,
    vocabulary].
    """
    ours, theirs = (
        log_probabilities.topk(min(TOP, log_probabilities.shape[-1]), sorted=False).indices
        for log_probabilities in (log_p, log_q)
    )
    return (ours[:, :, None] == theirs[:, None, :]).any(-1).float().mean(-1)


def joined(parts: Sequence[TokenValues]) -> TokenValues:
    """Concatenate the results of all parts."""
    quantities = [quantity for quantity in parts[0] if all(quantity in part for part in parts)]
    return {quantity: np.concatenate([part[quantity] for part in parts]) for quantity in quantities}
