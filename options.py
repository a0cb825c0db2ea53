"""The options of every command, and their defaults, each written once. Frozen; nonsense is refused when they are made.

Nothing heavy is imported here: the command line reads its defaults from these classes and must answer `--help` at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

from .errors import InputError

#: Calibration windows and their length, where the model and the text hold as much.
DEFAULT_SAMPLES = 512
DEFAULT_SEQ_LEN = 2048
RUNTIMES = ("bf16", "reference", "onnxruntime", "onnxruntime-bf16", "onnxruntime-int8", "tensorrt")
#: What runs no FP8: the float model, and what FP8 is compared with.
WITHOUT_FP8 = frozenset({"bf16", "source", "onnxruntime-bf16", "onnxruntime-int8"})
#: Octaves that --margin may move a scale either way: E4M3 spans 18.
LARGEST_MARGIN = 16
#: The largest dimension that a runtime takes, and MiB of workspace: int32, and int64 in bytes.
LARGEST_SIZE, LARGEST_WORKSPACE = 2**31 - 1, (2**63 - 1) >> 20
Method = Literal["amax", "percentile", "mse", "entropy", "delayed"]
ScaleGrid = Literal["bf16", "power-of-two"]
AmaxAlgorithm = Literal["max", "most_recent"]
WeightMethod = Literal["amax", "mse"]
KvCache = Literal["off", "v", "fp8"]
WeightRounding = Literal["nearest", "gptq"]
#: What FP8 is compared with.
Baseline = Literal["bf16", "int8"]
Precision = Literal["fp8", "bf16", "int8"]


def at_least_one(options: object, names: tuple[str, ...]) -> None:
    """Raise InputError for the first of the fields `names` that is below 1; None is a default and passes."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} {value}: must be at least 1")


def one_of(options: object, names: tuple[str, ...]) -> None:
    """Raise InputError for the first of the fields `names` whose value its type does not list: Python checks no
    Literal.
    """
    for name in names:
        allowed, value = get_args(get_type_hints(type(options))[name]), getattr(options, name)
        if value not in allowed:
            raise InputError(f"--{name.replace('_', '-')} {value}: is none of {', '.join(allowed)}")


#: The methods that options of `Clipping` belong to; the others belong to all.
METHOD_OF = {
    "percentile": "percentile",
    "amax_history_len": "delayed",
    "amax_compute_algo": "delayed",
    "interval": "delayed",
}


def first_given(options: object, names: Iterable[str]) -> str | None:
    """The first of the fields `names` that is not its default, as the command line has it: `--interval 5`; None where
    all are.
    """
    given = (name for name in names if getattr(options, name) != getattr(type(options), name))
    return next((f"--{name.replace('_', '-')} {getattr(options, name)}" for name in given), None)


@dataclass(frozen=True)
class Clipping:
    """How the scale of an activation or cache tensor is chosen: the method's clip, 2^margin times it, on the grid of
    scales.

    `percentile` (in percent) belongs to that method alone; the last three, under Transformer Engine's names, to
    `delayed`.
    """

    method: Method = "amax"
    percentile: float = 99.99
    margin: int = 0
    scale_grid: ScaleGrid = "bf16"
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    interval: int = 1

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing, and those of a method that is not the one asked for."""
        one_of(self, ("method", "scale_grid", "amax_compute_algo"))
        if not 0 < self.percentile <= 100:
            raise InputError(f"--percentile {self.percentile}: must lie in (0, 100]")
        if abs(self.margin) > LARGEST_MARGIN:
            raise InputError(
                f"--margin {self.margin}: must lie between -{LARGEST_MARGIN} and {LARGEST_MARGIN}; the scale is "
                "multiplied by 2 to this power"
            )
        at_least_one(self, ("amax_history_len", "interval"))
        for name, method in METHOD_OF.items():
            if self.method != method and (option := first_given(self, [name])):
                raise InputError(
                    f"{option}: is for --method {method}, and the method is {self.method}; choose that one, or leave "
                    "this out"
                )


@dataclass(frozen=True)
class ScaleOptions:
    """What follows from the statistics, without running the model: options of `fp8q scales`, and of `calibrate` too."""

    clip: Clipping = Clipping()
    weight_method: WeightMethod = "mse"
    kv_cache: KvCache = "off"
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    weight_rounding: WeightRounding = "nearest"

    def __post_init__(self) -> None:
        """Refuse what is none of the choices, whoever gives it."""
        one_of(self, ("weight_method", "kv_cache", "weight_rounding"))


@dataclass(frozen=True)
class CalibrateOptions(ScaleOptions):
    """Options of `fp8q calibrate`. None stands for a default that is lowered to what the model and the text hold.

    `stream` None: when memory does not hold the model; `seed` None: windows evenly over the text; `batches`: measure
    those from the first up to the second alone, to be merged with others, and choose nothing.
    """

    samples: int | None = None
    seq_len: int | None = None
    batch_size: int = 8
    revision: str | None = None
    trust_remote_code: bool = False
    stream: bool | None = None
    chat_template: bool = False
    seed: int | None = None
    batches: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Refuse what means nothing, whoever gives it."""
        super().__post_init__()
        at_least_one(self, ("samples", "seq_len", "batch_size"))
        if self.seed is not None and self.seed < 0:
            raise InputError(f"--seed {self.seed}: must be at least 0")
        if self.batches is not None and not 0 <= self.batches[0] < self.batches[1]:
            raise InputError(
                f"--batches {self.batches[0]}:{self.batches[1]}: holds no batch; the first is 0, and the end is not "
                "one of them, as in 0:8"
            )


