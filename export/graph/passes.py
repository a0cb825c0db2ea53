"""The passes between the output of torch's exporter and `model.onnx`; each changes the graph in place.

They work on onnx_ir, whose tensors may lie in files: no pass reads a weight.

`split_by_heads` cuts a fused q/k/v GEMM into heads before it is cut into q, k and v, so that it stays one FP8 GEMM.
Without rotary embeddings (GPT-2) the keys and values go straight from the GEMM to the QuantizeLinear of an FP8 cache.
TensorRT-RTX 1.7 then moves a Split on the last axis in front of the GEMM, cuts the weight, and multiplies the pieces in
BF16 (seen in the plan; a Slice instead of the Split does the same). It does not move a Split that cuts whole heads on
an axis of their own, behind the transposition.
"""

import logging
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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

from ...calibrate.input.silence import logging_from
from ...core.headers import StoredTensor, read_header
from ..modules.operators import SIZED
from ..onnx_file import names
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
#: How to call the graph, beyond the names and shapes of its inputs; it is the graph's `doc_string`.
INTERFACE = (
    "past_key_values.N.key and .value are [batch, heads, capacity, size] in memory, and given as [batch * heads * "
    "blocks, 64, size]: the capacity is of whole blocks of 64 slots, of which attention_mask fills those that hold a "
    "key. The position of a slot is the number of slots before it that are filled: slot j holds position j where all "
    "before it are filled. Batches are padded on the left: give a padded token a position that its row has in this "
    "call, such as 0, and the mask 0, in this call and in all that follow if its new keys and values are appended; "
    "they may be left out as well."
)
#: The version of ONNX's file format that came with opset 23.
IR_VERSION = 11


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors in safetensors `files`, from the headers alone; types that ONNX lacks are left out."""
    stored = (item for file in files for item in read_header(file).items())
    return {name: tensor for name, tensor in stored if tensor.dtype in ELEMENT_TYPES}


@dataclass(frozen=True)
class Tensors:
    """The stored values of a model's tensors: those in files in `directory` or below, `aliases` (tied or stored under
    another name), and `computed` buffers, which no file holds.
    """

    directory: Path
    stored: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    computed: Mapping[str, ir.TensorProtocol]

    def types(self) -> dict[str, ir.DataType]:
        """Tensor name -> its element type in the file, under both names of a tied tensor."""
        stored_types = {name: ELEMENT_TYPES[tensor.dtype] for name, tensor in self.stored.items()}
        return {
            name: stored_types[other] for name, other in self.aliases.items() if other in stored_types
        } | stored_types

    def external(self, name: str, shape: ir.Shape | None) -> ir.ExternalTensor:
        """The stored tensor `name` as external data, declared with `shape`."""
        at = self.stored.get(name) or self.stored[self.aliases[name]]
        shape = shape if shape is not None else ir.Shape(at.shape)
        location = at.file.relative_to(self.directory).as_posix()
        return ir.ExternalTensor(
            location, at.start, at.nbytes, ELEMENT_TYPES[at.dtype], shape=shape, name=name, base_dir=self.directory
        )

    def like(self, name: str, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        """The tensor `name` of a layer that corresponds to `tensor` of another: stored, computed, or a constant."""
        if isinstance(tensor, ir.ExternalTensor):
            return self.external(name, tensor.shape)
        if name in self.computed:
            return self.computed[name]
        return ir.Tensor(tensor.numpy(), tensor.dtype, name=name)


def point_at_weights(model: ir.Model, tensors: Tensors) -> None:
    """Make every initializer external data in the safetensors of the model's directory.

    1. `M.input.scale`, `A.fp8q_k.scale` and `A.fp8q_attention.q.scale` are stored as `M.input_scale`, `A.k_scale` and
    `A.attention.q_scale`. 2. A tied tensor is stored under its other name, an adapter's under PEFT's. 3. A buffer that
    no file holds (rotary frequencies) is kept in the graph. 4. A scale stored as [N, 1] or [1] is declared as [N] or
    []: the bytes are the same.
    """
    for name, value in [*model.graph.initializers.items()]:
        plain = name.removeprefix("model.")
        if plain in tensors.computed:
            value.const_value = tensors.computed[plain]
            value.name = plain
        elif name.startswith("model."):
            key = (
                plain.replace(".input.scale", ".input_scale")
                .replace(".fp8q_k.scale", ".k_scale")
                .replace(".fp8q_v.scale", ".v_scale")
            )
            key = initializer_name(re.sub(r"\.fp8q_attention\.([qkvp])\.scale$", r".attention.\1_scale", key))
            value.const_value = tensors.external(key, value.shape)
            value.name = key


def widen_initializers(model: ir.Model) -> None:
    """Put a Cast behind every stored initializer whose type is not the graph's compute type.

    The FP32 and FP16 graphs read the BF16 tensors of the checkpoint, so that all graphs share one copy of the weights.
    The declared type of the initializer becomes the stored type.
    """
    for node in [*model.graph]:
        for value in node.inputs:
            if value is None or not value.is_initializer() or value.dtype is None:
                continue
            stored = value.const_value.dtype if value.const_value is not None else value.dtype
            if stored != value.dtype:
                _widen(model, value, stored, node)


def _widen(model: ir.Model, value: ir.Value, stored: ir.DataType, before: ir.Node) -> None:
    """Let the readers of `value` read a Cast of it from the type `stored`; the Cast is put in front of the node
    `before`.
    """
    assert value.dtype is not None, "the exporter gives its initializers types"
    cast = ir.node(
        "Cast", [value], {"to": value.dtype.value}, name=f"{value.name}.cast", metadata_props=before.metadata_props
    )
    cast_output = cast.outputs[0]
    cast_output.name = f"{value.name}.wide"
    cast_output.dtype = value.dtype
    cast_output.shape = value.shape
    for usage in [*value.uses()]:
        if usage.node is not cast:
            usage.node.replace_input_with(usage.idx, cast_output)
    value.dtype = stored
    model.graph.insert_before(before, cast)


def order_initializers(model: ir.Model) -> None:
    """Sort the initializers in the order in which the nodes read them."""
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    read = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None)
    ordered = [value for value in read if value.is_initializer()]
    model.graph.initializers.clear()
    for value in ordered:
        model.graph.register_initializer(value)


def simplify(model: ir.Model) -> None:
    """Fold constants, merge equal computations, and remove unused nodes.

    Only shapes and small constants are folded, and stored tensors have no value here. So a quantized weight stays a
    constant in front of its DequantizeLinear, and equal scales, biases and norms are not merged: those of another
    checkpoint of the same shape may differ. The graph therefore follows from config.json and the safetensors' headers
    alone. The passes are those of `onnxscript.optimizer.optimize_ir` without rules that no decoder needs; one of them
    (two Slices into a Split) searches the whole graph at every node, which took time quadratic in the number of layers.
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
    state_heads(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    with logging_from(DeduplicateInitializersPass.__module__, logging.ERROR):  # it warns of each hidden tensor
        DeduplicateInitializersPass(size_limit=sys.maxsize)(model)
    for merge in (
        CommonSubexpressionEliminationPass(),
        RemoveUnusedNodesPass(),
        RemoveUnusedOpsetsPass(),
        NameFixPass(),
    ):
        merge(model)
    for value, tensor in zip(stored, tensors, strict=True):
        value.const_value = tensor


def _rules() -> list["RewriteRule"]:
    """The rules of onnxscript that simplify the graph of a decoder."""
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


def state_sizes(model: ir.Model) -> None:
    """Turn each `SIZED` into a Reshape, which gives TensorRT the sizes of tensors that were cut and joined."""
    for node in model.graph:
        if (node.domain, node.op_type) == SIZED:
            node.domain = ""
            node.op_type = "Reshape"


def state_heads(model: ir.Model) -> None:
    """Put the size that a Reshape would infer (-1) into its shape, where it is a known number.

    TensorRT infers the number of heads from the other sizes, which it does not find to be equal behind a tail. Reshapes
    to different numbers of heads share one shape, so each gets its own.
    """
    for node in [node for node in model.graph if node.op_type == "Reshape"]:
        value = node.inputs[1]
        shape = node.outputs[0].shape
        parts = value.producer() if value is not None else None
        if parts is None or parts.op_type != "Concat" or shape is None or len(parts.inputs) != len(shape):
            continue
        inferred = [at for at, part in enumerate(parts.inputs) if _constant_of(part) == [-1]]
        if len(inferred) != 1 or not isinstance(size := shape[inferred[0]], int):
            continue
        constant = ir.node("Constant", [], attributes={"value": ir.tensor([size], ir.DataType.INT64)})
        inputs = [constant.outputs[0] if at in inferred else part for at, part in enumerate(parts.inputs)]
        concat = ir.node("Concat", inputs, attributes={"axis": 0}, metadata_props=dict(parts.metadata_props))
        model.graph.insert_before(node, [constant, concat])
        node.replace_input_with(1, concat.outputs[0])


def _constant_of(value: ir.Value | None) -> list[int] | None:
    """The numbers of a small constant; None for a value that is computed."""
    tensor = value.const_value if value is not None else None
    if tensor is None or tensor.size > 1:
        return None
    return tensor.numpy().ravel().tolist()


def strip(model: ir.Model) -> None:
    """Remove the exporter's metadata: its stack traces name files of the exporting machine."""
    for value in values_of(model):
        value.metadata_props.clear()
        value.doc_string = None
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.producer_name = "fp8q"
    model.doc_string = INTERFACE
    model.ir_version = IR_VERSION


@dataclass(frozen=True)
class Heads:
    """The heads of one part of a fused GEMM: `split` -> Reshape [batch, seq, heads, size] -> Transpose `out` [batch,
    heads, seq, size].
    """

    out: ir.Value
    count: int
    size: int


def split_by_heads(model: ir.Model) -> None:
    """Turn Split -> (Reshape -> Transpose) for each part into Reshape -> Transpose -> Split.

    1. Only where the Split cuts a module's GEMM (or its sum with a bias) on the last axis, and each part becomes
       heads of the same size. 2. Anything else stays as it is.
    """
    for split in [node for node in model.graph if node.op_type == "Split"]:
        source = split.inputs[0]
        producer = source.producer() if source is not None else None
        heads = [part for part in map(_heads, split.outputs) if part is not None]
        of_module = producer is not None and names.module_of(producer.name or "") is not None
        if (
            not of_module
            or split.attributes.get_int("axis", 0) not in (-1, 2)
            or len(heads) < len(split.outputs)
            or len({part.size for part in heads}) > 1
        ):
            continue
        shape = _constant(model, f"{split.name}.heads.shape", [0, 0, sum(part.count for part in heads), heads[0].size])
        counts = _constant(model, f"{split.name}.heads.counts", [part.count for part in heads])
        reshape = ir.node("Reshape", [source, shape], name=f"{split.name}.heads")
        transpose = ir.node(
            "Transpose", [reshape.outputs[0]], {"perm": [0, 2, 1, 3]}, name=f"{split.name}.heads.transpose"
        )
        cut = ir.node(
            "Split",
            [transpose.outputs[0], counts],
            {"axis": 1},
            num_outputs=len(heads),
            name=f"{split.name}.heads.split",
        )
        for node in (reshape, transpose, cut):
            node.metadata_props.update(split.metadata_props)
        for node in (reshape, transpose):
            node.outputs[0].name, node.outputs[0].type = f"{node.name}.output", heads[0].out.type
        model.graph.insert_after(split, [reshape, transpose, cut])
        for part, output in zip(heads, cut.outputs, strict=True):
            name = part.out.name or ""
            part.out.name = f"{name}.whole"
            output.name = name
            output.type = part.out.type
            output.shape = part.out.shape
            part.out.replace_all_uses_with(output, replace_graph_outputs=True)
    RemoveUnusedNodesPass()(model)


def _heads(part: ir.Value) -> Heads | None:
    """The heads of one part of a fused GEMM; None where the part is used in any other way."""
    reshape = _only_reader(part, "Reshape")
    transpose = _only_reader(reshape.outputs[0], "Transpose") if reshape is not None else None
    if (
        transpose is None
        or [*transpose.attributes["perm"].as_ints()] != [0, 2, 1, 3]
        or part.shape is None
        or transpose.outputs[0].shape is None
    ):
        return None
    width = part.shape[-1]
    size = transpose.outputs[0].shape[-1]
    if isinstance(width, int) and isinstance(size, int):
        return Heads(transpose.outputs[0], width // size, size)
    return None


def _only_reader(value: ir.Value, operator: str) -> ir.Node | None:
    readers = [usage.node for usage in value.uses()]
    if len(readers) == 1 and readers[0].op_type == operator and not value.is_graph_output():
        return readers[0]
    return None


def _constant(model: ir.Model, name: str, numbers: list[int]) -> ir.Value:
    tensor = ir.tensor(numbers, ir.DataType.INT64, name=name)
    value = ir.Value(
        name=name, shape=ir.Shape([len(numbers)]), type=ir.TensorType(ir.DataType.INT64), const_value=tensor
    )
    model.graph.register_initializer(value)
    return value
