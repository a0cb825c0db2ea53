"""The passes between what torch's exporter gives and `model.onnx`. Each changes the graph in place and says what for.

They work on onnx_ir, whose tensors may lie in files: no pass reads a weight.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    InlinePass,
    LiftConstantsToInitializersPass,
    NameFixPass,
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
)

from ...core.headers import read_header
from .adapters import initializer_name
from .renaming import values_of

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


@dataclass(frozen=True)
class TensorBytes:
    """The place of a tensor's bytes: `file` in the model's directory, `offset` and `length` in bytes."""

    file: str
    offset: int
    length: int
    dtype: ir.DataType
    shape: tuple[int, ...]


def stored_tensors(directory: Path) -> dict[str, TensorBytes]:
    """Every tensor in the safetensors files of `directory` that has a type of ONNX's, from their headers alone."""
    files = [path.name for path in sorted(directory.glob("*.safetensors"))]
    return {name: tensor for file in files for name, tensor in stored_in(directory, file).items()}


def stored_in(directory: Path, file: str) -> dict[str, TensorBytes]:
    """Return the places of the tensors of one `file` in `directory` or below."""
    return {
        name: TensorBytes(file, at.start, at.end - at.start, ELEMENT_TYPES[at.dtype], at.shape)
        for name, at in read_header(directory / file).items()
        if at.dtype in ELEMENT_TYPES
    }


@dataclass(frozen=True)
class Tensors:
    """The sources of the values of a model's tensors: those in the safetensors of `directory`; `aliases` of a tied
    tensor's name, or of one stored under another; `computed`: buffers that no file holds.
    """

    directory: Path
    stored: Mapping[str, TensorBytes]
    aliases: Mapping[str, str]
    computed: Mapping[str, ir.TensorProtocol]

    def types(self) -> dict[str, ir.DataType]:
        """Name -> element type in the file, under both names of a tensor that has two."""
        found = {name: tensor.dtype for name, tensor in self.stored.items()}
        return {name: found[other] for name, other in self.aliases.items() if other in found} | found

    def external(self, name: str, shape: ir.Shape | None) -> ir.ExternalTensor:
        """The stored tensor `name`, declared to have `shape`."""
        at = self.stored.get(name) or self.stored[self.aliases[name]]
        shape = shape if shape is not None else ir.Shape(at.shape)
        return ir.ExternalTensor(
            at.file, at.offset, at.length, at.dtype, shape=shape, name=name, base_dir=self.directory
        )

    def like(self, name: str, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        """The tensor `name`, of a layer, as `tensor` is the same of another layer: stored, computed, or a constant."""
        if isinstance(tensor, ir.ExternalTensor):
            return self.external(name, tensor.shape)
        return self.computed[name] if name in self.computed else ir.Tensor(tensor.numpy(), tensor.dtype, name=name)


def point_at_weights(model: ir.Model, tensors: Tensors) -> None:
    """Make every initializer external data in the safetensors of the model's directory.

    1. `M.input.scale`, `A.fp8q_k.scale` and `A.fp8q_attention.q.scale` are stored as `M.input_scale`, `A.k_scale` and
       `A.attention.q_scale`. 2. A tied tensor lies under its other name, and an adapter's under PEFT's. 3. A buffer
       that no file holds (rotary frequencies) is kept in the graph. 4. A scale stored [N, 1] or [1] is declared [N] or
       []: the bytes are the same.
    """
    for name, value in [*model.graph.initializers.items()]:
        plain = name.removeprefix("model.")
        if plain in tensors.computed:
            value.const_value, value.name = tensors.computed[plain], plain
        elif name.startswith("model."):
            key = (
                plain.replace(".input.scale", ".input_scale")
                .replace(".fp8q_k.scale", ".k_scale")
                .replace(".fp8q_v.scale", ".v_scale")
            )
            key = initializer_name(re.sub(r"\.fp8q_attention\.([qkvp])\.scale$", r".attention.\1_scale", key))
            value.const_value, value.name = tensors.external(key, value.shape), key


def widen_initializers(model: ir.Model) -> None:
    """Put a Cast after every stored initializer whose type is not the one the graph computes in, before its first
    reader.

    The FP32 and FP16 graphs read the BF16 tensors of the checkpoint: one copy of the weights serves all. The declared
    type of the value becomes the stored one.
    """
    for node in [*model.graph]:
        for value in node.inputs:
            if value is None or not value.is_initializer() or value.dtype is None:
                continue
            stored = value.const_value.dtype if value.const_value is not None else value.dtype
            if stored != value.dtype:
                _widen(model, value, stored, node)


def _widen(model: ir.Model, value: ir.Value, stored: ir.DataType, before: ir.Node) -> None:
    """Let the readers of `value` read its Cast from the type `stored`, a node put `before` another."""
    assert value.dtype is not None, "the exporter gives its initializers types"
    cast = ir.node(
        "Cast", [value], {"to": value.dtype.value}, name=f"{value.name}.cast", metadata_props=before.metadata_props
    )
    wide = cast.outputs[0]
    wide.name, wide.dtype, wide.shape = f"{value.name}.wide", value.dtype, value.shape
    for usage in [*value.uses()]:
        if usage.node is not cast:
            usage.node.replace_input_with(usage.idx, wide)
    value.dtype = stored
    model.graph.insert_before(before, cast)


def order_initializers(model: ir.Model) -> None:
    """Let the initializers stand in the order in which the nodes read them."""
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    read = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None)
    ordered = [value for value in read if value.is_initializer()]
    model.graph.initializers.clear()
    for value in ordered:
        model.graph.register_initializer(value)


