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


def worth_trying(found: Evidence) -> bool:
    """Tell whether the other form may do better: where TensorRT's inspector shows promised products that are wide."""
    return found.kind == "inspector" and bool(found.wide)


def better(first: Evidence, second: Evidence) -> bool:
    """Tell whether the `second` of two engines runs more of what is promised as promised; with as many, the first
    stays.
    """
    return second.kind != "unknown" and _short(second) < _short(first)


def _short(found: Evidence) -> tuple[int, int]:
    return len(found.wide) + len(found.unknown), len(found.wide)


def in_better_form(graph: Path, path: Path, build: Build, report: Reporter) -> tuple[Built, Path]:
    """Build the engine `path` of a graph, and where that is worth trying of its other form, which is then written
    beside the engine; returns what was built, and the graph that it is of.
    """
    built = info, found = build(graph, path)
    if not worth_trying(found):
        return built, graph
    form = recorded_form(load_graph(graph))
    beside, again = path.with_suffix(".onnx"), path.with_suffix(".again.plan")
    wide = f"{len(found.wide)} of {info.promised_products} products are not FP8 on both sides"
    tried = f"{info.target}: with --weight-scale {form} {wide}"
    links = link_data(graph, path.parent)
    write_form(graph, beside, other(form))
    try:
        other_info, in_other = build(beside, again)
        kept = better(found, in_other)
        report.note(f"{tried}, {len(in_other.wide)} with {other(form)}; the {'second' if kept else 'first'} is kept")
    except BackendError as error:
        kept = False
        report.note(f"{tried}; with {other(form)} it cannot be built: {error}")
    said = again.with_suffix(LAYERS)
    if kept:
        again.replace(path)
        if said.exists():
            said.replace(path.with_suffix(LAYERS))
        return (other_info.model_copy(update={"weight_scale": other(form)}), in_other), beside
    for file in (beside, again, said, *links):
        file.unlink(missing_ok=True)
    return built, graph
