"""The passes between what torch's exporter gives and `model.onnx`. Each changes the graph in place and says what for.

They work on onnx_ir, whose tensors may lie in files: no pass reads a weight.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    DeduplicateInitializersPass,
    InlinePass,
    LiftConstantsToInitializersPass,
    NameFixPass,
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
)

from ...headers import read_header
from .. import names

if TYPE_CHECKING:
    from onnxscript.rewriter.pattern import RewriteRule

#: safetensors' names of element types, as ONNX's.
ELEMENT_TYPES = {
    "BF16": ir.DataType.BFLOAT16,
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "F8_E4M3": ir.DataType.FLOAT8E4M3FN,
    "I8": ir.DataType.INT8,
    "I64": ir.DataType.INT64,
    "I32": ir.DataType.INT32,
    "BOOL": ir.DataType.BOOL,
}
#: The version of ONNX's file format that came with opset 23.
IR_VERSION = 11
SCOPES = "pkg.torch.onnx.name_scopes"


@dataclass(frozen=True)
class Stored:
    """Where a tensor's bytes lie: `file` in the model's directory, `offset` and `length` in bytes."""

    file: str
    offset: int
    length: int
    dtype: ir.DataType
    shape: tuple[int, ...]


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """Every tensor in the safetensors files of `directory` that has a type of ONNX's, from their headers alone."""
    return {
        name: Stored(path.name, at.start, at.end - at.start, ELEMENT_TYPES[at.dtype], at.shape)
        for path in sorted(directory.glob("*.safetensors"))
        for name, at in read_header(path).items()
        if at.dtype in ELEMENT_TYPES
    }


def name_interface(model: ir.Model, layers: int) -> None:
    """Name inputs, outputs and dynamic dimensions as DESIGN section 7 does.

    1. `past_key_values.N.key|value` and `new_key_values.N.key|value`, in the order of tracing. 2. The exporter's
       symbols become batch, seq and capacity wherever a shape mentions them, in sums too.
    """
    inputs, outputs = model.graph.inputs, model.graph.outputs
    parts = [f"{layer}.{part}" for layer in range(layers) for part in ("key", "value")]
    for value, part in zip(inputs[3:], parts, strict=True):
        value.name = f"past_key_values.{part}"
    for value, name in zip(outputs, ["logits", *(f"new_key_values.{part}" for part in parts)], strict=True):
        value.name = name
    tokens, past = inputs[0].shape, inputs[3].shape
    assert tokens is not None, "the exporter gives its inputs shapes"
    assert past is not None, "the exporter gives its inputs shapes"
    symbols = {str(tokens[0]): "batch", str(tokens[1]): "seq", str(past[2]): "capacity"}
    for value in _values(model):
        if value.shape is not None:
            value.shape = ir.Shape(
                [dim if isinstance(dim, int) else _renamed(str(dim), symbols) for dim in value.shape]
            )
    outputs[0].shape = ir.Shape(["batch", "seq", outputs[0].shape[2] if outputs[0].shape else None])


def _renamed(dimension: str, symbols: Mapping[str, str]) -> str:
    words = re.sub(r"\w+", lambda match: symbols.get(match[0], match[0]), dimension)
    return "capacity + seq" if words in ("seq + capacity", "capacity + seq") else words


def _values(model: ir.Model) -> list[ir.Value]:
    return [*model.graph.inputs, *(output for node in model.graph for output in node.outputs)]


