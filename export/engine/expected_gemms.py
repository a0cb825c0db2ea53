"""Read the numbers that an engine must contain from `model.onnx` and its external data: codes, factors and scales of
each module.

`lint` compares the graph with `scales.json` and the checkpoint. Here its numbers take the form that a compiler gives
them: codes [in, out] as the GEMM reads them, and a factor `s_x · s_w[channel]` for each column.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from onnx import numpy_helper

from ...core.errors import InputError
from ..lint.rules_gemms import activation_of, quantize_of
from ..onnx_file import names
from ..onnx_file.external import stored_at
from ..onnx_file.indexed import GraphGemm, Indexed, Operand
from ..onnx_file.tensors import bytes_of
from ..onnx_file.weight_scales import output_axis, weight_of, weight_scales

Codes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.float32]
#: Steps from a QuantizeLinear back to the norm before it.
_STEPS = 8


@dataclass(frozen=True)
class ExpectedGemm:
    """The numbers of one module's GEMM: the `codes` of its weight, uint8 [in, out], the `factors` of its columns,
    float32 [out], and the QuantizeLinear of its input with its `scale`.

    `norms`: float32 [in] each, the weights of norms in front of the QuantizeLinear, which compilers divide by the
    scale.
    """

    module: str
    codes: Codes = field(repr=False)
    factors: Numbers = field(repr=False)
    quantizer: str
    scale: np.float32
    norms: tuple[Numbers, ...] = field(repr=False)

    @property
    def node(self) -> str:
        """The GEMM's ONNX node."""
        return names.matmul(self.module)


@dataclass(frozen=True)
class ExpectedAttention:
    """An attention GEMM that is expected in two terms: its QuantizeLinear, its `scale`, and the `rows` of both terms
    for each token (None: the graph does not say).
    """

    node: str
    quantizer: str
    scale: float
    rows: int | None


def attended(graph: Indexed, expected: Mapping[str, tuple[float, float]]) -> Iterator[ExpectedAttention]:
    """Yield the first inputs of the attention GEMMs `expected` on FP8 (node -> the scales of both sides)."""
    values = {value.name: value for value in graph.model.graph.value_info}
    made = {node.name: node.output[0] for node in graph.nodes if node.op_type == "QuantizeLinear"}
    for node, (scale, _) in expected.items():
        quantizer = names.attention_pair(names.module_of(node) or "", "q" if node.endswith("scores") else "p").quantize
        value = values.get(made.get(quantizer, ""))
        dims = [dim.dim_param for dim in value.type.tensor_type.shape.dim] if value is not None else []
        rows = _ROWS.fullmatch(dims[_ROW_AXIS]) if len(dims) == _RANK else None
        yield ExpectedAttention(node, quantizer, scale, int(rows[1] or 1) if rows else None)


#: Rows [batch, heads, rows, …] of queries and probabilities: a number of times the tokens.
_RANK = 4
_ROW_AXIS = 2
_ROWS = re.compile(r"(?:(\d+)\*)?seq")


def expected_gemms(graph: Indexed, modules: Iterable[str]) -> Iterator[ExpectedGemm]:
    """Yield the numbers of the GEMMs of `modules`; GEMMs without FP8 codes are left out.

    Raises InputError for external data that are cut short or missing.
    """
    gemms = {gemm.node.name: gemm for gemm in graph.gemms}
    for module in modules:
        gemm = gemms.get(names.matmul(module))
        if gemm is not None and (made := _expected_gemm(graph, module, gemm)) is not None:
            yield made


def _expected_gemm(graph: Indexed, module: str, gemm: GraphGemm) -> ExpectedGemm | None:
    weight = weight_of(graph, gemm)
    activation = activation_of(graph, gemm)
    if weight is None or weight.dequantize is None or activation is None or activation.dequantize is None:
        return None
    quantize = quantize_of(graph, activation)
    channels = weight_scales(graph, gemm)
    static = graph.constant(activation.dequantize.input[1])
    codes = _turned(gemm, weight, stored_codes(graph, weight.dequantize.input[0]))
    if quantize is None or channels is None or static is None or codes.ndim != 2:
        return None
    scale = np.float32(static.ravel()[0])
    factors = np.broadcast_to(scale * channels, codes.shape[1])
    return ExpectedGemm(
        module, codes, factors, quantize.name, scale, tuple(_norms(graph, quantize.input[0], len(codes)))
    )


def _turned(gemm: GraphGemm, side: Operand, codes: Codes) -> Codes:
    """Transpose codes so that the GEMM's columns come last."""
    if codes.ndim == 2 and output_axis(gemm, side, 2) == 0:
        return codes.T
    return codes


def stored_codes(graph: Indexed, tensor: str) -> Codes:
    """The codes of a weight, uint8 [rows, columns], mapped from its file.

    Raises InputError for a file that is cut short or missing.
    """
    initializer = graph.initializers[tensor]
    if (where := stored_at(initializer)) is None:
        return numpy_helper.to_array(initializer).view(np.uint8)
    place = graph.storage.places.at(where.location)
    end = where.offset + bytes_of(initializer)
    if place.size is None:
        raise InputError(place.path, f"{place.why or 'lies outside model/'}", "copy the whole of model/ again")
    if where.offset < 0 or end > place.size:
        raise InputError(
            place.path,
            f"is cut short: the codes of {tensor} end at byte {end}, and it has {place.size}",
            "copy the whole of model/ again",
        )
    return np.memmap(place.path, np.uint8, "r", where.offset, tuple(initializer.dims))


def _norms(graph: Indexed, value: str, width: int) -> Iterator[Numbers]:
    """The constant vectors of `width` numbers that the value is multiplied by in the last few steps."""
    waiting = [value]
    for _ in range(_STEPS):
        nodes = [graph.producers[name] for name in waiting if name in graph.producers]
        waiting = []
        for node in nodes:
            for name in node.input:
                if name not in graph.folded:
                    waiting.append(name)
                elif node.op_type in _SCALING:
                    vector = constant_value(graph, name)
                    if vector is not None and vector.size == width:
                        yield vector.astype(np.float32).ravel()


_SCALING = ("Mul", "RMSNormalization", "LayerNormalization", "SimplifiedLayerNormalization")


def constant_value(graph: Indexed, value: str) -> npt.NDArray[np.generic] | None:
    """Evaluate a value that is made from constants by Add and Mul (a norm's `1 + weight`); None for any other."""
    if (known := graph.constant(value)) is not None:
        return known
    node = graph.producers.get(value)
    if node is None or node.op_type not in ("Add", "Mul", "Cast", "Identity"):
        return None
    parts = [constant_value(graph, name) for name in node.input]
    if node.op_type in ("Cast", "Identity") or any(part is None for part in parts):
        return parts[0] if parts else None
    left, right = (np.asarray(part, np.float32) for part in parts)
    if node.op_type == "Add":
        return left + right
    return left * right
