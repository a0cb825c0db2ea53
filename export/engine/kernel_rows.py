"""List the kernels of an engine: each GEMM with the kernels around it, the attention kernels, and the reason
of each GEMM not in FP8.

A plan lists for every kernel the ONNX nodes fused into it (`plan`). So the kernel that quantizes a GEMM's input is
the one with the group's QuantizeLinear. The kernels that finish the GEMM (scales, bias, norm, next quantization)
contain its MatMul or the Mul behind it, and are no GEMM.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..lint.rules_gemms import why_not_fp8
from ..onnx_file import names
from ..onnx_file.indexed import GraphGemm, Indexed
from .plan import EngineGemm, Evidence, Kernel, Plan

#: Fused attention: `_gemm_mha_v2` for prompts in TensorRT-RTX 1.7, and `_gemv_mha_v1` for single tokens of a cache that
#: is concatenated; TensorRT calls its kernels fmha.
_ATTENTION = re.compile(r"mha|attention", re.IGNORECASE)
_QUERY_KEY_VALUE = 3


@dataclass(frozen=True)
class GemmRow:
    """One GEMM in one profile: `module` (None: it belongs to no linear layer), ONNX `node`, types, the modules it
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
    """One fused attention kernel in one profile: `module` is that of the next linear GEMM; types of its first
    inputs, and of its result.
    """

    profile: str
    module: str | None
    node: str
    kernel: str
    operands: tuple[str, ...]
    result: str


@dataclass(frozen=True)
class NotFP8Row:
    """A GEMM without FP8 on both sides, whether `scales.json` expects FP8 there (`promised`), and the reason."""

    product: str
    promised: bool
    reason: str


def gemm_rows(plan: Plan, profiles: Sequence[str]) -> list[GemmRow]:
    """Every GEMM of every profile, in the order of the program; `profiles` are their names, in order."""
    rows = []
    for index, profile in enumerate(profiles):
        kernels = plan.kernels.get(index, ())
        for gemm in plan.profiles.get(index, ()):
            before = _holding(kernels, _quantizes(gemm))
            computed = _gemms_of(gemm)
            for node in computed:
                others = tuple(names.gemm_name(other) for other in computed if other != node)
                after = tuple(
                    name
                    for name in _holding(kernels, {node, names.rescale(node), names.rescale_cast(node)})
                    if name not in before
                )
                rows.append(
                    GemmRow(profile, names.module_of(node), node, gemm.operands, gemm.result, others, before, after)
                )
    return rows


def _gemms_of(gemm: EngineGemm) -> tuple[str, ...]:
    """The nodes of a GEMM that belong to linear layers; all nodes if none does.

    TensorRT's inspector also lists the other nodes that were fused into it.
    """
    return tuple(node for node in gemm.nodes if node == names.matmul(names.module_of(node) or "")) or gemm.nodes


def _quantizes(gemm: EngineGemm) -> set[str]:
    """The QuantizeLinear nodes of the GEMM's input; the DequantizeLinear was fused into the GEMM."""
    return {
        layer.removesuffix("dequantize") + "quantize"
        for layer in gemm.layers
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


def not_fp8_rows(
    plan: Plan | None, gemm_types: Evidence, graph: Indexed, skipped: Mapping[str, str]
) -> list[NotFP8Row]:
    """List every GEMM without FP8 on both sides, the expected ones first, but for those of a step over the cache, which
    are no layer's.

    `skipped`: module -> the reason why scales.json keeps it in BF16.
    """
    gemms = {gemm.node.name: gemm for gemm in graph.gemms}
    rows = []
    for module, reason in gemm_types.not_fp8.items():
        rows.append(NotFP8Row(module, True, f"{reason}{_cause(graph, gemms.get(names.matmul(module)))}"))
    rows += [NotFP8Row(module, True, reason) for module, reason in gemm_types.unknown.items()]
    seen = {row.product for row in rows}
    for gemm_row in [] if plan is None else gemm_rows(plan, [str(index) for index in plan.profiles]):
        name = names.gemm_name(gemm_row.node)
        if names.is_step_gemm(gemm_row.node):
            continue
        if gemm_row.operands != ("fp8", "fp8") and name not in seen and name not in gemm_types.fp8:
            seen.add(name)
            types = f"{gemm_row.operands[0]} × {gemm_row.operands[1]} -> {gemm_row.result}"
            rows.append(
                NotFP8Row(
                    name, False, f"{types}: {skipped.get(name) or 'belongs to no linear layer: attention or positions'}"
                )
            )
    return rows


def _cause(graph: Indexed, gemm: GraphGemm | None) -> str:
    """Explain from the graph why an expected GEMM does not run on FP8."""
    if gemm is None:
        return "; model.onnx has no such GEMM either"
    reason = why_not_fp8(graph, gemm)
    if reason:
        return f"; in model.onnx {reason}"
    return "; model.onnx has Q/DQ on both sides, so the engine is of another graph, or the builder chose this"
