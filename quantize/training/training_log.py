"""`training.jsonl`: the stability log of a training run, one line for each recorded step after a first line that names
tensors and columns.

Lines are appended, since a training run may end at any moment: a line that was cut short is left out when the log is
read. Numbers have four significant digits.

A tensor's numbers are its amax and what it would lose in FP8, by its exact histogram. By default a step's scale follows
from the amax of steps before it, as Transformer Engine's delayed scaling has it (`quantize.scales.clip`), so a value
may saturate; the first step of all is scaled by its own amax.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, FiniteFloat, ValidationError

from ...calibrate.measure.histogram import Histogram
from ...core.errors import InputError
from ...core.files import FirstSchema, Strict, regular_file, replacing, unreadable
from ...options import Clipping, Scaling, WatchOptions
from ..codes.formats import E4M3, E5M2, Format
from ..scales.clip import Float32s, amax_in_use, saturation, scale_of, underflow

FILE_NAME = "training.jsonl"
Kind = Literal["input", "weight", "gradient"]
KINDS: tuple[Kind, ...] = ("input", "weight", "gradient")


#: The most steps of a training.
MOST_STEPS = 2**53


class Head(Strict):
    """The first line: what is recorded."""

    schema_: FirstSchema = 1
    model: str = Field(description="the class of the model")
    every: int = Field(ge=1, le=MOST_STEPS, description="steps from one record to the next")
    history: int = Field(ge=1, le=MOST_STEPS, description="records whose amax a scale is made from")
    scaling: Scaling
    tensors: list[str] = Field(min_length=1, description="module.input, module.weight or module.gradient")
    columns: list[str]


class Line(Strict):
    """One recorded step. `rows` has the columns of each tensor, null for a tensor that was not there, or that is the
    input of a module before it too.
    """

    step: int = Field(ge=0, le=MOST_STEPS)
    loss: FiniteFloat | None = Field(description="null where none was given, or it was not finite")
    loss_finite: bool
    gradient_norm: FiniteFloat | None = Field(
        description="of all parameters; null where there is none or it is not finite"
    )
    gradient_finite: bool
    seconds: FiniteFloat = Field(ge=0, description="since recording began")
    rows: list[list[FiniteFloat | None] | None]


@dataclass(frozen=True)
class TrainingLog:
    """A log that was read.

    `steps` int64 [records]; `loss`, `gradient_norm`, `seconds` float64 [records], NaN where there is none and infinite
    where it was not finite; `values` float64 [records, tensors, columns], NaN where a tensor was not there. Tensors
    that were never there are left out.
    """

    path: Path
    head: Head
    tensors: list[str]
    steps: npt.NDArray[np.int64]
    loss: npt.NDArray[np.float64]
    gradient_norm: npt.NDArray[np.float64]
    seconds: npt.NDArray[np.float64]
    values: npt.NDArray[np.float64]

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """One of `COLUMNS`, float64 [records, tensors]."""
        column: npt.NDArray[np.float64] = self.values[:, :, self.head.columns.index(name)]
        return column

    def of_kind(self, kind: Kind) -> list[int]:
        """The indices of the tensors of one kind, in the order of the model."""
        return [index for index, tensor in enumerate(self.tensors) if tensor.endswith(f".{kind}")]


def four_digits(value: float) -> float | None:
    """Round to four significant digits; None for a number that is not finite."""
    if np.isfinite(value):
        return float(f"{value:.4g}")
    return None


def begin_log(path: Path, head: Head, first_step: int) -> list[Line]:
    """Write the head to `path`, or keep what a log there has of the steps before `first_step`; return these.

    Raises InputError for a log that is there and is not to be gone on with, or is of other tensors.
    """
    lines: list[Line] = []
    if path.exists():
        if first_step == 0:
            raise InputError(
                path, "is there already", "give another directory, or first_step, the step that training goes on with"
            )
        before, stored_lines = read_lines(path)
        if before != head:
            raise InputError(path, "is of another model, or of other options", "give another directory")
        lines = [line for line in stored_lines if line.step < first_step]
    texts = [head.model_dump_json(by_alias=True), *(line.model_dump_json() for line in lines)]
    with replacing(path) as partial:
        partial.write_text("".join(f"{text}\n" for text in texts), "utf-8")
    return lines


def append_line(path: Path, line: Line) -> None:
    """Add one record to the log at `path`."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line.model_dump_json() + "\n")


def read_lines(path: Path) -> tuple[Head, list[Line]]:
    """Read head and records of the log `path`. Raises InputError, naming the line, for what is no such log."""
    regular_file(path)
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    records: list[Line] = []
    try:
        head = Head.model_validate_json(texts[0] if texts else "")
    except ValidationError:
        raise InputError(path, "line 1 is no head of a training log that fp8q.api.watch writes") from None
    for number, text in enumerate(texts[1:], 2):
        try:
            line = Line.model_validate_json(text)
        except ValidationError:
            if number == len(texts) and not _is_json(text):
                break  # the run ended while it was written
            raise InputError(path, f"line {number} is no record of a training step") from None
        if len(line.rows) != len(head.tensors) or any(
            row is not None and len(row) != len(head.columns) for row in line.rows
        ):
            raise InputError(
                path,
                f"line {number} has other rows than the {len(head.columns)} columns of {len(head.tensors)} tensors "
                "that line 1 names",
            )
        records.append(line)
    return head, records


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def log_path(path: Path) -> Path:
    """The log that `path` names: the file itself, or that of its directory."""
    return path / FILE_NAME if path.is_dir() else path


