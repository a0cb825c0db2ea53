"""Convert a graph between the two forms of its weights' scales, by one pass over the ONNX file.

`dq`: the scale of each channel is in the weight's DequantizeLinear, as compressed-tensors and ModelOpt have it;
TensorRT-RTX moves it behind the GEMM by itself. `mul`: the scales are applied behind the GEMM, and
DequantizeLinear multiplies by one number. This is for builders that take a GEMM of codes only where both sides have
a single scale.

    dq    x -> Q -> DQ(s_x) ─────────────┐
          codes -> DQ(s_w[channel]) -> T -> MatMul ->                                        Add bias
    mul   x -> Q -> DQ(s_x), FP32 ───────┐
          codes -> DQ(1), FP32 -> T ─────-> MatMul, FP32 -> Mul(s_w[channel]) -> Cast ->     Add bias

In `mul` the GEMM is FP32: the sum is scaled before it is rounded once, and cannot overflow. Its one scale is 1, so
that the factor behind the GEMM is the checkpoint's `weight_scale` itself, read from its place: the graph still holds
no scale, and the way back gives the same bytes. Another power of two would be as exact and wins nothing in FP32
(docs/decisions/0011).

Works on ONNX's protobuf messages with the package `onnx`, which an engine host has, without torch and onnx_ir.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from ...core.files import replacing
from ...options import WeightScale
from ..lint.rules_gemms import activation_of
from ..onnx_file import names
from ..onnx_file.indexed import GraphGemm, Indexed, Operand, nodes_of
from ..onnx_file.loading import load_graph
from ..onnx_file.tensors import attribute
from ..onnx_file.weight_scales import behind, factors_of, output_axis, rescale_of, weight_of

#: The one scale of all weights in the form `mul`.
UNIT = "unit_scale"


def other(form: WeightScale) -> WeightScale:
    """The other of the two forms."""
    return "mul" if form == "dq" else "dq"


def recorded_form(graph: Indexed) -> WeightScale:
    """Read the form in which a graph was written."""
    return "mul" if UNIT in graph.initializers else "dq"


def write_form(source: Path, path: Path, form: WeightScale) -> None:
    """Write the graph `source` in a form to `path`, which may be `source`.

    In another directory it reads the same external data, by links (`link_data`).
    """
    model = load_graph(source).model
    in_form(model, source.parent, form)
    with replacing(path) as partial:
        partial.write_bytes(model.SerializeToString())


def link_data(graph: Path, directory: Path) -> list[Path]:
    """Link the external data of a graph into `directory`, with relative links; return the links that are new.

    TensorRT's parser follows links, and refuses a location with `..` in it.
    """
    held = {directory / where.location: place.path for *_, where, place in load_graph(graph).storage.external}
    made = [link for link in held if not os.path.lexists(link)]
    for link in made:
        link.symlink_to(os.path.relpath(held[link], directory))
    return made


def in_form(model: ModelProto, directory: Path, form: WeightScale) -> None:
    """Put every GEMM on FP8 codes of a model into a form, in place; the scales lie in `directory`.

    1. A GEMM whose weight has one scale for each channel becomes `mul`. 2. One in the form `mul` of this pass
    becomes `dq`. 3. Left alone: a GEMM that is in the form already, whose weight has a single scale, that is a Gemm
    or Conv (its own bias would be scaled too), or one side of which has another reader, which would get another type.
    """
    graph = Indexed(model, directory)
    fits, change = {"dq": (_is_mul, _to_dq), "mul": (_is_dq, _to_mul)}[form]
    scaled = [
        _scaled(graph, matmul) for matmul in _alone(graph, [matmul for matmul in graph.gemms if fits(graph, matmul)])
    ]
    gone = {node.output[0] for gemm in scaled for node in gemm.behind}
    remaining = [[(node.output[0], node) for node in part.node if node.output[0] not in gone] for part in graph.graphs]
    made = {gemm.matmul.node.output[0]: change(gemm) for gemm in scaled}
    types = {value: kind for gemm in scaled for value, kind in _answer(graph, gemm, form)}
    for part, of_it in zip(graph.graphs, remaining, strict=True):  # a branch before the node that has it
        nodes = [new_node for value, node in of_it for new_node in made.get(value, [node])]
        del part.node[:]  # what was read of it is stale from here on
        part.node.extend(nodes)
        for value in part.value_info:
            value.type.tensor_type.elem_type = types.get(value.name, value.type.tensor_type.elem_type)
    _keep_unit(model.graph)


@dataclass(frozen=True)
class _Scaled:
    """A GEMM to convert: the DequantizeLinear of its weight, the tensor of channel scales, the compute type of the
    graph, and the nodes of `mul` behind it.
    """

    matmul: GraphGemm
    weight: NodeProto
    scales: str
    compute: int
    behind: list[NodeProto]


def _scaled(graph: Indexed, matmul: GraphGemm) -> _Scaled:
    weight = weight_of(graph, matmul)
    after = behind(graph, matmul)
    assert weight is not None, "`_is_dq` and `_is_mul` looked"
    assert weight.dequantize is not None, "its weight is codes"
    if after:
        compute = attribute(after[-1], "to", TensorProto.FLOAT)
        return _Scaled(matmul, weight.dequantize, factors_of(graph, after[0]), compute, after)
    compute = attribute(weight.dequantize, "output_dtype", TensorProto.FLOAT)
    return _Scaled(matmul, weight.dequantize, weight.dequantize.input[1], compute, after)


def _is_dq(graph: Indexed, matmul: GraphGemm) -> bool:
    weight = weight_of(graph, matmul)
    if matmul.node.op_type != "MatMul" or weight is None or weight.dequantize is None:
        return False
    scale = graph.constant(weight.dequantize.input[1])
    dims = graph.initializers[weight.dequantize.input[0]].dims
    if activation_of(graph, matmul) is None or scale is None or scale.ndim != 1 or len(dims) != 2:
        return False
    axis = output_axis(matmul, weight, len(dims))
    return all(side.clean for side in matmul.operands) and attribute(weight.dequantize, "axis", 1) == axis


def _is_mul(graph: Indexed, matmul: GraphGemm) -> bool:
    weight = weight_of(graph, matmul)
    rescale = rescale_of(graph, matmul)
    if weight is None or weight.dequantize is None or rescale is None or activation_of(graph, matmul) is None:
        return False
    return weight.dequantize.input[1] == UNIT and len(graph.readers[matmul.node.output[0]]) == 1


def _alone(graph: Indexed, matmuls: list[GraphGemm]) -> list[GraphGemm]:
    """Select the `matmuls` whose two operands are read by GEMMs among `matmuls` alone."""
    while True:
        reading = {matmul.node.output[0] for matmul in matmuls}
        convertible = [
            matmul
            for matmul in matmuls
            if all(node.output[0] in reading for side in matmul.operands for node in _read_by(graph, side))
        ]
        if len(convertible) == len(matmuls):
            return convertible
        matmuls = convertible


def _read_by(graph: Indexed, side: Operand) -> Iterator[NodeProto]:
    """Yield the nodes that read the result of a DequantizeLinear, through Transposes."""
    assert side.dequantize is not None, "both sides are codes, as `activation_of` found"
    waiting = [side.dequantize.output[0]]
    for value in waiting:
        for node, _ in graph.readers.get(value, ()):
            if node.op_type == "Transpose":
                waiting.append(node.output[0])
            else:
                yield node


def _to_mul(scaled: _Scaled) -> list[NodeProto]:
    """Make the nodes that replace a GEMM in `mul`; the GEMM and its weight's DequantizeLinear are changed in
    place.
    """
    node = scaled.matmul.node
    name = scaled.matmul.node.name
    result = scaled.matmul.node.output[0]
    scaled.weight.input[1], node.output[0] = UNIT, f"{name}.sum"
    in_fp32 = scaled.compute == TensorProto.FLOAT
    made = result if in_fp32 else f"{names.rescale(name)}.output"
    rescale = helper.make_node("Mul", [node.output[0], scaled.scales], [made], names.rescale(name))
    cast = helper.make_node("Cast", [made], [result], names.rescale_cast(name), to=scaled.compute)
    if in_fp32:
        return [node, rescale]
    return [node, rescale, cast]


def _to_dq(scaled: _Scaled) -> list[NodeProto]:
    """Make the node that replaces a GEMM in `dq`; it and its weight's DequantizeLinear are changed in place."""
    scaled.weight.input[1] = scaled.scales
    scaled.matmul.node.output[0] = scaled.behind[-1].output[0]
    return [scaled.matmul.node]


