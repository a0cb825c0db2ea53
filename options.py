"""The options of every command, and their defaults, each written once. Frozen; nonsense is refused when they are made.

Nothing heavy is imported here: the command line reads its defaults from these classes and must answer `--help` at once.
"""

from dataclasses import dataclass
from typing import Literal

from .errors import InputError

#: Calibration windows and their length, where the model and the text hold as much.
DEFAULT_SAMPLES = 512
DEFAULT_SEQ_LEN = 2048
RUNTIMES = ("bf16", "reference", "onnxruntime", "tensorrt")
Method = Literal["amax", "mse", "percentile"]
WeightRounding = Literal["nearest", "gptq"]


@dataclass(frozen=True)
class CalibrateOptions:
    """Options of `fp8q calibrate`. None stands for a default that is lowered to what the model and the text hold; for `stream`: when memory does not hold the model."""

    method: Method = "amax"
    percentile: float = 99.99
    kv_cache: Literal["off", "fp8"] = "off"
    samples: int | None = None
    seq_len: int | None = None
    batch_size: int = 8
    skip: tuple[str, ...] = ()
    revision: str | None = None
    trust_remote_code: bool = False
    stream: bool | None = None
    weight_rounding: WeightRounding = "nearest"

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing, whoever gives them."""
        for name in ("samples", "seq_len", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        if not 0 < self.percentile <= 100:
            raise InputError(f"--percentile {self.percentile}: must lie in (0, 100]")


@dataclass(frozen=True)
class ExportOptions:
    """Options of `fp8q export`: the type the FP8 graph computes in outside its products."""

    dtype: Literal["bf16", "fp16"] = "bf16"


@dataclass(frozen=True)
class ValidateOptions:
    """Options of `fp8q validate`. `context` None: the window of calibration; `stride` None: the context."""

    runtimes: tuple[str, ...] = RUNTIMES[:3]
    context: int | None = None
    stride: int | None = None
    max_ppl_increase: float | None = None

    def __post_init__(self) -> None:
        """Refuse runtimes there are none of."""
        unknown = [name for name in self.runtimes if name not in RUNTIMES]
        if unknown or not self.runtimes:
            raise InputError(
                f"--runtimes {','.join(self.runtimes) or '(none)'}: {unknown[0] if unknown else 'nothing'} is no runtime; choose from {', '.join(RUNTIMES)}"
            )


@dataclass(frozen=True)
class EngineOptions:
    """Options of `fp8q build-engine`. No target: this machine's GPU, or every RTX target; `max_seq_len` None: 2048, or the model's positions."""

    runtime: Literal["auto", "tensorrt", "tensorrt-rtx"] = "auto"
    targets: tuple[str, ...] = ()
    max_batch: int = 8
    max_seq_len: int | None = None
    min_fp8_share: float = 1.0

    def __post_init__(self) -> None:
        """Refuse sizes and shares that mean nothing."""
        for name in ("max_batch", "max_seq_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        if not 0 <= self.min_fp8_share <= 1:
            raise InputError(f"--min-fp8-share {self.min_fp8_share}: must lie in [0, 1]")
