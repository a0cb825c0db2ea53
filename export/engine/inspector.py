r"""Read from TensorRT's engine inspector which GEMMs take FP8 on both sides.

`get_engine_information` of an engine that was built with detailed verbosity lists layers like this one, of TensorRT 10
(NVIDIA/TensorRT, issue 4397):

    {"Name": "/layers_0/output/MatMul_myl0_7", "LayerType": "gemm",
     "Inputs": [{"Name": "x", "Dimensions": [1,40,1024], "Format/Datatype": "Half"}],
     "Outputs": [{"Name": "y", "Dimensions": [1,40,256], "Format/Datatype": "Half"}],
     "TacticName": "sm80_xmma_gemm_f16f16_f16f16_f16_nn_n_tilesize32x32x64_…", "StreamId": 0,
     "Metadata": "[ONNX Layer: /layers.0/output/MatMul]\u001f[ONNX Layer: /layers.0/output/Add]"}

- A weight is no input: it stands under `Constants`, or nowhere.
- A type stands under `Format/Datatype` in TensorRT 10, under `DataType` or `Datatype` in 11.
- A GEMM that is fused with its neighbours is a `fusion`, `__myl_Fc_…`, whose name tells no node; `Metadata` does.
- Layers of profile 1 and up have names that end in ` [profile 1]`.
- `Name` has underscores where nodes have points, and joins merged GEMMs by `+`.

Two sources tell the types of a GEMM's operands: its tensors, and the name of its kernel, which begins with them
(`_gemm_e4m3bf16_e4m3f32_` in xmma's and cuBLAS's kernels: A and C, B and accumulator; `gemm_e4m3_e4m3_f32_bf16_bf16` in
CUTLASS's: A, B, accumulator, C, D). Where they disagree the wider one counts, and where neither tells, the operand is
`unknown`: a surprise can make a GEMM unknown, and never FP8.

A kernel that scales by itself, as FP8 GEMMs per channel do on Hopper from TensorRT 10.6 on, answers in the graph's
next type; so the type of a result says nothing against it here.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..onnx_file import names
from .plan import UNTOLD, EngineGemm, Kernel, Plan
from .program import LAYER, program_type_name

Layer = Mapping[str, Any]
#: Where a tensor's type stands, in the order of trust.
TYPE_KEYS = ("Datatype", "DataType", "Format/Datatype", "Format/DataType")

_PROFILE = re.compile(r" *\[profile (\d+)\]")
_MYELIN = re.compile(r"_myl\d+(?:_\d+)?(?=$| )")
_TYPE = re.compile("fp8|float8|bfloat16|bf16|half|fp16|float16|float|fp32|int8|int4|fp4", re.IGNORECASE)
_ATTENTION = re.compile("mha|attention", re.IGNORECASE)
_GEMM_LAYER = re.compile("gemm|matrix|matmul", re.IGNORECASE)
_GEMM_KERNEL = re.compile(r"gemm|gemv|tensorop|nvjet|cublas|__myl_\w*?Fc(?![a-z])")
_ELEMENT = "e4m3|e5m2|f8|bf16|tf32|f32|f16|i8|s8"
_XMMA = re.compile(rf"gemm_({_ELEMENT})(?:{_ELEMENT}|i32)_({_ELEMENT})(?:{_ELEMENT}|i32)_")
_CUTLASS = re.compile(rf"gemm_({_ELEMENT})_({_ELEMENT})_(?:f32|f16|i32|s32)_")
_ELEMENTS = {
    "e4m3": "fp8", "f8": "fp8", "f16": "fp16", "f32": "fp32", "tf32": "fp32", "i8": "int8", "s8": "int8",
}  # fmt: skip


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a layer: its type, and the sizes that the inspector gives."""

    type: str
    sizes: tuple[int, ...]

    @property
    def matrix(self) -> bool:
        """Tell whether it may be a weight: it has two sizes above 1, or no sizes are given."""
        return not self.sizes or sum(size > 1 for size in self.sizes) > 1


def read_inspector(information: str) -> Plan | None:
    """Read the GEMMs from an engine inspector's JSON; None where it lists no layers in detail, or no GEMM
    among them.
    """
    layers = _layers(information)
    if layers is None:
        return None
    gemms: dict[int, list[tuple[Layer, EngineGemm]]] = {}
    kernels: dict[int, list[Kernel]] = {}
    for layer in layers:
        mark = _PROFILE.search(str(layer.get("Name")))
        profile = int(mark[1]) if mark else 0
        nodes = tuple(LAYER.findall(str(layer.get("Metadata"))))
        inputs, outputs = (tuple(tensor.type for tensor in _tensors(layer, end)) for end in ("Inputs", "Outputs"))
        if nodes and is_gemm(layer):
            result = outputs[0] if outputs else UNTOLD
            gemms.setdefault(profile, []).append((layer, EngineGemm(nodes, operands(layer), result, layers=nodes)))
        else:
            kernels.setdefault(profile, []).append(Kernel(str(layer.get("Name")), nodes, inputs, outputs))
    if not gemms:
        return None
    by_profile = {profile: tuple(_with_nodes(gemms[profile])) for profile in sorted(gemms)}
    return Plan(by_profile, "inspector", {profile: tuple(listed) for profile, listed in kernels.items()})


