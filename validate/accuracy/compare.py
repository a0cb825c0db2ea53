"""Run the same tokens through every runtime, one after the other, and compare each with BF16 and, where it runs, with
FP32.

Only one runtime is loaded at a time, so the peak of memory is that of the largest. The runtimes that others are
compared with write their logits to disk (`stored_logits`), for a chunk of windows at a time; a tenth of the free disk
bounds a chunk, and most texts are one chunk. The batches of windows do not depend on the chunks, so the numbers do not
either. Results are saved after each chunk, and a killed call goes on at the next runtime. A runtime that fails is left
out, and the others go on. What the float model gives depends on no form of the run: it may be kept for another
comparison of the same windows.
"""

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Union
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from ...calibrate.text.evaluation import Evaluation
from ...core.arrays import read_arrays
from ...core.errors import BackendError
from ...core.files import replacing
from ...core.memory import release_memory
from ...core.reporter import Reporter
from ...options import FLOAT
from .as_served import LogitsPart
from .divergence import (
    NLL,
    TOP1,
    TOP5,
    Baseline,
    Quantity,
    StoredLogits,
    TokenValues,
    Writer,
    joined,
    kl_from,
    kl_to,
    measure_tokens,
)
from .document import Accuracy, Divergence, RuntimeAccuracy
from .top_logits import UNFINISHED, TopLogits, joined_top, positions_to_keep, read_top, top_of, write_top

if TYPE_CHECKING:
    import torch

#: Logits of a batch of windows by a torch model: int64 [windows, context] -> float tensor [windows, context,
#: vocabulary].
Forward = Callable[[npt.NDArray[np.int64]], "torch.Tensor"]
#: Logits of a batch of windows by any runtime, whole or in pieces; runtimes without torch return arrays.
Logits = Union["torch.Tensor", npt.NDArray[np.float32]]
AnyForward = Callable[[npt.NDArray[np.int64]], Logits | Iterator[LogitsPart]]
#: Loads a runtime.
Opener = Callable[[], AnyForward]
BASELINE = "bf16"
#: The FP32 model, which shows the error of BF16 arithmetic.
FLOAT32 = "fp32"
#: The reference with sums in FP32, which other accumulators are compared with.
EXACT_SUMS = "reference-fp32"
#: The runtimes that later ones are compared with, in the order of their turns.
BASELINES = (BASELINE, FLOAT32, EXACT_SUMS)
#: The values of each token, and the field of `accuracy.json` that has their mean.
MEANS = {
    kl_from(BASELINE): "kl_mean_nats", TOP1: "top1_agreement", TOP5: "top5_agreement",
    kl_from(FLOAT32): "kl_fp32_nats", kl_from(EXACT_SUMS): "kl_sums_nats",
}  # fmt: skip
#: The divergences of each token, and their direction as `divergences` of `accuracy.json` names it.
DIRECTIONS = {
    kl_from(BASELINE): "bf16||this", kl_to(BASELINE): "this||bf16", kl_from(FLOAT32): "fp32||this",
    kl_to(FLOAT32): "this||fp32",
}  # fmt: skip
#: Stands between the two parts of a quantity in the files of a call that goes on.
SEPARATOR = " "
#: Largest float32 logits of one batch, in bytes.
LOGITS_BYTES = 16 << 20
#: The most tokens of windows that are decoded together: each step reads all weights, for however many windows, and what
#: a window adds is its cache. Nor less than windows of so many bytes of logits, as it was (decision 109).
DECODED_TOKENS = 32 << 10
DECODED_BYTES = 256 << 20
#: The share of the free disk that the logits of a chunk may take: others use the disk too. Results do not depend on it.
DISK_SHARE = 0.1
#: The share that those of one batch may take; where they take more, the batches are smaller.
BATCH_SHARE = 0.5


@dataclass(frozen=True)
class Workplace:
    """The device of a comparison, the folder that keeps its results for a call that goes on, and its reporter."""

    device: str
    folder: Path
    report: Reporter


