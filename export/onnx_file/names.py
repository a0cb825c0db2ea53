"""Names of the graph's nodes and tensors, made from Hugging Face module names, so that the output of any tool names the
module.

`M` is a linear module, `G` the first of a group that shares its input, `A` an attention module, part `k` or `v`.
"""

import re
from typing import NamedTuple

#: The input that says which positions' logits are asked for.
LOGITS_INDICES = "logits_indices"
#: Slots of a block of the cache: `serve.loop.cache.BLOCK`, which is copied to where this is not. A test holds them
#: equal.
BLOCK = 64
#: The results of attention's two matmuls, in order.
ATTENTION_GEMMS = ("scores", "values")
_MODULE = re.compile(
    r"(?P<module>.+)\.(?:matmul(?:\.rescale(?:_cast)?)?|bias_add|attention|weight\.dequantize"
    r"|input\.(?:first\.)?(?:de)?quantize|halves|terms_add|narrow"
    r"|[qp]\.attention_first_(?:de)?quantize|attention_(?:scores|values)_(?:halves|terms_add)"
    r"|[kv]\.(?:quantize|dequantize|dequantize_past|dequantize_step)|step_(?:scores|values)"
    r"|[qkvp]\.attention_(?:de)?quantize|attention_(?:scores|values))"
)


class Pair(NamedTuple):
    """The QuantizeLinear and the DequantizeLinear of a tensor."""

    quantize: str
    dequantize: str


class TwoTermNodes(NamedTuple):
    """The Split of a GEMM in two terms, and the Add of its halves."""

    split: str
    add: str


def matmul(module: str) -> str:
    """The GEMM of module M."""
    return f"{module}.matmul"


def rescale(gemm: str) -> str:
    """The Mul that applies the scales of a weight behind a GEMM."""
    return f"{gemm}.rescale"


def rescale_cast(gemm: str) -> str:
    """The Cast behind that Mul, to the compute type of the graph."""
    return f"{gemm}.rescale_cast"


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
    """Name the nodes behind M's GEMM in two terms."""
    return TwoTermNodes(f"{module}.halves", f"{module}.terms_add")


def narrow(module: str) -> str:
    """The Cast behind M's GEMM in two terms, from FP32 to the compute type."""
    return f"{module}.narrow"


def cache_pair(module: str, part: str) -> Pair:
    """Q and DQ of A's new keys or values."""
    return Pair(f"{module}.{part}.quantize", f"{module}.{part}.dequantize")


def cache_dequantize_past(module: str, part: str) -> str:
    """DequantizeLinear of A's past keys or values."""
    return f"{module}.{part}.dequantize_past"


def cache_dequantize_step(module: str, part: str) -> str:
    """DequantizeLinear of A's past keys or values for the GEMMs of a call of one token, where it is another one."""
    return f"{module}.{part}.dequantize_step"


def step_gemm(module: str, gemm: str) -> str:
    """The GEMM of A's attention for `scores` or `values` in a call of one token, over the past as it lies."""
    return f"{module}.step_{gemm}"


def is_step_gemm(node: str) -> bool:
    """Tell whether a node is a `step_gemm`."""
    return node.endswith(tuple(f".step_{gemm}" for gemm in ATTENTION_GEMMS))


def attention_pair(module: str, part: str) -> Pair:
    """Q and DQ in front of a GEMM of A's attention; parts q, k, v, and p for probabilities."""
    return Pair(f"{module}.{part}.attention_quantize", f"{module}.{part}.attention_dequantize")


def attention_gemm(module: str, gemm: str) -> str:
    """The GEMM of A's attention for `scores` or `values`."""
    return f"{module}.attention_{gemm}"


def attention_first_pair(module: str, part: str) -> Pair:
    """Q and DQ of the first term of A's queries or probabilities."""
    return Pair(f"{module}.{part}.attention_first_quantize", f"{module}.{part}.attention_first_dequantize")


def attention_halves(module: str, gemm: str) -> TwoTermNodes:
    """Name the nodes behind a GEMM of A's attention in two terms."""
    return TwoTermNodes(f"{module}.attention_{gemm}_halves", f"{module}.attention_{gemm}_terms_add")


def gemm_name(node: str) -> str:
    """The name of a GEMM in tables: its module, or the node where a module has several GEMMs (attention) or there
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
    if node.startswith("/"):
        return ".".join(parts) or None
    return None