def name_nodes(model: ir.Model, attention: Iterable[str] = ()) -> None:
    """Give every product, Q and DQ the name of its Hugging Face module, from the scopes the exporter noted.

    1. In a `GraphLinear`: the DequantizeLinear of its weight, its MatMul, the Add of its bias. 2. In its `input`: Q and
       DQ of the activation.
    3. In a layer's `fp8q_k` and `fp8q_v`: Q, DQ of the new and DQ of the past. 4. A linear layer in a wide type: its
       MatMul and Add. 5. In a layer's
    `fp8q_attention`: both products, Q and DQ. 6. The Attention of an attention module. 7. The two products of a module
    of `attention` that has none.
    """
    scopes = {node: _scope(node) for node in model.graph}
    matrices = {
        name.removeprefix("model.").removesuffix(".weight")
        for name in model.graph.initializers
        if name.endswith(".weight")
    }
    linear = {scope for node, scope in scopes.items() if node.op_type in ("MatMul", "Gemm")} & matrices
    for node, scope in scopes.items():
        if name := _node_name(node, scope, scope in linear):
            node.name = name
    for module in attention:
        products = [node for node, scope in scopes.items() if scope == module and node.op_type == "MatMul"]
        if len(products) == len(names.ATTENTION_PRODUCTS):
            for node, product in zip(products, names.ATTENTION_PRODUCTS, strict=True):
                node.name = names.attention_product(module, product)


def _scope(node: ir.Node) -> str:
    """The Hugging Face module whose forward pass made `node`; empty where that is not known."""
    scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))
    return str(scopes[-2]).removeprefix("model.") if len(scopes) > 1 else ""


def _node_name(node: ir.Node, scope: str, linear: bool) -> str | None:
    owner, _, last = scope.rpartition(".")
    if node.op_type == "Attention" and scope:
        return names.attention(scope)
    if last == "input":
        return {"QuantizeLinear": names.input_quantize(owner), "DequantizeLinear": names.input_dequantize(owner)}.get(
            node.op_type
        )
    if owner.endswith(".fp8q_attention"):
        module = owner.removesuffix(".fp8q_attention")
        if last in names.ATTENTION_PRODUCTS:
            return names.attention_product(module, last)
        return {
            "QuantizeLinear": names.attention_quantize(module, last),
            "DequantizeLinear": names.attention_dequantize(module, last),
        }.get(node.op_type)
    if last in ("fp8q_k", "fp8q_v"):
        part = last[-1]
        past = node.inputs[0] is not None and node.inputs[0].is_graph_input()
        dequantize = names.cache_dequantize_past(owner, part) if past else names.cache_dequantize(owner, part)
        return {"QuantizeLinear": names.cache_quantize(owner, part), "DequantizeLinear": dequantize}.get(node.op_type)
    if linear:
        kinds = {
            "MatMul": names.matmul(scope),
            "Gemm": names.matmul(scope),
            "Add": names.bias_add(scope),
            "DequantizeLinear": names.weight_dequantize(scope),
        }
        return kinds.get(node.op_type)
    return None


def point_at_weights(
    model: ir.Model, directory: Path, aliases: Mapping[str, str], buffers: Mapping[str, ir.TensorProtocol]
) -> None:
    """Make every initializer external data in the safetensors of `directory`.

    1. `M.input.scale`, `A.fp8q_k.scale` and `A.fp8q_attention.q.scale` are stored as `M.input_scale`, `A.k_scale` and
       `A.attention.q_scale`. 2. A tied tensor lies under its other name (`aliases`).
    3. A buffer that no file holds (rotary frequencies) has its value in `buffers` and is kept in the graph. 4. A scale
       stored [N, 1] or [1] is declared [N] or []: the bytes are the same.
    """
    stored = stored_tensors(directory)
    for name, value in [*model.graph.initializers.items()]:
        plain = name.removeprefix("model.")
        if plain in buffers:
            value.const_value = buffers[plain]
            continue
        if name.startswith("model."):
            key = (
                plain.replace(".input.scale", ".input_scale")
                .replace(".fp8q_k.scale", ".k_scale")
                .replace(".fp8q_v.scale", ".v_scale")
            )
            key = re.sub(r"\.fp8q_attention\.([qkvp])\.scale$", r".attention.\1_scale", key)
            at = stored.get(key) or stored[aliases[key]]
            shape = value.shape if value.shape is not None else ir.Shape(at.shape)
            value.const_value = ir.ExternalTensor(
                at.file, at.offset, at.length, at.dtype, shape=shape, name=key, base_dir=directory
            )
            value.name = key


