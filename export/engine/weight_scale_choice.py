"""Choose the form of a graph (`graph.weight_scale_form`) that an engine is built in.

TensorRT-RTX compiles both to the same products and kernels. Of TensorRT it is said that its dense products are of codes
only where both sides have one scale each; which form it takes, its inspector says on the GPU. So the run's own form is
built first, and the other one where promised products came out wide. Of the two the one with fewer of them is kept.
"""

from collections.abc import Callable
from pathlib import Path

from ...core.errors import BackendError
from ...core.reporter import Reporter
from ..graph.weight_scale_form import link_data, other, recorded_form, write_form
from ..onnx_file.loading import load_graph
from .info import LAYERS, EngineInfo
from .plan import Evidence

Built = tuple[EngineInfo, Evidence]
#: Builds a graph into the file of an engine, and looks into it.
Build = Callable[[Path, Path], Built]


def worth_trying(gemm_types: Evidence) -> bool:
    """Tell whether the other form may do better: where TensorRT's inspector shows promised products that are wide."""
    return gemm_types.kind == "inspector" and bool(gemm_types.wide)


def better(first: Evidence, second: Evidence) -> bool:
    """Tell whether the `second` of two engines runs more of what is promised as promised; with as many, the first
    stays.
    """
    return second.kind != "unknown" and _short(second) < _short(first)


def _short(gemm_types: Evidence) -> tuple[int, int]:
    return len(gemm_types.wide) + len(gemm_types.unknown), len(gemm_types.wide)


def in_better_form(graph: Path, path: Path, build: Build, report: Reporter) -> tuple[Built, Path]:
    """Build the engine `path` of a graph, and where that is worth trying of its other form, which is then written
    beside the engine; returns what was built, and the graph that it is of.
    """
    built = info, gemm_types = build(graph, path)
    if not worth_trying(gemm_types):
        return built, graph
    form = recorded_form(load_graph(graph))
    other_graph, other_plan = path.with_suffix(".onnx"), path.with_suffix(".again.plan")
    wide = f"{len(gemm_types.wide)} of {info.promised_products} products are not FP8 on both sides"
    tried = f"{info.target}: with --weight-scale {form} {wide}"
    links = link_data(graph, path.parent)
    write_form(graph, other_graph, other(form))
    try:
        other_info, other_types = build(other_graph, other_plan)
        other_is_better = better(gemm_types, other_types)
        winner = "second" if other_is_better else "first"
        report.note(f"{tried}, {len(other_types.wide)} with {other(form)}; the {winner} is kept")
    except BackendError as error:
        other_is_better = False
        report.note(f"{tried}; with {other(form)} it cannot be built: {error}")
    inspector_file = other_plan.with_suffix(LAYERS)
    if other_is_better:
        other_plan.replace(path)
        if inspector_file.exists():
            inspector_file.replace(path.with_suffix(LAYERS))
        return (other_info.model_copy(update={"weight_scale": other(form)}), other_types), other_graph
    for file in (other_graph, other_plan, inspector_file, *links):
        file.unlink(missing_ok=True)
    return built, graph
