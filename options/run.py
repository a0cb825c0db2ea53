"""The options of `fp8q run`, for all stages."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from .calibrate import CalibrateOptions
from .declare import without
from .export import EngineOptions, ExportOptions
from .serve import TritonOptions
from .validate import ValidateOptions


@Parameter(name="*")
@dataclass(frozen=True)
class RunOptions:
    """Options of all stages; the command line leaves out those that have no meaning in a whole run."""

    calibrate: Annotated[CalibrateOptions, without("batches")] = CalibrateOptions()
    export: Annotated[ExportOptions, without("precision", "attention")] = ExportOptions()
    engine: Annotated[EngineOptions, without("precision", "adapter")] = EngineOptions()
    validate: Annotated[ValidateOptions, without("allow_overlap")] = ValidateOptions()
    triton: Annotated[TritonOptions, Parameter(parse=False)] = TritonOptions()