def _answer(graph: Indexed, scaled: _Scaled, form: WeightScale) -> Iterator[tuple[str, int]]:
    """Set the output type of both sides of a GEMM to that of the form; yield the values whose type changes, and it."""
    kind = TensorProto.FLOAT if form == "mul" else scaled.compute
    for value, side in zip(scaled.matmul.node.input, scaled.matmul.operands, strict=True):
        assert side.dequantize is not None, "both sides are codes"
        _set_output_type(side.dequantize, kind)
        while value != side.dequantize.output[0]:
            yield value, kind
            value = graph.producers[value].input[0]
        yield value, kind


def _set_output_type(dequantize: NodeProto, kind: int) -> None:
    """Let a DequantizeLinear state its output type, which without `output_dtype` is that of its scale."""
    entry = next((entry for entry in dequantize.attribute if entry.name == "output_dtype"), None)
    if entry is None:
        dequantize.attribute.append(helper.make_attribute("output_dtype", kind))
    else:
        entry.i = kind


def _keep_unit(graph: GraphProto) -> None:
    """Keep the unit scale of the form `mul` in the file exactly where it is read."""
    read = any(UNIT in node.input for node in nodes_of(graph))
    held = [tensor for tensor in graph.initializer if tensor.name == UNIT]
    if read and not held:
        graph.initializer.append(numpy_helper.from_array(np.array(1, np.float32), UNIT))
    for tensor in held if not read else ():
        graph.initializer.remove(tensor)