def _layers(information: str) -> list[Layer] | None:
    """The layers of an inspector's JSON; None where it is of another form."""
    try:
        layers: list[Layer] = [layer for layer in json.loads(information)["Layers"] if isinstance(layer, dict)]
    except (ValueError, KeyError, TypeError):
        return None
    ends = [layer.get(end) or [] for layer in layers for end in ("Inputs", "Outputs")]
    well_formed = all(
        isinstance(listed, list) and all(isinstance(tensor, dict) for tensor in listed) for listed in ends
    )
    return layers if well_formed else None


def is_gemm(layer: Layer) -> bool:
    """Tell from its type, or from its kernel, whether a layer is a GEMM that is no fused attention."""
    kernel = f"{layer.get('TacticName') or ''} {layer.get('Name') or ''}"
    if _ATTENTION.search(str(layer.get("TacticName") or "")) or "_mha_" in kernel:
        return False
    if _GEMM_LAYER.search(str(layer.get("LayerType"))):
        return True
    return bool(_GEMM_KERNEL.search(kernel))


def operands(layer: Layer) -> tuple[str, str]:
    """The types of a GEMM's two operands, by its tensors and by the name of its kernel."""
    inputs = _tensors(layer, "Inputs")
    tactic = str(layer.get("TacticName") or "")
    left = inputs[0].type if inputs else UNTOLD
    by_kernel = operands_of_kernel(tactic)
    weights = [tensor for tensor in _tensors(layer, "Constants") if tensor.matrix]
    right = max(weights, key=lambda tensor: math.prod(tensor.sizes)).type if weights else _second(inputs, tactic)
    if by_kernel is not None and left == by_kernel[1] != by_kernel[0]:
        by_kernel = by_kernel[::-1]  # it multiplies the transposes
    if by_kernel is None:
        return (left, right)
    return (_type_of_both(left, by_kernel[0]), _type_of_both(right, by_kernel[1]))


def _second(inputs: list[_Tensor], tactic: str) -> str:
    """The type of an operand that is no constant, from the layer's second input.

    The second input may also be a residual that is added to the GEMM. So only FP8 is believed where the kernel's name
    may state the types.
    """
    others = [tensor.type for tensor in inputs[1:] if tensor.matrix]
    if "fp8" in others:
        return "fp8"
    return others[0] if others and not tactic else UNTOLD


def operands_of_kernel(tactic: str) -> tuple[str, str] | None:
    """The types of both operands that a kernel's name states; None where it states none."""
    match = _XMMA.search(tactic) or _CUTLASS.search(tactic)
    if match:
        return (_ELEMENTS.get(match[1], match[1]), _ELEMENTS.get(match[2], match[2]))
    return None


def _type_of_both(by_tensor: str, by_kernel: str) -> str:
    """The type of an operand by two sources; where they disagree, the type that is not FP8."""
    if UNTOLD in (by_tensor, by_kernel):
        return by_kernel if by_tensor == UNTOLD else by_tensor
    return by_kernel if by_tensor == "fp8" else by_tensor


def _with_nodes(listed: list[tuple[Layer, EngineGemm]]) -> Iterable[EngineGemm]:
    """Yield the GEMMs of a profile, each with the nodes that it computes.

    A layer's name lists its nodes; a fusion's does not. A fusion computes those nodes of its metadata that no other
    layer's name lists: the metadata also has the GEMM before it, whose scales were fused into it.
    """
    named = [_named(layer, gemm.nodes) for layer, gemm in listed]
    elsewhere = {node for nodes in named for node in nodes}
    for (_, gemm), nodes in zip(listed, named, strict=True):
        multiplied = tuple(node for node in gemm.nodes if multiplies(node) and node not in elsewhere)
        computed = nodes or multiplied or gemm.nodes
        yield EngineGemm(computed, gemm.operands, gemm.result, gemm.layers)


def multiplies(node: str) -> bool:
    """Tell from its name whether an ONNX node is a GEMM of the graph."""
    module = names.module_of(node) or ""
    attention = (of(module, gemm) for of in (names.attention_gemm, names.step_gemm) for gemm in names.ATTENTION_GEMMS)
    return node in (names.matmul(module), *attention)


def _named(layer: Layer, nodes: tuple[str, ...]) -> tuple[str, ...]:
    """The nodes of a layer's metadata that its name lists."""
    name = _MYELIN.sub("", _PROFILE.sub("", str(layer.get("Name"))))
    listed = {_plain(part) for part in name.split("+")}
    return tuple(node for node in nodes if _plain(node) in listed)


def _plain(node: str) -> str:
    return node.strip().replace(".", "_")


def _tensors(layer: Layer, end: str) -> list[_Tensor]:
    listed = layer.get(end)
    if isinstance(listed, list):
        return [_tensor(tensor) for tensor in listed if isinstance(tensor, dict)]
    return []


def _tensor(tensor: Mapping[str, object]) -> _Tensor:
    stated = next((str(tensor[key]) for key in TYPE_KEYS if tensor.get(key)), "")
    match = _TYPE.search(stated)
    sizes = tensor.get("Dimensions")
    numbers = tuple(size for size in sizes if isinstance(size, int)) if isinstance(sizes, list) else ()
    return _Tensor(program_type_name(match[0]) if match else UNTOLD, numbers)