def simplify(model: ir.Model) -> None:
    """Fold what is constant, merge what is computed twice, drop what nobody reads.

    Only shapes and small constants are folded, and no stored tensor has a value here: a quantized weight stays a
    constant in front of its DequantizeLinear, and scales, biases and norms that happen to be equal stay apart, since
    those of another checkpoint of the same shape may differ. So the graph follows from config.json and the safetensors'
    headers alone. The passes are those of `onnxscript.optimizer.optimize_ir` without the rules that no decoder needs:
    one of them (two Slices into a Split) looks through the whole graph at every node, so that the time grew with the
    square of the layers.
    """
    from onnxscript.optimizer import fold_constants_ir
    from onnxscript.rewriter import RewritePass

    stored = [value for value in model.graph.initializers.values() if isinstance(value.const_value, ir.ExternalTensor)]
    tensors = [value.const_value for value in stored]
    for value in stored:
        value.const_value = None
    InlinePass()(model)
    for _ in range(2):  # what one rule uncovers another folds
        fold_constants_ir(model, onnx_shape_inference=True, should_fold=_foldable)
        RewritePass(_rules())(model)
        RemoveUnusedNodesPass()(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    merge_constants(model)
    for merge in (
        CommonSubexpressionEliminationPass(),
        RemoveUnusedNodesPass(),
        RemoveUnusedOpsetsPass(),
        NameFixPass(),
    ):
        merge(model)
    for value, tensor in zip(stored, tensors, strict=True):
        value.const_value = tensor


def merge_constants(model: ir.Model) -> None:
    """Make one of the constants of the same type, shape and bytes. A stored tensor (its value is not known yet) is none
    of them.
    """
    found: dict[tuple[object, ...], ir.Value] = {}
    for name, value in [*model.graph.initializers.items()]:
        tensor = value.const_value
        if tensor is None:
            continue
        kept = found.setdefault((tensor.dtype, tuple(tensor.shape), tensor.tobytes()), value)
        if kept is not value:
            value.replace_all_uses_with(kept)
            model.graph.initializers.pop(name)


def _rules() -> list["RewriteRule"]:
    """Return onnxscript's rules that simplify the graph of a decoder."""
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
    for value in values_of(model):
        value.metadata_props.clear()
        value.doc_string = None
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.producer_name = "fp8q"
    model.ir_version = IR_VERSION
