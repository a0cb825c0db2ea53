"""Both forms of the graph (docs/decisions/0011) are the same model: to the lint, to ONNX Runtime, and in engines."""

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from fp8q import api
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from fp8q.core.run_files import GRAPH, GRAPH_FP32
from fp8q.export.engine.plan import read_plan
from fp8q.export.graph.weight_scale_form import write_form
from fp8q.export.lint.check import lint_graph
from fp8q.export.onnx_file.loading import load_graph
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.scales.scheme import in_two_codes
from fp8q.stages.corpus import load_tokens
from fp8q.stages.lint import expectation
from fp8q.stages.pipeline.stages import EXPORT

from .other_models import SHARE, Logits, least_distance

pytestmark = pytest.mark.slow

#: The difference of a logit, as a share of the largest.
LIMIT = 1e-6
TARGETS = ("sm89", "sm120")
SIDES = ("weight.dequantize.output", "input.dequantize.output")
#: What the graph computes in.
COMPUTE = {
    (GRAPH, "bf16"): TensorProto.BFLOAT16,
    (GRAPH, "fp16"): TensorProto.FLOAT16,
    (GRAPH_FP32, "bf16"): TensorProto.FLOAT,
    (GRAPH_FP32, "fp16"): TensorProto.FLOAT,
}


def test_every_architecture_is_the_same_model_in_both_forms(
    finished: Any, others: dict[str, Logits], two_implementations: ModuleType, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(finished.run.model, tmp_path / "model"))
    promised, scales = expectation(finished.run), load_scales(finished.run)
    modules, two_terms = set(scales.fp8_gemms), set(in_two_codes(scales.forms))
    for name in (GRAPH, GRAPH_FP32):
        before = (model / name).read_bytes()
        write_form(model / name, model / name, "mul")
        there = (model / name).read_bytes()
        onnx.checker.check_model(model / name, full_check=True)
        graph = load_graph(model / name)
        assert {node.name.removesuffix(".matmul.rescale") for node in graph.nodes if node.op_type == "Mul"} >= modules
        types = {value.name: value.type.tensor_type.elem_type for value in graph.model.graph.value_info}
        assert {types[f"{module}.{side}"] for module in modules for side in SIDES if f"{module}.{side}" in types} == {
            TensorProto.FLOAT
        }
        for module in modules:  # halves of two terms are added in FP32
            compute = TensorProto.FLOAT if module in two_terms else COMPUTE[name, finished.architecture.dtype]
            assert types[f"{module}.matmul.output"] == compute
        assert [str(found) for found in lint_graph(graph, promised) if found.severity == "error"] == []
        write_form(model / name, model / name, "dq")
        assert (model / name).read_bytes() == before
        (model / name).write_bytes(there)
    ids = load_tokens(finished.run, finished.run.evaluation)[: 4 * 16].reshape(4, 16)
    ours, theirs = (two_implementations.OnnxWithCodes(path)(ids) for path in (model, finished.run.model))
    first, _, compared = two_implementations.first_difference(ours.codes, theirs.codes, ids.shape)
    assert compared > 0
    assert first.sum() >= 4 or two_terms  # the code of a remainder soon differs
    for row, end in enumerate(first):
        difference = np.abs(ours.logits[row, :end] - theirs.logits[row, :end]).max(initial=0)
        assert difference <= LIMIT * np.abs(theirs.logits).max()
    p, q = (two_implementations.log_probabilities(each.logits) for each in (theirs, ours))
    assert two_implementations.kl(p, q) < SHARE * least_distance(others)


@pytest.fixture(scope="module")
def run(demo_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The demo in the form `mul`, and its engines."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'fp8q[tensorrt-rtx]'")
    copied = Path(shutil.copytree(demo_run.root, tmp_path_factory.mktemp("forms") / "run"))
    api.export(copied, api.ExportOptions(weight_scale="mul"))
    options = api.EngineOptions(runtime="tensorrt-rtx", targets=TARGETS, max_seq_len=256)
    assert [engine.fp8_products for engine in api.build_engine(copied, options)] == [28, 28]
    return Run(copied)


def test_the_engines_of_both_forms_are_proven_and_run_the_same(run: Run, demo_run: Run) -> None:
    for view in api.engine(run.root):
        assert (view.fp8_products, view.narrow, view.differences) == (28, (), ())
        assert (view.codes_found, view.factors_found, view.inputs_found) == (28, 28, 28)
        assert all(row.before and row.after for row in view.products if row.module and row.operands == ("fp8", "fp8"))
    for target in TARGETS:
        plans = [read_plan((each.engines / f"{target}.plan").read_bytes()) for each in (run, demo_run)]
        assert plans[0] is not None
        assert plans[1] is not None
        for profile in plans[1].profiles:
            ours, theirs = (sorted(map(str, plan.profiles[profile])) for plan in plans if plan)
            assert ours == theirs
            ours, theirs = (sorted(kernel.name for kernel in plan.kernels[profile]) for plan in plans if plan)
            assert ours == theirs


def test_the_form_is_recorded_kept_by_scales_and_taken_back(
    run: Run, demo_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def traced(*_: object, **__: object) -> None:
        raise AssertionError("a graph is traced though its other form is there")

    monkeypatch.setattr("fp8q.stages.export.export_model", traced)
    copied = Run(Path(shutil.copytree(run.root, tmp_path / "run")))
    assert copied.options(EXPORT) == api.ExportOptions(weight_scale="mul")
    assert demo_run.options(EXPORT) == api.ExportOptions()
    graph = copied.onnx.read_bytes()
    api.scales(copied.root, api.RescaleOptions(clip=api.Clipping("mse")))
    assert copied.onnx.read_bytes() == graph
    assert copied.options(EXPORT) == api.ExportOptions(weight_scale="mul")
    api.export(copied.root)
    for mine, theirs in ((copied.onnx, demo_run.onnx), (copied.onnx_fp32, demo_run.onnx_fp32)):
        assert mine.read_bytes() == theirs.read_bytes()
    assert copied.options(EXPORT) == api.ExportOptions()


def test_the_form_is_refused_beside_a_precision_that_has_no_codes_in_fp8() -> None:
    with pytest.raises(InputError) as refused:
        api.ExportOptions(precision="int8", weight_scale="mul")
    assert str(refused.value) == (
        "--apply-scales mul: is for the FP8 graph, not for --precision int8; leave one of them out"
    )
