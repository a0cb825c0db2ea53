"""Passes on graphs of a few nodes: which constants are one, and which number a Reshape is told."""

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from fp8q.export.graph.passes import merge_constants, state_heads, strip

Values = npt.NDArray[np.generic]


def constant(name: str, values: Values) -> ir.Value:
    tensor = ir.tensor(values, name=name)
    return ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(values.shape))


def model_of(nodes: list[ir.Node], inputs: list[ir.Value], constants: list[ir.Value]) -> ir.Model:
    outputs = [value for node in nodes for value in node.outputs if not value.uses()]
    graph = ir.Graph(inputs, outputs, nodes=nodes, initializers=constants, opset_imports={"": 23}, name="small")
    return ir.Model(graph, ir_version=11)


@pytest.mark.parametrize(
    ("other", "merged"),
    [
        (np.array([1, 2], np.int64), True),
        (np.array([[1, 2]], np.int64), False),  # the same bytes in another shape
        (np.array([1, 2], np.int64).view(np.float64), False),  # and of another type
        (np.array([1, 3], np.int64), False),
    ],
)
def test_constants_are_merged_where_type_shape_and_bytes_are_the_same(other: Values, merged: bool) -> None:
    constants = [constant("one", np.array([1, 2], np.int64)), constant("two", other)]
    nodes = [ir.node("Identity", [value]) for value in constants]
    model = model_of(nodes, [], constants)
    merge_constants(model)
    assert [*model.graph.initializers] == (["one"] if merged else ["one", "two"])
    assert (nodes[1].inputs[0] is nodes[0].inputs[0]) == merged


@pytest.mark.parametrize(
    ("sizes", "shape", "stated"),
    [
        ([2, -1, 4], (2, 3, 4), [2, 3, 4]),  # three heads of four
        ([2, 3, -1], (2, 3, 4), [2, 3, 4]),
        ([2, -1, 4], (2, None, 4), [2, -1, 4]),  # nobody knows how many
        ([-1, 3, -1], (2, 3, 4), [-1, 3, -1]),  # no runtime takes two
    ],
)
def test_the_size_that_a_reshape_would_infer_is_stated_where_it_is_known(
    sizes: list[int], shape: tuple[int | None, ...], stated: list[int]
) -> None:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2, 12]))
    parts = [constant(f"size{at}", np.array([size], np.int64)) for at, size in enumerate(sizes)]
    joined = ir.node("Concat", parts, {"axis": 0})
    reshape = ir.node("Reshape", [x, joined.outputs[0]])
    reshape.outputs[0].shape = ir.Shape(shape)
    model = model_of([joined, reshape], [x], parts)
    state_heads(model)
    shapes = reshape.inputs[1]
    concat = shapes.producer() if shapes is not None else None
    assert concat is not None
    assert [value_of(part) for part in concat.inputs] == stated


def value_of(part: ir.Value | None) -> int:
    assert part is not None
    made = part.producer()
    tensor = part.const_value if made is None else made.attributes["value"].as_tensor()
    assert tensor is not None
    return int(tensor.numpy().item())


def test_the_graph_says_how_a_padded_batch_fills_the_cache() -> None:
    """What no input's name or shape tells."""
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="g"), ir_version=11, doc_string="torch's")
    strip(model)
    assert ir.serde.serialize_model(model).doc_string == (
        "The position of a slot of past_key_values is the number of slots before it that attention_mask fills: slot j "
        "holds position j where all before it are filled. Batches are padded on the left: give a padded token a "
        "position that its row has in this call, such as 0, and the mask 0, in this call and in all that follow if its "
        "new keys and values are appended; they may be left out as well."
    )