def widen_initializers(model: ir.Model) -> None:
    """Put a Cast after every stored initializer whose type is not the one the graph computes in.

    The FP32 and FP16 graphs read the BF16 tensors of the checkpoint: one copy of the weights serves all. The declared
    type of the value becomes the stored one.
    """
    for value in [*model.graph.initializers.values()]:
        stored = value.const_value.dtype if value.const_value is not None else value.dtype
        if stored is None or value.dtype is None or stored == value.dtype:
            continue
        cast = ir.node("Cast", [value], {"to": value.dtype.value}, name=f"{value.name}.cast")
        cast.outputs[0].name, cast.outputs[0].dtype, cast.outputs[0].shape = (
            f"{value.name}.wide",
            value.dtype,
            value.shape,
        )
        for usage in [*value.uses()]:
            if usage.node is not cast:
                usage.node.replace_input_with(usage.idx, cast.outputs[0])
        value.dtype = stored
        model.graph.insert_before(model.graph[0], cast)


def simplify(model: ir.Model) -> None:
    """Fold what is constant, merge what is computed twice, drop what nobody reads.

    Only shapes and small constants are folded: a quantized weight stays a constant in front of its DequantizeLinear,
    and no weight is read. Scales that happen to be equal stay apart, since scales chosen again may differ: to the
    optimizer each is another number, and none that a model computes with (it would make one constant of a scale and of
    an exponent 2). The passes are those of `onnxscript.optimizer.optimize_ir` without the rules that no decoder needs:
    one of them (two Slices into a Split) looks through the whole graph at every node, so that the time grew with the
    square of the layers.
    """
    from onnxscript.optimizer import fold_constants_ir
    from onnxscript.rewriter import RewritePass

    scales = {name: value.const_value for name, value in model.graph.initializers.items() if name.endswith("_scale")}
    for number, (name, scale) in enumerate(scales.items(), 1):
        assert scale is not None, "point_at_weights gave every scale its place"
        model.graph.initializers[name].const_value = ir.tensor(
            np.full(scale.shape.numpy(), 2.0**-100 * (1 + number * 2.0**-20), np.float32), name=name
        )
    InlinePass()(model)
    for _ in range(2):  # what one rule uncovers another folds
        fold_constants_ir(model, onnx_shape_inference=True, should_fold=_foldable)
        RewritePass(_rules())(model)
        RemoveUnusedNodesPass()(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    for merge in (
        DeduplicateInitializersPass(),
        CommonSubexpressionEliminationPass(),
        RemoveUnusedNodesPass(),
        RemoveUnusedOpsetsPass(),
        NameFixPass(),
    ):
        merge(model)
    for name, value in model.graph.initializers.items():
        value.const_value = scales.get(name, value.const_value)


def _rules() -> list["RewriteRule"]:
    """What onnxscript can simplify in the graph of a decoder."""
    from onnxscript.rewriter.rules import common

    return [
        *common.mul_by_1_rule.commute(),
        *common.add_0_rule.commute(),
        common.sub_0_rule,
        common.div_by_1_rule,
        common.cast_cast_rule,
        common.no_op_cast_rule,
        common.cast_constant_of_shape_rule,
        common.cast_constant_of_shape_without_value_rule,
        common.collapse_slice_rule,
        common.collapse_slice2_rule,
        common.no_op_expand_rule,
        common.no_op_transpose_rule,
        common.transpose_transpose_rule,
        common.materialize_reshape_shape_rule,
        common.reshape_reshape_rule,
        common.squeeze_reshape_1d_rule,
        common.unsqueeze_unsqueeze_rule,
        common.no_op_dynamic_scatter_nd_rule,
        common.no_op_static_scatter_nd_rule,
    ]


def _foldable(node: ir.Node) -> bool | None:
    keeps = node.op_type in ("DequantizeLinear", "QuantizeLinear") or any(
        value is not None and value.is_initializer() for value in node.inputs
    )
    return False if keeps else None


def strip(model: ir.Model) -> None:
    """Drop the exporter's notes: stack traces name files of the machine that exported."""
    for value in _values(model):
        value.metadata_props.clear()
        value.doc_string = None
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.producer_name = "fp8q"
    model.ir_version = IR_VERSION
