"""Read the scales of a weight's output channels, in either form of a graph.

`dq`: DequantizeLinear multiplies each channel by its scale. `mul`: it multiplies all channels by one number s0, and a
Mul directly behind the product multiplies each column by the rest of its scale. Both are the same model and are
compared with the checkpoint in the same way: in `mul` the FP32 product of the two numbers has to equal the scale bit
for bit. It does where s0 is a power of two; fp8q writes 1, and the scale itself behind the product.
"""

import numpy as np
from onnx import NodeProto

from . import names
from .constants import Numbers
from .indexed import Indexed, Operand, Product
from .tensors import attribute


def weight_of(graph: Indexed, product: Product) -> Operand | None:
    """The operand of a product that is a quantized constant."""
    return next(
        (
            side
            for side in product.operands
            if side.dequantize is not None and graph.is_constant(side.dequantize.input[0])
        ),
        None,
    )


def output_axis(product: Product, side: Operand, rank: int) -> int:
    """The axis of a weight of `rank` dimensions that becomes the product's columns: its rows where it is on the left,
    its channels for a convolution.
    """
    if product.node.op_type == "Conv":
        return 0
    left = side is product.operands[0]
    turns = side.transposes + attribute(product.node, "transA" if left else "transB", 0)
    return rank - 2 if left != bool(turns % 2) else rank - 1


def weight_scales(graph: Indexed, product: Product) -> Numbers | None:
    """The scales of a product's weight, float32 [channels] or [1]; None without FP8 codes, or where not read."""
    side = weight_of(graph, product)
    dequantize_scale = (
        graph.constant(side.dequantize.input[1]) if side is not None and side.dequantize is not None else None
    )
    rescale = rescale_of(graph, product)
    if dequantize_scale is None or rescale is None:
        return None if dequantize_scale is None else dequantize_scale.ravel()
    rest = graph.constant(factors_of(graph, rescale))
    with np.errstate(all="ignore"):  # what becomes infinite or zero is not what the checkpoint has
        return None if rest is None else dequantize_scale.ravel() * rest.ravel()


def rescale_of(graph: Indexed, product: Product) -> NodeProto | None:
    """The Mul directly behind a product that applies its weight's scales; None where there is none.

    It has its module's name, or a number for each column where DequantizeLinear has one number.
    """
    side, readers = weight_of(graph, product), graph.readers.get(product.node.output[0], [])
    if side is None or side.dequantize is None:
        return None
    name = names.rescale(product.node.name)
    for node in (node for node, _ in readers if node.op_type == "Mul" and factors_of(graph, node)):
        if node.name == name or _per_column(graph, product, side, node):
            return node
    return None


def behind(graph: Indexed, product: Product) -> list[NodeProto]:
    """The nodes of the form `mul` behind a product: the Mul, and the Cast of fp8q's graphs; none in `dq`."""
    rescale = rescale_of(graph, product)
    if rescale is None:
        return []
    cast = names.rescale_cast(product.node.name)
    return [rescale, *(node for node, _ in graph.readers.get(rescale.output[0], ()) if node.name == cast)]


def factors_of(graph: Indexed, rescale: NodeProto) -> str:
    """The constant operand of a Mul; empty where there is none."""
    return next((name for name in rescale.input if graph.constants.is_stored(name)), "")


def _per_column(graph: Indexed, product: Product, side: Operand, node: NodeProto) -> bool:
    assert side.dequantize is not None, "the side of a weight"
    dequantize_scale, rest = (graph.constant(name) for name in (side.dequantize.input[1], factors_of(graph, node)))
    dims = graph.initializers[side.dequantize.input[0]].dims
    if dequantize_scale is None or rest is None or dequantize_scale.size != 1 or len(dims) < 2:
        return False
    return rest.shape == (dims[output_axis(product, side, len(dims))],)
