"""Changes to the graph of the demo, each of which makes an engine that does not do what the run expects."""

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from onnx import ModelProto, NodeProto, numpy_helper

from fp8q.export.onnx_file.external import Places, read_tensor

Change = Callable[[ModelProto, Path], None]
LAYER = "model.layers.1"
DOWN = f"{LAYER}.mlp.down_proj"


def replace_value(model: ModelProto, old: str, new: str) -> None:
    for node in model.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]


def drop(model: ModelProto, nodes: list[NodeProto]) -> None:
    for node in nodes:
        model.graph.node.remove(node)


def named(model: ModelProto, end: str) -> list[NodeProto]:
    return [node for node in model.graph.node if node.name.endswith(end)]


def no_activation_quantized(model: ModelProto, directory: Path, only: str = "") -> None:
    """FP8 weights alone: what reads an input's DequantizeLinear reads the input itself."""
    for end in (f"{only}.input",):
        quantizers = named(model, f"{end}.quantize")
        for quantize, dequantize in zip(quantizers, named(model, f"{end}.dequantize"), strict=True):
            replace_value(model, dequantize.output[0], quantize.input[0])
            drop(model, [quantize, dequantize])


def one_pair_removed(model: ModelProto, directory: Path) -> None:
    no_activation_quantized(model, directory, only=DOWN)


def all_in_bf16(model: ModelProto, directory: Path) -> None:
    """The same weights in BF16, as numbers in the graph, and no quantizer before a GEMM."""
    no_activation_quantized(model, directory)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    for dequantize in named(model, ".weight.dequantize"):
        codes, scale = (read_tensor(stored[name], Places(directory)) for name in dequantize.input[:2])
        assert codes is not None
        assert scale is not None
        values = (codes.astype(np.float32) * scale.astype(np.float32).reshape(-1, 1)).astype(ml_dtypes.bfloat16)
        model.graph.initializer.append(numpy_helper.from_array(values, f"{dequantize.input[0]}.bf16"))
        replace_value(model, dequantize.output[0], f"{dequantize.input[0]}.bf16")
        drop(model, [dequantize])


def scales_in_bf16(model: ModelProto, directory: Path) -> None:
    nodes = [node for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    of_cache = {node.input[1] for node in nodes if node.input[0].startswith("past_key_values.")}
    scales = {node.input[1] for node in nodes} - of_cache  # with these TensorRT-RTX infers no type
    for tensor in model.graph.initializer:
        if tensor.name in scales:
            values = read_tensor(tensor, Places(directory))
            assert values is not None
            tensor.CopyFrom(numpy_helper.from_array(values.astype(ml_dtypes.bfloat16), tensor.name))


def other_codes(model: ModelProto, directory: Path) -> None:
    """One code of one weight is another: what a fine-tune of the same model would be."""
    for tensor in model.graph.initializer:
        if tensor.name == f"{DOWN}.weight":
            values = read_tensor(tensor, Places(directory))
            assert values is not None
            codes = values.view(np.uint8).copy()
            codes[100, 100] ^= 1
            tensor.CopyFrom(numpy_helper.from_array(codes.view(ml_dtypes.float8_e4m3fn), tensor.name))


def layers_exchanged(model: ModelProto, directory: Path) -> None:
    """Two layers' weights, codes and scales."""
    first, second = (named(model, f"{LAYER[:-1]}{at}.mlp.down_proj.weight.dequantize")[0] for at in (1, 2))
    kept = list(first.input)
    first.input[:], second.input[:] = second.input, kept


def unchanged(model: ModelProto, directory: Path) -> None:
    """As fp8q exported it."""
