"""Options of all stages of a run: those of `fp8q run`."""

from dataclasses import dataclass

from .calibrate import CalibrateOptions
from .export import EngineOptions, ExportOptions
from .serve import TritonOptions
from .validate import ValidateOptions


@dataclass(frozen=True)
class RunOptions:
    """Options of all stages."""

    calibrate: CalibrateOptions = CalibrateOptions()
    export: ExportOptions = ExportOptions()
    engine: EngineOptions = EngineOptions()
    validate: ValidateOptions = ValidateOptions()
    triton: TritonOptions = TritonOptions()
