"""The pass that makes heads of a fused product before it is cut: the same numbers, other products left alone."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from fp8q.export.graph.heads import split_by_heads

BATCH, SEQ, WIDTH, SIZE = 2, 5, 12, 4
X = np.random.default_rng(0).normal(size=(BATCH, SEQ, WIDTH)).astype(np.float32)


def fused(
    product: str = "h.0.attn.c_attn.matmul",
    axis: int = 2,
    perm: tuple[int, ...] = (0, 2, 1, 3),
    sizes: tuple[int, ...] = (8, 4, 4),
) -> onnx.ModelProto:
    """Split of a product on its last axis, whose parts become heads of `SIZE`; the first part's are what leaves the
    graph.
    """
    weight = np.random.default_rng(1).normal(size=(WIDTH, sum(sizes))).astype(np.float32)
    constants = [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(np.array(sizes), "sizes")]
    nodes = [helper.make_node("MatMul", ["x", "weight"], ["product"], name=product)]
    nodes.append(
        helper.make_node("Split", ["product", "sizes"], [f"part{i}" for i in range(len(sizes))], name="cut", axis=axis)
    )
    shapes = {"product": [BATCH, SEQ, sum(sizes)]}
    for i, width in enumerate(sizes):
        constants.append(numpy_helper.from_array(np.array([BATCH, SEQ, width // SIZE, SIZE]), f"shape{i}"))
        nodes.append(helper.make_node("Reshape", [f"part{i}", f"shape{i}"], [f"split{i}"], name=f"reshape{i}"))
        nodes.append(helper.make_node("Transpose", [f"split{i}"], [f"heads{i}"], name=f"transpose{i}", perm=perm))
        shapes |= {f"part{i}": [BATCH, SEQ, width], f"split{i}": [BATCH, SEQ, width // SIZE, SIZE]}
    dims = [[BATCH, SEQ, width // SIZE, SIZE] for width in sizes]
    outputs = [
        helper.make_tensor_value_info(f"heads{i}", TensorProto.FLOAT, [dim[axis] for axis in perm])
        for i, dim in enumerate(dims)
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(
        nodes,
        "fused",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)],
        outputs,
        constants,
        value_info=values,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def passed(model: onnx.ModelProto) -> onnx.ModelProto:
    converted = ir.from_proto(model)
    split_by_heads(converted)
    return ir.to_proto(converted)


def test_heads_are_cut_on_an_axis_of_their_own_and_hold_the_same_numbers() -> None:
    model = fused()
    changed = passed(model)
    onnx.checker.check_model(changed)
    assert [node.op_type for node in changed.graph.node] == ["MatMul", "Reshape", "Transpose", "Split"]
    assert {attribute.name: attribute.i for attribute in changed.graph.node[-1].attribute} == {"axis": 1}
    assert [value.name for value in changed.graph.output] == ["heads0", "heads1", "heads2"]
    for before, after in zip(
        ReferenceEvaluator(model).run(None, {"x": X}), ReferenceEvaluator(changed).run(None, {"x": X}), strict=True
    ):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(fused(product="node_matmul"), id="no module's product"),
        pytest.param(fused(perm=(0, 1, 2, 3)), id="not transposed to heads first"),
        pytest.param(fused(perm=(0, 2, 3, 1)), id="keys transposed at once"),
    ],
)
def test_anything_else_stays_as_it_is(model: onnx.ModelProto) -> None:
    assert [node.op_type for node in passed(model).graph.node] == [node.op_type for node in model.graph.node]
