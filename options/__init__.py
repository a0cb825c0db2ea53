"""Every option of every command, written once: its field has type, default, help, panel, unit and rule (`declare`).

Frozen; nonsense is refused when they are made. Nothing heavy is imported here: `--help` must answer at once.
"""

from .built import Baseline, EngineOptions, ExportOptions, Precision, WeightScale
from .measured import (
    AS_THE_RUN_HAS_IT,
    DEFAULT_SAMPLES,
    DEFAULT_SEQ_LEN,
    AmaxAlgorithm,
    CalibrateOptions,
    Clipping,
    History,
    KvCache,
    Method,
    RescaleOptions,
    ScaleGrid,
    ScaleOptions,
    Terms,
    WeightMethod,
    WeightRounding,
)
from .proven import RUNTIMES, WITHOUT_FP8, Accumulator, Prefer, SensitivityOptions, TuneOptions, ValidateOptions
from .used import BenchOptions, GenerateOptions, ServeOptions, TritonOptions, model_name

__all__ = [
    "AS_THE_RUN_HAS_IT",
    "DEFAULT_SAMPLES",
    "DEFAULT_SEQ_LEN",
    "RUNTIMES",
    "WITHOUT_FP8",
    "Accumulator",
    "AmaxAlgorithm",
    "Baseline",
    "BenchOptions",
    "CalibrateOptions",
    "Clipping",
    "EngineOptions",
    "ExportOptions",
    "GenerateOptions",
    "History",
    "KvCache",
    "Method",
    "Precision",
    "Prefer",
    "RescaleOptions",
    "ScaleGrid",
    "ScaleOptions",
    "SensitivityOptions",
    "ServeOptions",
    "Terms",
    "TritonOptions",
    "TuneOptions",
    "ValidateOptions",
    "WeightMethod",
    "WeightRounding",
    "WeightScale",
    "model_name",
]