def is_log(path: Path) -> bool:
    """Tell whether `path` is a training log, or a directory with one."""
    return log_path(path).name == FILE_NAME and log_path(path).is_file()


def read_log(path: Path) -> TrainingLog:
    """Read the training log at `path`, a file or its directory.

    Raises InputError for a log without a record, and for what is no such log.
    """
    path = log_path(path)
    head, lines = read_lines(path)
    if not lines:
        raise InputError(path, "has no recorded step yet", "train on, and call watch.step() once a step")
    if list(head.columns) != list(COLUMNS):
        raise InputError(path, "has other columns than this version of fp8q writes")
    empty = [None] * len(COLUMNS)
    values = np.array([[row or empty for row in line.rows] for line in lines], np.float64)
    there = np.any(~np.isnan(values), axis=(0, 2))
    return TrainingLog(
        path,
        head,
        [tensor for tensor, seen in zip(head.tensors, there, strict=True) if seen],
        np.array([line.step for line in lines], np.int64),
        _numbers([(line.loss, line.loss_finite) for line in lines]),
        _numbers([(line.gradient_norm, line.gradient_finite) for line in lines]),
        np.array([line.seconds for line in lines], np.float64),
        values[:, there],
    )


def _numbers(pairs: Sequence[tuple[float | None, bool]]) -> npt.NDArray[np.float64]:
    """Numbers float64; NaN where there is none, infinity where it was not finite."""
    return np.array([(np.nan if finite else np.inf) if value is None else value for value, finite in pairs])


#: The formats of training: E4M3 for activations and weights, E5M2 for gradients (Micikevicius et al. 2022, arXiv
#: 2209.05433, section 3).
TRAINED = (E4M3, E5M2)
#: The columns of a tensor's numbers: `amax` and `rms` in the tensor's own unit, `zeros` a share of all values,
#: `not_finite` a number of values, `history` the amax that the scale is made for (0 without scaling); then shares for
#: each format.
COLUMNS = (
    "amax", "rms", "zeros", "not_finite", "history",
    *(f"{kind.name}_{share}" for kind in TRAINED for share in ("saturated", "underflow", "lost")),
)  # fmt: skip


@dataclass(frozen=True)
class FormatShares:
    """Shares of one tensor in one format: of the finite values that saturate, of the non-zero ones that become zero,
    and of the energy (sum of squares) that rounding loses.
    """

    saturated: float
    underflow: float
    lost: float


def history_of(amax_before: Float32s, length: int, amax_now: float) -> float:
    """The amax that a step's scale is made for: the largest of the last `length` of `amax_before` [steps], in their
    order, that are not zero; `amax_now`, the step's own, where there is none.
    """
    if not len(amax_before):
        return amax_now
    if (largest := float(amax_before[-length:].max())) > 0:
        return largest
    in_use = float(amax_in_use(amax_before, Clipping("delayed", amax_history_len=length))[-1])
    return amax_now if np.isnan(in_use) else in_use


def shares_in(histogram: Histogram, kind: Format, scale: float) -> FormatShares:
    """The shares of a tensor with `histogram` in the format `kind` under `scale`; all 0 for a tensor of zeros."""
    if histogram.amax == 0:
        return FormatShares(0.0, 0.0, 0.0)
    return FormatShares(
        saturation(histogram, kind, scale),
        underflow(histogram, kind, scale),
        lost_energy(histogram, kind, scale),
    )


def lost_energy(histogram: Histogram, kind: Format, scale: float) -> float:
    """The share of the sum of squares that rounding under `scale` loses, value by value: for one scale that takes a
    tenth of the time of `scales.clip.squared_error`, which sums over all patterns once for many scales.
    """
    values, counts = histogram.finite
    x = values.astype(np.float64)
    error = x - kind.round(values / np.float32(scale)) * np.float64(np.float32(scale))
    return float((error**2 * counts).sum() / (x**2 * counts).sum())


def tensor_numbers(histogram: Histogram, amax_before: Float32s, options: WatchOptions) -> list[float]:
    """The numbers of `COLUMNS` of a tensor, whose amax at the steps before was `amax_before` float32 [steps]."""
    values, counts = histogram.finite
    finite = max(int(counts.sum()), 1)
    amax = histogram.amax
    history = 0.0
    if options.scaling != "none":
        history = history_of(amax_before if options.scaling == "delayed" else amax_before[:0], options.history, amax)
    numbers = [
        amax,
        float(np.sqrt((values.astype(np.float64) ** 2 * counts).sum() / finite)),
        float(counts[values == 0].sum() / max(histogram.samples, 1)),
        float(histogram.infinities + histogram.nans),
        history,
    ]
    for kind in TRAINED:
        scale = float(scale_of([history], kind)[0]) if history > 0 else 1.0
        shares = shares_in(histogram, kind, scale)
        numbers += [shares.saturated, shares.underflow, shares.lost]
    return numbers
