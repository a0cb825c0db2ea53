"""Cut a fused q/k/v product into heads before it is cut into q, k and v, so that it stays one FP8 product.

Without rotary embeddings (GPT-2) the keys and values go straight from the product to the QuantizeLinear of an FP8
cache. TensorRT-RTX 1.7 then moves a Split on the last axis in front of the product, cuts the weight, and multiplies the
pieces in BF16 (seen in the plan; a Slice instead of the Split does the same). It does not move a Split that cuts whole
heads on an axis of their own, behind the transposition.
"""

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ..onnx_file import names


@dataclass(frozen=True)
class Heads:
    """The heads of one part of a fused product: `split` -> Reshape [batch, seq, heads, size] -> Transpose `out` [batch,
    heads, seq, size].
    """

    out: ir.Value
    count: int
    size: int


def split_by_heads(model: ir.Model) -> None:
    """Turn Split -> (Reshape -> Transpose) for each part into Reshape -> Transpose -> Split.

    1. Only where the Split cuts a module's product (or its sum with a bias) on the last axis, and each part becomes
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
            output.name, output.type, output.shape = name, part.out.type, part.out.shape
            part.out.replace_all_uses_with(output, replace_graph_outputs=True)
    RemoveUnusedNodesPass()(model)


def _heads(part: ir.Value) -> Heads | None:
    """The heads of one part of a fused product; None where the part is used in any other way."""
    reshape = _only_reader(part, "Reshape")
    transpose = _only_reader(reshape.outputs[0], "Transpose") if reshape is not None else None
    if (
        transpose is None
        or [*transpose.attributes["perm"].as_ints()] != [0, 2, 1, 3]
        or part.shape is None
        or transpose.outputs[0].shape is None
    ):
        return None
    width, size = part.shape[-1], transpose.outputs[0].shape[-1]
    return (
        Heads(transpose.outputs[0], width // size, size) if isinstance(width, int) and isinstance(size, int) else None
    )


def _only_reader(value: ir.Value, operator: str) -> ir.Node | None:
    readers = [usage.node for usage in value.uses()]
    return readers[0] if len(readers) == 1 and readers[0].op_type == operator and not value.is_graph_output() else None


def _constant(model: ir.Model, name: str, numbers: list[int]) -> ir.Value:
    tensor = ir.tensor(numbers, ir.DataType.INT64, name=name)
    value = ir.Value(
        name=name, shape=ir.Shape([len(numbers)]), type=ir.TensorType(ir.DataType.INT64), const_value=tensor
    )
    model.graph.register_initializer(value)
    return value
