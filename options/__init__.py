"""Every option of every command, defined once: a field has the type, default, help, panel, unit and rule (`declare`).

Options are frozen, and refuse invalid values when they are created. Nothing heavy is imported here: `--help` must
answer at once.
"""

from .calibrate import (
    DEFAULT_SAMPLES,
    DEFAULT_SEQ_LEN,
    PRESETS,
    AdapterMode,
    Bos,
    CalibrateOptions,
    CorpusOptions,
    MeasureOptions,
    Preset,
    SourceOptions,
)
from .clipping import METHODS, AmaxAlgorithm, ClipMethod, Clipping, History, Method, ScaleGrid
from .compare import CompareOptions
from .convert import ConvertForm, ConvertLayout, ConvertOptions
from .distill import AdapterLearningOptions, DistillOptions, WeightLearningOptions
from .evaluate import EvaluateOptions
from .export import Baseline, EngineOptions, ExportOptions, Logits, Precision, WeightScale
from .form import BF16, DEFAULT_EXACT_TAIL, DYNAMIC, ONE, TWO, Form, FormRule
from .run import RunOptions
from .scales import AS_THE_RUN_HAS_IT, KvCache, RescaleOptions, ScaleOptions, Terms, WeightMethod, WeightRounding
from .serve import BenchOptions, GenerateOptions, ServeOptions, TritonOptions, model_name
from .tokenizer import TokenizerChoice
from .training import GradientFormat, LearningGradients, Scaling, WatchOptions
from .validate import (
    FLOAT,
    LEAST_WINDOWS,
    MAX_TOKENS,
    NOT_SERVED,
    ONE_TERM_ALONE,
    RUNTIMES,
    WITH_ADAPTERS,
    WITHOUT_GRAPH,
    Accumulator,
    ContinueOptions,
    DoctorOptions,
    PageOptions,
    Prefer,
    ReportOptions,
    SensitivityOptions,
    Server,
    TuneOptions,
    ValidateOptions,
    graph_runtime,
)

__all__ = [
    "AS_THE_RUN_HAS_IT",
    "BF16",
    "DEFAULT_EXACT_TAIL",
    "DEFAULT_SAMPLES",
    "DEFAULT_SEQ_LEN",
    "DYNAMIC",
    "FLOAT",
    "LEAST_WINDOWS",
    "MAX_TOKENS",
    "METHODS",
    "NOT_SERVED",
    "ONE",
    "ONE_TERM_ALONE",
    "PRESETS",
    "RUNTIMES",
    "TWO",
    "WITHOUT_GRAPH",
    "WITH_ADAPTERS",
    "Accumulator",
    "AdapterLearningOptions",
    "AdapterMode",
    "AmaxAlgorithm",
    "Baseline",
    "BenchOptions",
    "Bos",
    "CalibrateOptions",
    "ClipMethod",
    "Clipping",
    "CompareOptions",
    "ContinueOptions",
    "ConvertForm",
    "ConvertLayout",
    "ConvertOptions",
    "CorpusOptions",
    "DistillOptions",
    "DoctorOptions",
    "EngineOptions",
    "EvaluateOptions",
    "ExportOptions",
    "Form",
    "FormRule",
    "GenerateOptions",
    "GradientFormat",
    "History",
    "KvCache",
    "LearningGradients",
    "Logits",
    "MeasureOptions",
    "Method",
    "PageOptions",
    "Precision",
    "Prefer",
    "Preset",
    "ReportOptions",
    "RescaleOptions",
    "RunOptions",
    "ScaleGrid",
    "ScaleOptions",
    "Scaling",
    "SensitivityOptions",
    "ServeOptions",
    "Server",
    "SourceOptions",
    "Terms",
    "TokenizerChoice",
    "TritonOptions",
    "TuneOptions",
    "ValidateOptions",
    "WatchOptions",
    "WeightLearningOptions",
    "WeightMethod",
    "WeightRounding",
    "WeightScale",
    "graph_runtime",
    "model_name",
]
