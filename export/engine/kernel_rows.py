"""List the kernels of an engine: each matrix product with the kernels around it, the attention kernels, and the reason
of each wide product.

A plan lists for every kernel the ONNX nodes fused into it (`plan`). So the kernel that quantizes a product's input is
the one with the group's QuantizeLinear. The kernels that finish the product (scales, bias, norm, next quantization)
contain its MatMul or the Mul behind it, and are no product.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..lint.rules_products import why_wide
from ..onnx_file import names
from ..onnx_file.indexed import Indexed
from ..onnx_file.indexed import Product as GraphProduct
from .plan import EngineProduct, Evidence, Kernel, Plan

#: Fused attention: `_gemm_mha_v2` for prompts, `_gemv_mha_v1` for single tokens in TensorRT-RTX 1.7; TensorRT calls its
#: kernels fmha.
_ATTENTION = re.compile(r"mha|attention", re.IGNORECASE)
_QUERY_KEY_VALUE = 3


@dataclass(frozen=True)
class ProductRow:
    """One product in one profile: `module` (None: it belongs to no linear layer), ONNX `node`, types, the modules it
    was `merged` with, and the kernels `before` and `after` it.
    """

    profile: str
    module: str | None
    node: str
    operands: tuple[str, str]
    result: str
    merged: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class AttentionRow:
    """One fused attention kernel in one profile: `module` is that of the next linear product; types of its first
    inputs, and of its result.
    """

    profile: str
    module: str | None
    node: str
    kernel: str
    operands: tuple[str, ...]
    result: str


@dataclass(frozen=True)
class WideRow:
    """A GEMM without FP8 on both sides, whether `scales.json` expects FP8 there (`promised`), and the reason."""

    product: str
    promised: bool
    reason: str


def product_rows(plan: Plan, profiles: Sequence[str]) -> list[ProductRow]:
    """Every product of every profile, in the order of the program; `profiles` are their names, in order."""
    rows = []
    for index, profile in enumerate(profiles):
        kernels = plan.kernels.get(index, ())
        for product in plan.profiles.get(index, ()):
            before = _holding(kernels, _quantizes(product))
            computed = _products_of(product)
            for node in computed:
                others = tuple(names.product_of(other) for other in computed if other != node)
                after = tuple(
                    name
                    for name in _holding(kernels, {node, names.rescale(node), names.rescale_cast(node)})
                    if name not in before
                )
                rows.append(
                    ProductRow(
                        profile, names.module_of(node), node, product.operands, product.result, others, before, after
                    )
                )
    return rows


def _products_of(product: EngineProduct) -> tuple[str, ...]:
    """The nodes of a GEMM that belong to linear layers; all nodes if none does.

    TensorRT's inspector also lists the other nodes that were fused into it.
    """
    return tuple(node for node in product.nodes if node == names.matmul(names.module_of(node) or "")) or product.nodes


def _quantizes(product: EngineProduct) -> set[str]:
    """The QuantizeLinear nodes of the product's input; the DequantizeLinear was fused into the product."""
    return {
        layer.removesuffix("dequantize") + "quantize"
        for layer in product.layers
        if layer == names.input_pair(names.module_of(layer) or "").dequantize
    }


def _holding(kernels: Sequence[Kernel], nodes: set[str]) -> tuple[str, ...]:
    return tuple(kernel.name for kernel in kernels if not nodes.isdisjoint(kernel.layers))


def attention_rows(plan: Plan, profiles: Sequence[str]) -> list[AttentionRow]:
    """Every fused attention kernel of every profile."""
    rows = []
    for index, profile in enumerate(profiles):
        kernels = plan.kernels.get(index, ())
        for at, kernel in enumerate(kernels):
            if _ATTENTION.search(kernel.name):
                result = kernel.outputs[0] if kernel.outputs else "unknown"
                node = kernel.layers[0] if kernel.layers else ""
                rows.append(
                    AttentionRow(
                        profile,
                        _attention_module(kernels[at:]),
                        node,
                        kernel.name,
                        kernel.inputs[:_QUERY_KEY_VALUE],
                        result,
                    )
                )
    return rows


def _attention_module(kernels: Sequence[Kernel]) -> str | None:
    """The parent of the next module whose input is quantized: attention's output goes into its output projection."""
    modules = (
        names.module_of(layer)
        for kernel in kernels
        for layer in kernel.layers
        if layer == names.input_pair(names.module_of(layer) or "").quantize
    )
    first = next(modules, None)
    return first.rpartition(".")[0] if first else None


def wide_rows(plan: Plan | None, gemm_types: Evidence, graph: Indexed, skipped: Mapping[str, str]) -> list[WideRow]:
    """List every GEMM without FP8 on both sides, the expected ones first.

    `skipped`: module -> the reason why scales.json keeps it in BF16.
    """
    products = {product.node.name: product for product in graph.products}
    rows = []
    for module, reason in gemm_types.wide.items():
        rows.append(WideRow(module, True, f"{reason}{_cause(graph, products.get(names.matmul(module)))}"))
    rows += [WideRow(module, True, reason) for module, reason in gemm_types.unknown.items()]
    seen = {row.product for row in rows}
    for product_row in [] if plan is None else product_rows(plan, [str(index) for index in plan.profiles]):
        name = names.product_of(product_row.node)
        if product_row.operands != ("fp8", "fp8") and name not in seen and name not in gemm_types.fp8:
            seen.add(name)
            types = f"{product_row.operands[0]} × {product_row.operands[1]} -> {product_row.result}"
            rows.append(
                WideRow(
                    name, False, f"{types}: {skipped.get(name) or 'belongs to no linear layer: attention or positions'}"
                )
            )
    return rows


def _cause(graph: Indexed, product: GraphProduct | None) -> str:
    """Explain from the graph why an expected GEMM does not run on FP8."""
    if product is None:
        return "; model.onnx has no such product either"
    reason = why_wide(graph, product)
    return (
        f"; in model.onnx {reason}"
        if reason
        else "; model.onnx has Q/DQ on both sides, so the engine is of another graph, or the builder chose this"
    )
