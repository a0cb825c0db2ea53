"""Read the scales of a weight's output channels, in either form of a graph.

`dq`: DequantizeLinear multiplies each channel by its scale. `mul`: it multiplies all channels by one number s0, and a
Mul directly behind the GEMM multiplies each column by the rest of its scale. Both are the same model and are
compared with the checkpoint in the same way: in `mul` the FP32 GEMM of the two numbers has to equal the scale bit
for bit. It does where s0 is a power of two; fp8q writes 1, and the scale itself behind the GEMM.
"""

import numpy as np
from onnx import NodeProto

from . import names
from .constants import Numbers
from .indexed import GraphGemm, Indexed, Operand
from .tensors import attribute


def weight_of(graph: Indexed, gemm: GraphGemm) -> Operand | None:
    """The operand of a GEMM that is a quantized constant."""
    return next(
        (side for side in gemm.operands if side.dequantize is not None and graph.is_constant(side.dequantize.input[0])),
        None,
    )


def output_axis(gemm: GraphGemm, side: Operand, rank: int) -> int:
    """The axis of a weight of `rank` dimensions that becomes the GEMM's columns: its rows where it is on the left,
    its channels for a convolution.
    """
    if gemm.node.op_type == "Conv":
        return 0
    left = side is gemm.operands[0]
    turns = side.transposes + attribute(gemm.node, "transA" if left else "transB", 0)
    if left != bool(turns % 2):
        return rank - 2
    return rank - 1


def weight_scales(graph: Indexed, gemm: GraphGemm) -> Numbers | None:
    """The scales of a GEMM's weight, float32 [channels] or [1]; None without FP8 codes, or where not read."""
    side = weight_of(graph, gemm)
    dequantize_scale = (
        graph.constant(side.dequantize.input[1]) if side is not None and side.dequantize is not None else None
    )
    rescale = rescale_of(graph, gemm)
    if dequantize_scale is None or rescale is None:
        if dequantize_scale is None:
            return None
        return dequantize_scale.ravel()
    rest = graph.constant(factors_of(graph, rescale))
    with np.errstate(all="ignore"):  # what becomes infinite or zero is not what the checkpoint has
        if rest is None:
            return None
        return dequantize_scale.ravel() * rest.ravel()


def rescale_of(graph: Indexed, gemm: GraphGemm) -> NodeProto | None:
    """The Mul directly behind a GEMM that applies its weight's scales; None where there is none.

    It has its module's name, or a number for each column where DequantizeLinear has one number.
    """
    side = weight_of(graph, gemm)
    readers = graph.readers.get(gemm.node.output[0], [])
    if side is None or side.dequantize is None:
        return None
    name = names.rescale(gemm.node.name)
    for node in (node for node, _ in readers if node.op_type == "Mul" and factors_of(graph, node)):
        if node.name == name or _per_column(graph, gemm, side, node):
            return node
    return None


def behind(graph: Indexed, gemm: GraphGemm) -> list[NodeProto]:
    """The nodes of the form `mul` behind a GEMM: the Mul, and the Cast of fp8q's graphs; none in `dq`."""
    rescale = rescale_of(graph, gemm)
    if rescale is None:
        return []
    cast = names.rescale_cast(gemm.node.name)
    return [rescale, *(node for node, _ in graph.readers.get(rescale.output[0], ()) if node.name == cast)]


def factors_of(graph: Indexed, rescale: NodeProto) -> str:
    """The constant operand of a Mul; empty where there is none."""
    return next((name for name in rescale.input if graph.constants.is_stored(name)), "")


def _per_column(graph: Indexed, gemm: GraphGemm, side: Operand, node: NodeProto) -> bool:
    assert side.dequantize is not None, "the side of a weight"
    dequantize_scale, rest = (graph.constant(name) for name in (side.dequantize.input[1], factors_of(graph, node)))
    dims = graph.initializers[side.dequantize.input[0]].dims
    if dequantize_scale is None or rest is None or dequantize_scale.size != 1 or len(dims) < 2:
        return False
    return rest.shape == (dims[output_axis(gemm, side, len(dims))],)