@dataclass(frozen=True)
class ExportOptions:
    """Options of `fp8q export`.

    `dtype`: the type the FP8 graph computes in outside its products; the graphs of other precisions compute in BF16.
    """

    dtype: Literal["bf16", "fp16"] = "bf16"
    precision: Precision = "fp8"
    attention: Literal["wide", "fp8"] = "wide"

    def __post_init__(self) -> None:
        """Refuse a type for graphs that have no other, and attention in FP8 in what is compared with FP8."""
        one_of(self, ("dtype", "precision", "attention"))
        if self.precision != "fp8" and self.attention != "wide":
            raise InputError(
                f"--attention {self.attention}: is for the FP8 graph, not for --precision {self.precision}; leave one "
                "of them out"
            )
        if self.precision != "fp8" and self.dtype != ExportOptions.dtype:
            raise InputError(
                f"--dtype {self.dtype}: is for the FP8 graph, and --precision {self.precision} computes in BF16; "
                "leave one of them out"
            )


@dataclass(frozen=True)
class ValidateOptions:
    """Options of `fp8q validate`. `context` None: the window of calibration; `stride` None: the context.

    The runtimes `onnxruntime-bf16` and `onnxruntime-int8` run the graphs of those precisions, which `fp8q export
    --precision` writes.
    """

    runtimes: tuple[str, ...] = RUNTIMES[:3]
    context: int | None = None
    stride: int | None = None
    max_ppl_increase: float | None = None

    def __post_init__(self) -> None:
        """Refuse runtimes there are none of."""
        unknown = [name for name in self.runtimes if name not in RUNTIMES]
        if unknown or not self.runtimes:
            raise InputError(
                f"--runtimes {','.join(self.runtimes) or '(none)'}: {unknown[0] if unknown else 'nothing'} is no "
                f"runtime; choose from {', '.join(RUNTIMES)}"
            )

    @property
    def baselines(self) -> "tuple[Baseline, ...]":
        """The precisions beside FP8 that the runtimes need the graphs of."""
        return tuple(precision for precision in get_args(Baseline) if f"onnxruntime-{precision}" in self.runtimes)


@dataclass(frozen=True)
class EngineOptions:
    """Options of `fp8q build-engine`.

    No target: this machine's GPU, or every RTX target; `max_seq_len` None: 2048, or the model's positions.

    `max_prompt`: tokens taken in one step (None: `max_seq_len`). `opt_batch`, `opt_seq_len`: the sizes that kernels are
    chosen for (None: see
    `export.profiles`). `workspace`: MiB that the engine's kernels may use for intermediate results (None: the runtime's
    own limit).
    """

    runtime: Literal["auto", "tensorrt", "tensorrt-rtx"] = "auto"
    targets: tuple[str, ...] = ()
    max_batch: int = 8
    max_seq_len: int | None = None
    min_fp8_share: float = 1.0
    max_prompt: int | None = None
    opt_batch: int | None = None
    opt_seq_len: int | None = None
    workspace: int | None = None
    precision: Precision = "fp8"

    def __post_init__(self) -> None:
        """Refuse sizes and shares that mean nothing, or do not fit together."""
        one_of(self, ("runtime", "precision"))
        at_least_one(self, ("max_batch", "max_seq_len", "max_prompt", "opt_batch", "opt_seq_len", "workspace"))
        for name in ("max_batch", "max_seq_len", "max_prompt", "opt_batch", "opt_seq_len", "workspace"):
            value, most = getattr(self, name), LARGEST_WORKSPACE if name == "workspace" else LARGEST_SIZE
            if value is not None and value > most:
                raise InputError(
                    f"--{name.replace('_', '-')} {value:,}: is more than {most:,}, the most that a runtime takes"
                )
        for name, limit in (("max_prompt", "max_seq_len"), ("opt_seq_len", "max_seq_len"), ("opt_batch", "max_batch")):
            value, most = getattr(self, name), getattr(self, limit)
            if value is not None and most is not None and value > most:
                option, of = (field.replace("_", "-") for field in (name, limit))
                raise InputError(
                    f"--{option} {value:,}: is more than --{of} {most:,}; ask for at most that, or raise --{of}"
                )
        if not 0 <= self.min_fp8_share <= 1:
            raise InputError(f"--min-fp8-share {self.min_fp8_share}: must lie in [0, 1]")