@dataclass(frozen=True)
class Outcome:
    """The accuracy of each runtime, and why some `failed`. `nll`, and `kl` from the baseline: float32 [windows,
    context], nats, NaN where not scored. `top`: the likeliest tokens at `positions_to_keep`. `measured`: all values of
    each runtime.
    """

    accuracy: Accuracy
    nll: dict[str, npt.NDArray[np.float32]]
    failed: dict[str, str]
    kl: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    top: dict[str, TopLogits] = field(default_factory=dict)
    measured: dict[str, TokenValues] = field(default_factory=dict)

    def joined(self, other: "Outcome") -> "Outcome":
        """Join the results of other runtimes."""
        runtimes = self.accuracy.runtimes | other.accuracy.runtimes
        accuracy = self.accuracy.model_copy(update={"runtimes": runtimes})
        return Outcome(accuracy, self.nll | other.nll, self.failed | other.failed, self.kl | other.kl, self.top)


@dataclass(frozen=True)
class WindowBatch:
    """Windows that run together: their `ids`, the tokens that are `scored` and the `top_positions`,
    whose likeliest tokens are stored, all [windows, context]. `rows`, `top_rows`, int64 of the same shape: the index of
    each scored token in its chunk, and of each top position in the whole evaluation.
    """

    ids: npt.NDArray[np.int64]
    scored: npt.NDArray[np.bool_]
    top_positions: npt.NDArray[np.bool_]
    rows: npt.NDArray[np.int64]
    top_rows: npt.NDArray[np.int64]

    def part(self, piece: LogitsPart) -> "WindowBatch":
        """Return the tokens that `piece` has the logits of, behind the one that is read first."""
        some = (piece.windows, slice(piece.first, piece.first + piece.logits.shape[1] + 1))
        scored = self.scored[some].copy()
        top = self.top_positions[some].copy()
        scored[:, 0] = False
        top[:, 0] = False
        return WindowBatch(self.ids[some], scored, top, self.rows[some], self.top_rows[some])


