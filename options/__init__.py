"""Every option of every command, written once: its field has type, default, help, panel, unit and rule (`declare`).

Frozen; nonsense is refused when they are made. Nothing heavy is imported here: `--help` must answer at once.
"""

from .built import Baseline, EngineOptions, ExportOptions, Precision, WeightScale
from .measured import (
    AS_THE_RUN_HAS_IT,
    DEFAULT_SAMPLES,
    DEFAULT_SEQ_LEN,
    AmaxAlgorithm,
    Bos,
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
from .proven import (
    FLOAT,
    RUNTIMES,
    WITHOUT_FP8,
    Accumulator,
    DoctorOptions,
    ReportOptions,
    SensitivityOptions,
    ValidateOptions,
)
from .used import BenchOptions, GenerateOptions, ServeOptions, TritonOptions, model_name

__all__ = [
    "AS_THE_RUN_HAS_IT",
    "DEFAULT_SAMPLES",
    "DEFAULT_SEQ_LEN",
    "FLOAT",
    "RUNTIMES",
    "WITHOUT_FP8",
    "Accumulator",
    "AmaxAlgorithm",
    "Baseline",
    "BenchOptions",
    "Bos",
    "CalibrateOptions",
    "Clipping",
    "DoctorOptions",
    "EngineOptions",
    "ExportOptions",
    "GenerateOptions",
    "History",
    "KvCache",
    "Method",
    "Precision",
    "ReportOptions",
    "RescaleOptions",
    "ScaleGrid",
    "ScaleOptions",
    "SensitivityOptions",
    "ServeOptions",
    "Terms",
    "TritonOptions",
    "ValidateOptions",
    "WeightMethod",
    "WeightRounding",
    "WeightScale",
    "model_name",
]
