"""Passes on graphs of a few nodes, as ONNX text."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from fp8q.export.graph.passes import simplify, split_by_heads, state_heads, strip

HEAD = '<ir_version: 11, opset_import: ["" : 23]>'


@pytest.mark.parametrize(
    ("other", "merged"),
    [
        ("int64[2] two = {1, 2}", True),
        ("int64[1, 2] two = {1, 2}", False),  # the same bytes in another shape
        ("uint64[2] two = {1, 2}", False),  # and of another type
        ("int64[2] two = {1, 3}", False),
    ],
)
def test_constants_are_merged_where_type_shape_and_bytes_are_the_same(
    other: str, merged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Stored tensors, which have no value here, stay apart, and the library's warnings of them are not shown."""
    model = ir.from_onnx_text(f"""{HEAD}
        small (int64[2] x) => (first, second, third, fourth)
        <int64[2] one = {{1, 2}}, {other}, int64[2] stored = {{5, 6}}, int64[2] equal = {{5, 6}}> {{
          first = Reshape(x, one)
          second = Tile(x, two)
          third = Add(x, stored)
          fourth = Sub(x, equal)
        }}""")
    for name in ("stored", "equal"):
        tensor = ir.ExternalTensor("weights", 0, 16, ir.DataType.INT64, shape=ir.Shape([2]), name=name)
        model.graph.initializers[name].const_value = tensor
    simplify(model)
    read = {node.op_type: node.inputs[1].name for node in model.graph if node.inputs[1] is not None}
    assert read == {"Reshape": "one", "Tile": "one" if merged else "two", "Add": "stored", "Sub": "equal"}
    assert caplog.records == []


@pytest.mark.parametrize(
    ("sizes", "shape", "stated"),
    [
        ((2, -1, 4), "2, 3, 4", [2, 3, 4]),  # three heads of four
        ((2, 3, -1), "2, 3, 4", [2, 3, 4]),
        ((2, -1, 4), "2, heads, 4", [2, -1, 4]),  # nobody knows how many
        ((-1, 3, -1), "2, 3, 4", [-1, 3, -1]),  # no runtime takes two
    ],
)
def test_the_size_that_a_reshape_would_infer_is_stated_where_it_is_known(
    sizes: tuple[int, int, int], shape: str, stated: list[int]
) -> None:
    a, b, c = sizes
    model = ir.from_onnx_text(f"""{HEAD}
        reshaped (float[2, 12] x) => (float[{shape}] y)
        <int64[1] a = {{{a}}}, int64[1] b = {{{b}}}, int64[1] c = {{{c}}}> {{
          sizes = Concat <axis = 0> (a, b, c)
          y = Reshape(x, sizes)
        }}""")
    state_heads(model)
    reshape = next(node for node in model.graph if node.op_type == "Reshape")
    concat = reshape.inputs[1].producer() if reshape.inputs[1] is not None else None
    assert concat is not None
    assert [number(part) for part in concat.inputs] == stated


def number(value: ir.Value | None) -> int:
    """The number of a constant, an initializer or a Constant node."""
    assert value is not None
    node = value.producer()
    tensor = value.const_value if node is None else node.attributes["value"].as_tensor()
    assert tensor is not None
    return int(tensor.numpy().item())


def fused(name: str = "h.0.attn.c_attn.matmul", perm: str = "0, 2, 1, 3") -> onnx.ModelProto:
    """A fused q/k/v GEMM that is split on its last axis into two query heads, a key head and a value head of 4."""
    shapes = [[f"{size}" for size in (2, 5, heads, 4)] for heads in (2, 1, 1)]
    q, k, v = (", ".join(shape[int(axis)] for axis in perm.split(", ")) for shape in shapes)
    model = onnx.parser.parse_model(f"""{HEAD}
        fused (float[2, 5, 12] x, float[12, 16] weight) => (float[{q}] queries, float[{k}] keys, float[{v}] values)
        <int64[3] widths = {{8, 4, 4}}, int64[4] two = {{2, 5, 2, 4}}, int64[4] one = {{2, 5, 1, 4}}> {{
          ["{name}"] product = MatMul(x, weight)
          ["cut"] q, k, v = Split <axis = 2> (product, widths)
          ["rows.q"] q_heads = Reshape(q, two)
          ["heads.q"] queries = Transpose <perm = [{perm}]> (q_heads)
          ["rows.k"] k_heads = Reshape(k, one)
          ["heads.k"] keys = Transpose <perm = [{perm}]> (k_heads)
          ["rows.v"] v_heads = Reshape(v, one)
          ["heads.v"] values = Transpose <perm = [{perm}]> (v_heads)
        }}""")
    return onnx.shape_inference.infer_shapes(model)


def with_heads_split(model: onnx.ModelProto) -> onnx.ModelProto:
    converted = ir.from_proto(model)
    split_by_heads(converted)
    return ir.to_proto(converted)


def test_heads_are_cut_on_an_axis_of_their_own_and_hold_the_same_numbers() -> None:
    model = fused()
    changed = with_heads_split(model)
    onnx.checker.check_model(changed)
    assert [node.op_type for node in changed.graph.node] == ["MatMul", "Reshape", "Transpose", "Split"]
    assert {attribute.name: attribute.i for attribute in changed.graph.node[-1].attribute} == {"axis": 1}
    assert [value.name for value in changed.graph.output] == ["queries", "keys", "values"]
    random = np.random.default_rng(0)
    inputs = {
        name: random.normal(size=shape).astype(np.float32) for name, shape in (("x", (2, 5, 12)), ("weight", (12, 16)))
    }
    for before, after in zip(
        ReferenceEvaluator(model).run(None, inputs), ReferenceEvaluator(changed).run(None, inputs), strict=True
    ):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(fused(name="node_matmul"), id="no module's GEMM"),
        pytest.param(fused(perm="0, 1, 2, 3"), id="not transposed to heads first"),
        pytest.param(fused(perm="0, 2, 3, 1"), id="keys transposed at once"),
    ],
)
def test_a_split_of_anything_else_stays_as_it_is(model: onnx.ModelProto) -> None:
    assert [node.op_type for node in with_heads_split(model).graph.node] == [node.op_type for node in model.graph.node]


def test_the_graph_says_how_a_padded_batch_fills_the_cache() -> None:
    """What no input's name or shape tells."""
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="g"), ir_version=11, doc_string="torch's")
    strip(model)
    assert ir.serde.serialize_model(model).doc_string == (
        "past_key_values.N.key and .value are [batch, heads, capacity, size] in memory, and given as [batch * heads * "
        "blocks, 64, size]: the capacity is of whole blocks of 64 slots, of which attention_mask fills those that hold "
        "a key. The position of a slot is the number of slots before it that are filled: slot j holds position j where "
        "all before it are filled. Batches are padded on the left: give a padded token a position that its row has in "
        "this call, such as 0, and the mask 0, in this call and in all that follow if its new keys and values are "
        "appended; they may be left out as well."
    )