def numbered(chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Number the `chosen` tokens [windows, context] in their order, from 0: int64 of the same shape."""
    return (np.cumsum(chosen.ravel()) - 1).reshape(chosen.shape)


def windows_at_once(context: int, prompt: int | None, vocabulary: int) -> int:
    """The number of windows of a batch: by the size of their logits, or, where they are decoded behind a `prompt`, by
    their tokens.
    """
    if prompt is None:
        return max(1, LOGITS_BYTES // (4 * context * vocabulary))
    by_logits = DECODED_BYTES // (4 * (context - prompt) * vocabulary)
    return max(1, DECODED_TOKENS // context, by_logits)


class Measure(Protocol):
    """A function that measures logits [windows, positions, vocabulary] at the scored tokens of `batch`, each by those
    of the position before it, compares them with the baselines', and writes them.
    """

    def __call__(
        self, logits: Any, batch: WindowBatch, baselines: Sequence[Baseline], write: Writer | None
    ) -> tuple[TokenValues, TopLogits]:
        """Return the values of each scored token, and the likeliest tokens at the top positions."""


def measure_with_torch(
    logits: Logits, batch: WindowBatch, baselines: Sequence[Baseline], write: Writer | None
) -> tuple[TokenValues, TopLogits]:
    """Measure a batch on the device where its logits are."""
    import torch

    logits = torch.as_tensor(logits)
    windows, positions = np.nonzero(batch.top_positions)
    token_values = measure_tokens(logits, batch.scored, batch.ids, batch.rows, baselines, write)
    return token_values, top_of(logits[windows, positions - 1])


@dataclass(frozen=True)
class TokenMeasure:
    """A function that measures tokens, and the positions whose likeliest tokens are stored, bool [windows, context].
    `of_top_positions`: the names of its quantities that have a value for each top position, not each scored token.
    """

    measure: Measure
    top_positions: npt.NDArray[np.bool_]
    of_top_positions: frozenset[str] = frozenset()


def compare_in_turn(turns: "Turns", report: Reporter) -> Outcome:
    """Run all runtimes of `turns` whose results are missing, one after the other."""
    todo = {part: names for part in range(len(turns.parts)) if (names := turns.missing(part))}
    if len(todo) > 1:
        report.note(
            f"{turns.chunk:,} of {len(turns.evaluation.ids):,} windows at a time, whose logits a tenth of the free "
            f"disk has room for: each runtime is loaded {len(todo)} times"
        )
    windows = sum(turns.windows(part) * len(names) for part, names in todo.items())
    with report.track(f"Evaluating {', '.join(turns.openers)}", windows, "windows") as advance, without_gradients():
        for part in todo:
            turns.take(part, advance)
    return turns.outcome()


class Turns:
    """The schedule of runtimes and chunks: results that are saved, results that are missing, and failures."""

    def __init__(
        self, evaluation: Evaluation, openers: Mapping[str, Opener], vocabulary: int, folder: Path,
        token_measure: TokenMeasure | None = None, lasting: Path | None = None,
    ):  # fmt: skip
        """Cut the chunks, as the call did that began this `folder`, which is made and keeps the results: a call with
        the same evaluation and runtimes goes on from there.

        `token_measure`: how tokens are measured (None: with torch, against the baselines among the runtimes).
        `lasting`: the folder that has the results of the float model for other comparisons of the same windows, and,
        where these are one chunk, its logits; None: `folder` has them too, and logits are removed.
        """
        folder.mkdir(exist_ok=True)
        self.evaluation = evaluation
        self.openers = openers
        self.folder = folder
        self.lasting = lasting
        self.failed: dict[str, str] = {}
        self.names = [name for name in BASELINES if name in openers]
        self.names += [name for name in openers if name not in BASELINES]
        self.token_measure = token_measure or TokenMeasure(measure_with_torch, positions_to_keep(evaluation))
        windows, context = evaluation.ids.shape
        prompt = evaluation.protocol.prompt
        self.batch = windows_at_once(context, prompt, vocabulary)
        self.chunk = self._chunk(4 * (context - (prompt or 0)) * vocabulary)
        self.batch = min(self.batch, self.chunk)
        self.parts = [slice(start, min(start + self.chunk, windows)) for start in range(0, windows, self.chunk)]

    def _chunk(self, logits_bytes: int) -> int:
        """The windows of a chunk, in whole batches; `logits_bytes`: the size of one window's logits.

        Lasting results in other chunks than those of a call that goes on are not used.
        """
        files = [folder / "windows" for folder in (self.folder, self.lasting) if folder is not None]
        known = [int(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
        windows = known[0] if known else self._affordable(logits_bytes)
        if set(known) - {windows}:
            self.lasting = None
        for file in files:
            if not file.is_file():
                with replacing(file) as partial:
                    partial.write_text(str(windows), encoding="utf-8")
        return windows

    def _affordable(self, logits_bytes: int) -> int:
        """The windows whose logits, of so many bytes each, the disk has room for."""
        free: int = shutil.disk_usage(self.folder).free
        stored_bytes = logits_bytes * max(1, len(self.openers.keys() & BASELINES))
        batches = int(DISK_SHARE * free) // (stored_bytes * self.batch)
        return self.batch * batches or max(1, min(self.batch, int(BATCH_SHARE * free) // stored_bytes))

    def windows(self, part: int) -> int:
        """Return the number of windows in a chunk."""
        return len(self.evaluation.ids[self.parts[part]])

    def missing(self, part: int) -> list[str]:
        """List the runtimes whose results for a chunk are not all saved."""
        return [
            name
            for name in self.names
            if name not in self.failed
            and not {NLL, *(kl_from(baseline.runtime) for baseline in self._against(name, part))}
            <= self._saved(name, part).keys()
        ]

    def take(self, part: int, advance: Callable[[int], None]) -> None:
        """Run all missing runtimes over a chunk, and again those whose logits they are compared with."""
        missing = self.missing(part)
        for name in self.names:
            later = self.names[self.names.index(name) + 1 :] if name in BASELINES else []
            keep = not self._stored_logits(name, part).exists() and not set(later).isdisjoint(missing)
            if name in missing or keep:
                try:
                    self._run(name, part, keep, advance if name in missing else lambda windows: None)
                except BackendError as error:
                    self.failed[name] = str(error)
                release_memory()
        for name in BASELINES:
            if self._folder_of(name) == self.folder or len(self.parts) > 1:
                self._stored_logits(name, part).remove()

    def _run(self, name: str, part: int, keep: bool, advance: Callable[[int], None]) -> None:
        """Load a runtime, run it over a chunk, and save the results; `keep`: save its logits too."""
        forward = loading(name, self.openers[name])
        baselines = self._against(name, part)
        results: list[TokenValues] = []
        top: list[TopLogits] = []
        with self._stored_logits(name, part).writing() if keep else nullcontext() as write:
            for windows, batch in self._batches(part):
                pieces = running(name, forward, batch.ids, windows, len(self.evaluation.ids))
                values, likely = self._measured(pieces, batch, baselines, write)
                results.append(values)
                top.append(likely)
                advance(len(batch.ids))
        write_top(self._top_file(name, part), joined_top(top))
        arrays = {SEPARATOR.join(quantity): values for quantity, values in joined(results).items()}
        with replacing(self._file(name, part)) as partial, open(partial, "wb") as handle:
            np.savez(handle, allow_pickle=False, **arrays)

    def _batches(self, part: int) -> Iterator[tuple[slice, WindowBatch]]:
        """Cut the batches of a chunk, each with its windows in the evaluation."""
        windows = self.parts[part]
        top = self.token_measure.top_positions
        tables = WindowBatch(
            self.evaluation.ids[windows],
            self.evaluation.scored[windows],
            top[windows],
            numbered(self.evaluation.scored[windows]),
            numbered(top)[windows],
        )
        for start in range(0, len(tables.ids), self.batch):
            some = slice(start, min(start + self.batch, len(tables.ids)))
            batch = WindowBatch(*(getattr(tables, table.name)[some] for table in fields(tables)))
            yield slice(windows.start + some.start, windows.start + some.stop), batch

    def _measured(
        self, pieces: Iterator[LogitsPart], batch: WindowBatch, baselines: Sequence[Baseline], write: Writer | None
    ) -> tuple[TokenValues, TopLogits]:
        """Measure a batch piece by piece; return the values of its tokens in the order of the evaluation."""
        values: list[TokenValues] = []
        top: list[TopLogits] = []
        rows: list[npt.NDArray[np.int64]] = []
        top_rows: list[npt.NDArray[np.int64]] = []
        for piece in pieces:
            measured = batch.part(piece)
            if not (measured.scored | measured.top_positions).any():
                continue
            of_piece, likely = self.token_measure.measure(piece.logits, measured, baselines, write)
            values.append(of_piece)
            top.append(likely)
            rows.append(measured.rows[measured.scored])
            top_rows.append(measured.top_rows[measured.top_positions])
        order, top_order = (np.unique(np.concatenate(some), return_index=True)[1] for some in (rows, top_rows))
        of_top = self.token_measure.of_top_positions
        in_order = {
            quantity: by_row[top_order if quantity.name in of_top else order]
            for quantity, by_row in joined(values).items()
        }
        return in_order, joined_top(top).at(top_order)

    def _against(self, name: str, part: int) -> list[Baseline]:
        """Return the stored logits that a runtime is compared with: of the baselines that ran before it and did not
        fail, in the order of `BASELINES`.
        """
        before = self.names[: self.names.index(name)]
        return [
            Baseline(other, self._stored_logits(other, part), agreement=other == BASELINE)
            for other in BASELINES
            if other in before and other not in self.failed
        ]

    def _folder_of(self, name: str) -> Path:
        """The folder of the results of a runtime."""
        return self.lasting if self.lasting and name in FLOAT else self.folder

    def _stored_logits(self, name: str, part: int) -> StoredLogits:
        rows = int(self.evaluation.scored[self.parts[part]].sum())
        return StoredLogits(self._folder_of(name), f"{part}-{name}", rows)

    def _file(self, name: str, part: int) -> Path:
        return self._folder_of(name) / f"{part}-{quote(name, safe='')}.npz"

    def _top_file(self, name: str, part: int) -> Path:
        return self._file(name, part).with_suffix(".top.npz")

    def _saved(self, name: str, part: int) -> TokenValues:
        """Load the saved results of a runtime on a chunk; nothing where it has not run."""
        if not (path := self._file(name, part)).is_file():
            return {}
        arrays = read_arrays(path, "results of a runtime", UNFINISHED)
        return {Quantity(*name.split(SEPARATOR, 1)): values for name, values in arrays.items()}

    def outcome(self) -> Outcome:
        """Summarize all chunks, of the runtimes that ran them all."""
        results = {
            name: joined([self._saved(name, part) for part in range(len(self.parts))])
            for name in self.openers
            if name not in self.failed
        }
        if BASELINE in results and kl_to(BASELINE) in results.get(FLOAT32, {}):
            results[BASELINE][kl_from(FLOAT32)] = results[FLOAT32][kl_to(BASELINE)]
            results[BASELINE][kl_to(FLOAT32)] = results[FLOAT32][kl_from(BASELINE)]
        base = results[BASELINE][NLL] if BASELINE in results else None
        nll = {name: self._scatter(values[NLL]) for name, values in results.items()}
        divergence = kl_from(BASELINE)
        kl = {name: self._scatter(values[divergence]) for name, values in results.items() if divergence in values}
        runtimes = {
            name: summarize_tokens(values, None if name == BASELINE else base) for name, values in results.items()
        }
        parts = range(len(self.parts))
        top = {name: joined_top([read_top(self._top_file(name, part)) for part in parts]) for name in results}
        accuracy = Accuracy(protocol=self.evaluation.protocol, runtimes=runtimes)
        return Outcome(accuracy, nll, self.failed, kl, top, results)

    def _scatter(self, values: npt.NDArray[np.float32 | np.bool_]) -> npt.NDArray[np.float32]:
        """Scatter the values of scored tokens to their positions, float32 [windows, context]; NaN elsewhere."""
        every = np.full(self.evaluation.ids.shape, np.nan, np.float32)
        every[self.evaluation.scored] = values
        return every


def lasting_runtimes(folder: Path) -> set[str]:
    """The runtimes of the float model that do not run again for windows whose lasting results are in `folder`: all of
    them in one chunk, with the logits that others are compared with.
    """
    stored = {name for name in BASELINES if StoredLogits(folder, f"0-{name}", 0).exists()}
    if BASELINE not in stored:
        return set()
    return {
        name for name in FLOAT if (folder / f"0-{name}.npz").is_file() and (name in stored or name not in BASELINES)
    }


def loading(name: str, opener: Opener) -> AnyForward:
    """Load a runtime; raises BackendError where that fails."""
    try:
        return opener()
    except (RuntimeError, MemoryError) as error:
        raise BackendError(name, f"cannot be loaded ({error_line(error)})") from error


def running(
    name: str, forward: AnyForward, ids: npt.NDArray[np.int64], windows: slice, of: int
) -> Iterator[LogitsPart]:  # fmt: skip
    """Compute the logits of `windows`, of `of` windows in all; raises BackendError where the runtime fails."""
    try:
        logits = forward(ids)
        yield from logits if isinstance(logits, Iterator) else (LogitsPart(logits, slice(0, len(ids))),)
    except (BackendError, RuntimeError, MemoryError) as error:
        where = f"window {windows.start + 1}" + (f" to {windows.stop}" if len(ids) > 1 else "")
        raise BackendError(name, f"failed at {where} of {of} ({error_line(error)})") from error


def error_line(error: BaseException) -> str:
    """Format a library's exception as one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def without_gradients() -> AbstractContextManager[object]:
    """Record no gradients in the block; does nothing where torch is not loaded."""
    torch = sys.modules.get("torch")
    return torch.inference_mode() if torch else nullcontext()


def summarize_tokens(values: TokenValues, base: npt.NDArray[np.float32 | np.bool_] | None) -> RuntimeAccuracy:
    """Summarize the values of tokens in means and quantiles; `base`: the baseline's loss of the same tokens."""
    nll = mean(values[NLL])
    means = {name: mean(values[quantity]) for quantity, name in MEANS.items() if quantity in values}
    if base is not None:
        means["perplexity_increase"] = float(np.expm1(nll - mean(base)))
    if kl_from(BASELINE) in values:
        means["kl_p99_nats"] = float(np.quantile(values[kl_from(BASELINE)].astype(np.float32), 0.99))
    divergences = {
        direction: divergence_of(values[quantity]) for quantity, direction in DIRECTIONS.items() if quantity in values
    }
    return RuntimeAccuracy.model_validate(
        {"perplexity": float(np.exp(nll)), "nll_nats": nll, "divergences": divergences or None, **means}
    )


def divergence_of(kl: npt.NDArray[np.float32 | np.bool_]) -> Divergence:
    """Summarize the KL of tokens [tokens], in nats."""
    p50, p90, p99, largest = np.quantile(kl.astype(np.float32), [0.5, 0.9, 0.99, 1.0]).tolist()
    return Divergence(mean=mean(kl), p50=p50, p90=p90, p99=p99, max=largest)


def mean(values: npt.NDArray[np.float32 | np.bool_]) -> float:
    """Return the mean of `values`, summed in float64."""
    return float(values.mean(dtype=np.float64))
