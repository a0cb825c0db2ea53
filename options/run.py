"""The options of `fp8q run`, for all stages."""

from dataclasses import dataclass, replace
from typing import Annotated

from cyclopts import Parameter

from .calibrate import CalibrateOptions, Server, server_of
from .declare import without
from .export import EngineOptions, ExportOptions
from .serve import TritonOptions
from .validate import PlanOptions, ValidateOptions


@dataclass(frozen=True)
class QuantizeOptions:
    """Options of `fp8q.api.quantize`: those of calibration, and of the graph."""

    calibrate: CalibrateOptions = CalibrateOptions()
    export: ExportOptions = ExportOptions()


@Parameter(name="*")
@dataclass(frozen=True)
class RunOptions:
    """Options of all stages; the command line leaves out those that have no meaning in a whole run.

    `form_named`: the form of inputs was asked for by a preset, so that none is searched for.
    """

    calibrate: Annotated[CalibrateOptions, without("batches")] = CalibrateOptions()
    export: Annotated[ExportOptions, without("precision", "attention")] = ExportOptions()
    engine: Annotated[EngineOptions, without("precision", "adapter")] = EngineOptions()
    validate: Annotated[ValidateOptions, without("allow_overlap", "stream")] = ValidateOptions()
    triton: Annotated[TritonOptions, Parameter(parse=False)] = TritonOptions()
    planning: PlanOptions = PlanOptions()
    form_named: Annotated[bool, Parameter(parse=False)] = False

    @property
    def server(self) -> Server:
        """The server whose forms are chosen from."""
        return server_of(self.calibrate.server, self.export.graph)

    def without_idle_graph(self) -> "RunOptions":
        """Return these options without a graph, where the server reads none."""
        if self.server == "tensorrt":
            return self
        return replace(self, export=replace(self.export, graph=False))

    @property
    def finds_form(self) -> bool:
        """Tell whether the cheapest acceptable form is searched for: where none was asked for."""
        return not (self.form_named or self.calibrate.names_form or self.calibrate.batches)
