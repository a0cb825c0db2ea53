"""What tests count in graphs themselves, to hold against what fp8q says of them, and engines of changed graphs."""

from collections.abc import Callable
from pathlib import Path

import onnx
from onnx.external_data_helper import uses_external_data

from fp8q.core.files import clone_file
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.export.engine.build import Job, build


def products_of_the_demo(graph: Path) -> int:
    """GEMMs of the demo's graph: those of its 4 layers, the two of each layer's decode step, the head, and the rotary
    angles where transformers makes a GEMM of them (up to 5.14).
    """
    found: int = sum(node.op_type == "MatMul" for node in onnx.load(graph, load_external_data=False).graph.node)
    assert found in {4 * (7 + 2) + 1, 4 * (7 + 2) + 2}
    return found


def changed_engine(run: Run, change: Callable[[onnx.ModelProto, Path], None], job: Job, directory: Path) -> Path:
    """Build the engine of a run's graph with a `change`, in `directory`; return its plan."""
    model = onnx.load_model(run.onnx, load_external_data=False)
    change(model, run.model)
    (directory / "model.onnx").write_bytes(model.SerializeToString())
    for name in {
        entry.value
        for tensor in model.graph.initializer
        if uses_external_data(tensor)
        for entry in tensor.external_data
        if entry.key == "location"
    }:
        clone_file(run.model / name, directory / name)
    plan = directory / f"{job.target}.plan"
    plan.write_bytes(build(directory / "model.onnx", job, SILENT))
    return plan
