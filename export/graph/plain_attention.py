"""Write a graph's Attention nodes as plain GEMMs and a softmax, by one pass over the ONNX file.

TensorRT makes an IAttention of an Attention node, which by default is one fused kernel or a failed build: its parser
gives no way to let it be decomposed (NVIDIA's TensorRT documentation, "Fused Attention"). Plain GEMMs and a softmax
build everywhere, and TensorRT fuses them where it has a kernel.

    Attention(q, k, v, allowed)    q [batch, heads, seq, size], k and v [batch, key heads, slots, size]

    q -> Reshape [batch, key heads, group, seq, size] ──────┐
    k -> Unsqueeze, Transpose [batch, key heads, 1, size, slots] -> MatMul -> Cast FP32 -> Mul(scale)
      -> Where(allowed) -> Softmax -> Cast ─────────────────┐
    v -> Unsqueeze [batch, key heads, 1, slots, size] ──────-> MatMul -> Reshape [batch, heads, seq, size]

This is what `export.modules.attention` exports where no fused kernel is known. Works on ONNX's protobuf messages with
the package `onnx`, which an engine host has, without torch and onnx_ir.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper, shape_inference

from ...core.files import replacing
from ..onnx_file.loading import load_graph

#: The inputs that are converted: queries, keys, values, and a mask of booleans.
INPUTS = 4
#: The score of a key that is not allowed.
HIDDEN = float(np.finfo(np.float32).min)


def write_plain_attention(source: Path, path: Path) -> int:
    """Write the graph `source` with plain attention to `path`; return the number of nodes that were replaced.

    In another directory it reads the same external data, by links (`weight_scale_form.link_data`). Nodes whose inputs
    are not those above, or with attributes besides `scale` that are not zero, stay as they are; where all do, nothing
    is written.
    """
    model = load_graph(source).model
    inferred = shape_inference.infer_shapes(model, data_prop=True).graph
    values = {value.name: value for value in (*inferred.value_info, *inferred.input)}
    shapes = {node.name: shape for node in model.graph.node if (shape := AttentionShape.of(node, values))}
    if shapes:
        nodes: list[NodeProto] = []
        for node in model.graph.node:
            nodes += _plain(model.graph, node, shapes[node.name]) if node.name in shapes else [node]
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        with replacing(path) as partial:
            partial.write_bytes(model.SerializeToString())
    return len(shapes)


@dataclass(frozen=True)
class AttentionShape:
    """The query heads, key heads and head size of an Attention node, the type of its values and the factor of its
    scores.
    """

    heads: int
    key_heads: int
    size: int
    kind: int
    scale: float

    @classmethod
    def of(cls, node: NodeProto, values: Mapping[str, ValueInfoProto]) -> "AttentionShape | None":
        """Read the shape of a node that can be converted; None of others."""
        if node.op_type != "Attention" or len(node.input) != INPUTS or not all(name in values for name in node.input):
            return None
        attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        scale = attributes.pop("scale", None)
        query, key, _, mask = (values[name].type.tensor_type for name in node.input)
        if scale is None or any(attributes.values()) or len(node.output) != 1 or mask.elem_type != TensorProto.BOOL:
            return None
        heads = query.shape.dim[1].dim_value
        key_heads = key.shape.dim[1].dim_value
        size = query.shape.dim[3].dim_value
        known = len(mask.shape.dim) == INPUTS and mask.shape.dim[1].dim_value == 1 and heads and key_heads and size
        if known:
            return cls(heads, key_heads, size, query.elem_type, scale)
        return None


def _plain(graph: GraphProto, node: NodeProto, shape: AttentionShape) -> list[NodeProto]:
    """Make the nodes that replace an Attention node; their constants become initializers of `graph`."""
    query, key, value, allowed = node.input
    made: list[NodeProto] = []

    def constant(part: str, number: object, dtype: type = np.int64) -> str:
        graph.initializer.append(numpy_helper.from_array(np.array(number, dtype), f"{node.name}.{part}"))
        return f"{node.name}.{part}"

    def make(operator: str, part: str, *inputs: str, **attributes: Any) -> str:
        name = f"{node.name}.{part}"
        made.append(helper.make_node(operator, inputs, [f"{name}.output"], name, **attributes))
        return f"{name}.output"

    group = shape.heads // shape.key_heads
    axis = constant("group_axis", [2])
    grouped = constant("grouped", [0, shape.key_heads, group, -1, shape.size])
    queries = make("Reshape", "queries", query, grouped)
    keys = make("Transpose", "keys", make("Unsqueeze", "key_group", key, axis), perm=[0, 1, 2, 4, 3])
    products = make("Cast", "products_fp32", make("MatMul", "products", queries, keys), to=TensorProto.FLOAT)
    scores = make("Mul", "scores", products, constant("scale", shape.scale, np.float32))
    seen = make("Unsqueeze", "seen", allowed, axis)
    masked = make("Where", "masked", seen, scores, constant("hidden", HIDDEN, np.float32))
    weights = make("Cast", "weights", make("Softmax", "softmax", masked, axis=-1), to=shape.kind)
    answers = make("MatMul", "answers", weights, make("Unsqueeze", "value_group", value, axis))
    make("Reshape", "heads", answers, constant("heads_shape", [0, shape.heads, -1, shape.size]))
    made[-1].output[0] = node.output[0]
    return made
