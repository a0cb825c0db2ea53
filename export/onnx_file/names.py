"""Names of the graph's nodes and tensors, made from Hugging Face module names, so that the output of any tool names the
module.

`M` is a linear module, `G` the first of a group that shares its input, `A` an attention module, part `k` or `v`.
"""

import re
from typing import NamedTuple

#: The input that says which positions' logits are asked for.
LOGITS_INDICES = "logits_indices"
#: The results of attention's two matmuls, in order.
ATTENTION_PRODUCTS = ("scores", "values")
_MODULE = re.compile(
    r"(?P<module>.+)\.(?:matmul(?:\.rescale(?:_cast)?)?|bias_add|attention|weight\.dequantize"
    r"|input\.(?:first\.)?(?:de)?quantize|halves|terms_add|narrow"
    r"|[qp]\.attention_first_(?:de)?quantize|attention_(?:scores|values)_(?:halves|terms_add)"
    r"|[kv]\.(?:quantize|dequantize|dequantize_past)"
    r"|[qkvp]\.attention_(?:de)?quantize|attention_(?:scores|values))"
)


class Pair(NamedTuple):
    """The QuantizeLinear and the DequantizeLinear of a tensor."""

    quantize: str
    dequantize: str


class TwoTermNodes(NamedTuple):
    """The Split of a product in two terms, and the Add of its halves."""

    split: str
    add: str


def matmul(module: str) -> str:
    """The product of module M."""
    return f"{module}.matmul"


def rescale(product: str) -> str:
    """The Mul that applies the scales of a weight behind a product."""
    return f"{product}.rescale"


def rescale_cast(product: str) -> str:
    """The Cast behind that Mul, to the compute type of the graph."""
    return f"{product}.rescale_cast"


def bias_add(module: str) -> str:
    """The addition of M's bias."""
    return f"{module}.bias_add"


def attention_node(module: str) -> str:
    """The Attention node of A."""
    return f"{module}.attention"


def weight_dequantize(module: str) -> str:
    """The DequantizeLinear of M's weight."""
    return f"{module}.weight.dequantize"


def input_pair(module: str) -> Pair:
    """Q and DQ of the input of group G; with two terms, of both together."""
    return Pair(f"{module}.input.quantize", f"{module}.input.dequantize")


def first_pair(module: str) -> Pair:
    """Q and DQ of the first term of the input of group G."""
    return Pair(f"{module}.input.first.quantize", f"{module}.input.first.dequantize")


def two_term_nodes(module: str) -> TwoTermNodes:
    """Name the nodes behind M's product in two terms."""
    return TwoTermNodes(f"{module}.halves", f"{module}.terms_add")


def narrow(module: str) -> str:
    """The Cast behind M's product in two terms, from FP32 to the compute type."""
    return f"{module}.narrow"


def cache_pair(module: str, part: str) -> Pair:
    """Q and DQ of A's new keys or values."""
    return Pair(f"{module}.{part}.quantize", f"{module}.{part}.dequantize")


def cache_dequantize_past(module: str, part: str) -> str:
    """DequantizeLinear of A's past keys or values."""
    return f"{module}.{part}.dequantize_past"


def attention_pair(module: str, part: str) -> Pair:
    """Q and DQ in front of a product of A's attention; parts q, k, v, and p for probabilities."""
    return Pair(f"{module}.{part}.attention_quantize", f"{module}.{part}.attention_dequantize")


def attention_product(module: str, product: str) -> str:
    """The product of A's attention for `scores` or `values`."""
    return f"{module}.attention_{product}"


def attention_first_pair(module: str, part: str) -> Pair:
    """Q and DQ of the first term of A's queries or probabilities."""
    return Pair(f"{module}.{part}.attention_first_quantize", f"{module}.{part}.attention_first_dequantize")


def attention_halves(module: str, product: str) -> TwoTermNodes:
    """Name the nodes behind a product of A's attention in two terms."""
    return TwoTermNodes(f"{module}.attention_{product}_halves", f"{module}.attention_{product}_terms_add")


def product_of(node: str) -> str:
    """The name of a product in tables: its module, or the node where a module has several products (attention) or there
    is none.
    """
    module = module_of(node) or ""
    return module if node == matmul(module) else node


def module_of(node: str) -> str | None:
    """The Hugging Face module in the name of a node; None where it has none."""
    match = _MODULE.fullmatch(node)
    return match["module"] if match else None


def scope_of(node: str) -> str | None:
    """The module of a node named by torch's older exporter, /model/layers.0/mlp/up_proj/MatMul; ModelOpt's quantizers
    count as their module's. None for another name.
    """
    parts = [
        part
        for part in node.split("/")[1:-1]
        if part not in ("input_quantizer", "weight_quantizer", "output_quantizer")
    ]
    return ".".join(parts) or None if node.startswith("/") else None
