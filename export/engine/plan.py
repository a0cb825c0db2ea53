"""Read from an engine's plan which matrix products take FP8 on both sides.

Neither the size of an engine nor its graph shows this: a graph with FP8 weights alone stores FP8 too, and multiplies in
BF16. A TensorRT-RTX plan holds the program of its compiler as text (`program`). A `fully_connected` in it is a matrix
product: its name lists the ONNX nodes that it computes (several where products of one input were merged), and its first
two inputs are the operands. In the programs of profile 1 and up every name ends in ` [profile 1]`. The product's node
also appears in the `layers` of pointwise kernels that scale its result; those are no products, so only the names of
`fully_connected` count. A program that does not parse is "unknown", never a pass.

The result's type: with per-channel weights and FP32 scales an FP8 product has an FP32 result, and one multiplication
applies `s_x · s_w[channel]`. With scales in BF16 or FP16 the result has that narrower type, unscaled (`narrow`).
Per-tensor weights put the scale into the product itself, whose result then has the compute type: fp8q does not export
this, and it counts as narrow too.

TensorRT proper needs a GPU to inspect an engine; its inspector's JSON is read into the same form.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..onnx_file import names
from .program import LAYER, Buffer, Program, program_type_name, read_programs

Profile = int
Kind = Literal["plan", "inspector", "unknown"]
_OPERANDS = 2


@dataclass(frozen=True)
class EngineProduct:
    """One matrix product of an engine: its ONNX `nodes`, the types of its `operands` and of its `result` (`fp8`,
    `bf16`, …).

    `layers`: all ONNX nodes fused into it, the DequantizeLinears of its operands included.
    """

    nodes: tuple[str, ...]
    operands: tuple[str, str]
    result: str
    layers: tuple[str, ...] = field(default=(), compare=False)

    @property
    def fp8(self) -> bool:
        """Tell whether both operands are FP8."""
        return self.operands == ("fp8", "fp8")

    def __str__(self) -> str:
        """Format it as `fp8 × fp8 -> fp32`."""
        return f"{self.operands[0]} × {self.operands[1]} -> {self.result}"


@dataclass(frozen=True)
class Kernel:
    """A kernel that is no plain product: the ONNX nodes fused in it (`layers`), and the types of its inputs and
    outputs, in order.
    """

    name: str
    layers: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The matrix products of an engine by optimization profile, the source of this knowledge (`kind`), the other
    kernels, and the `targets` named by its programs (sm89); `programs` is empty for an inspector's.
    """

    profiles: Mapping[Profile, tuple[EngineProduct, ...]]
    kind: Kind = "plan"
    kernels: Mapping[Profile, tuple[Kernel, ...]] = field(default_factory=dict, compare=False)
    targets: frozenset[str] = field(default=frozenset(), compare=False)
    programs: tuple[Program, ...] = field(default=(), compare=False, repr=False)

    def products(self, node: str, profile: Profile) -> list[EngineProduct]:
        """The products that compute an ONNX node in one profile."""
        return [product for product in self.profiles.get(profile, ()) if node in product.nodes]


@dataclass(frozen=True)
class Evidence:
    """The types in which an engine runs the promised products.

    `fp8`: modules whose product takes FP8 on both sides in every profile. `wide`: every other promised module, and what
    ran instead. `narrow`: those of `fp8` whose product answers, unscaled, in less than FP32. `unknown` is said when the
    engine does not read, misses a profile or has more, or names none of the promised products.
    """

    kind: Kind
    fp8: frozenset[str] = frozenset()
    wide: Mapping[str, str] = field(default_factory=dict)
    narrow: frozenset[str] = frozenset()


def read_plan(plan: Buffer) -> Plan | None:
    """Read the matrix products of a serialized TensorRT-RTX engine, the whole of it as bytes or a mapped file; None
    where none parse.
    """
    found: dict[Profile, list[EngineProduct]] = {}
    kernels: dict[Profile, list[Kernel]] = {}
    kept: list[Program] = []
    targets: set[str] = set()
    for program in read_programs(plan):
        targets |= program.targets
        if products := list(
            _products(program)
        ):  # a program of one profile; those of single kernels repeat what it says
            found.setdefault(program.profile, []).extend(products)
            kernels.setdefault(program.profile, []).extend(_kernels(program))
            kept.append(program)
    if not found:
        return None
    return Plan(
        {profile: tuple(found[profile]) for profile in sorted(found)},
        kernels={profile: tuple(made) for profile, made in kernels.items()},
        targets=frozenset(targets - {"*"}),
        programs=tuple(kept),
    )


def doubt(data: Buffer, plan: Plan, target: str) -> str | None:
    """Say why a TensorRT-RTX engine contradicts its text, or is not for `target`; None where it does not: its length
    must be the stated one (8 bytes from 16), and its programs must name the target.
    """
    stated = int.from_bytes(memoryview(data).cast("B")[16:24], "little")
    if stated != len(data):
        return f"it has {len(data)} bytes and states {stated}, so it is cut off or of another format"
    if plan.targets != {target}:
        return f"its programs are for {' and '.join(sorted(plan.targets)) or 'no target that it names'}"
    return None


def _products(program: Program) -> Iterator[EngineProduct]:
    for statement in program.statements:
        types, results = [[program.type(name) for name in names] for names in (statement.inputs, statement.outputs)]
        if statement.nodes and len(types) >= _OPERANDS and len(results) == 1:
            yield EngineProduct(statement.nodes, (types[0], types[1]), results[0], statement.layers)


def _kernels(program: Program) -> Iterator[Kernel]:
    for statement in program.statements:
        if not statement.nodes:
            ends = (tuple(program.type(name) for name in names) for names in (statement.inputs, statement.outputs))
            yield Kernel(statement.name, statement.layers, *ends)


def read_inspector(information: str) -> Plan | None:
    """Read the matrix products from an engine inspector's JSON (`get_engine_information`, built with detailed profiling
    verbosity).

    Follows NVIDIA's documentation of TensorRT 10 and 11 and was never run on an engine: each of `Layers` has a `Name`,
    a `LayerType`, its ONNX nodes in `Metadata`, and `Inputs` and `Outputs` with a `Format/Datatype` (10) or a
    `DataType` (11). Only layers that are declared matrix products count, and other forms give None, so the worst
    outcome of a surprise is "unknown".
    """
    try:
        layers = [layer for layer in json.loads(information)["Layers"] if isinstance(layer, dict)]
    except (ValueError, KeyError, TypeError):
        return None
    ends = [layer.get(end) or [] for layer in layers for end in ("Inputs", "Outputs")]
    if not all(isinstance(tensors, list) and all(isinstance(tensor, dict) for tensor in tensors) for tensors in ends):
        return None
    found: dict[Profile, list[EngineProduct]] = {}
    kernels: dict[Profile, list[Kernel]] = {}
    for layer in layers:
        nodes, mark = tuple(LAYER.findall(str(layer.get("Metadata")))), _PROFILE.search(str(layer.get("Name")))
        operands = [_inspected_type(tensor) for tensor in layer.get("Inputs") or []]
        results = [_inspected_type(tensor) for tensor in layer.get("Outputs") or []]
        profile = int(mark[1]) if mark else 0
        if _IS_PRODUCT.search(str(layer.get("LayerType"))) and nodes and len(operands) >= 2 and len(results) == 1:
            found.setdefault(profile, []).append(EngineProduct(nodes, (operands[0], operands[1]), results[0], nodes))
        else:
            kernels.setdefault(profile, []).append(
                Kernel(str(layer.get("Name")), nodes, tuple(operands), tuple(results))
            )
    told = {profile: tuple(found[profile]) for profile in sorted(found)}
    return Plan(told, "inspector", {profile: tuple(made) for profile, made in kernels.items()}) if found else None


_IS_PRODUCT = re.compile("gemm|matrix|matmul", re.IGNORECASE)
_PROFILE = re.compile(r"\[profile (\d+)\]")
_INSPECTED = re.compile("fp8|float8|bfloat16|bf16|half|fp16|float16|float|fp32|int8", re.IGNORECASE)


def _inspected_type(tensor: Mapping[str, object]) -> str:
    match = _INSPECTED.search(str(tensor.get("DataType") or tensor.get("Format/Datatype")))
    return program_type_name(match[0]) if match else "unknown"


def evidence(plan: Plan | None, promised: Mapping[str, str], profiles: int = 1) -> Evidence:
    """Tell which modules' products take FP8 on both sides in every one of `profiles` profiles.

    `promised`: name of the product's ONNX node -> module. A product that a profile does not show counts as wide.
    """
    if plan is None:
        return Evidence("unknown", wide=dict.fromkeys(promised.values(), "the engine does not read"))
    if missing := [profile for profile in range(profiles) if profile not in plan.profiles]:
        return Evidence(
            "unknown", wide=dict.fromkeys(promised.values(), f"the engine shows no product of profile {missing[0]}")
        )
    if more := [profile for profile in plan.profiles if profile not in range(profiles)]:
        return Evidence(
            "unknown",
            wide=dict.fromkeys(
                promised.values(), f"the engine shows products of profile {more[0]}, and {profiles} are expected"
            ),
        )
    shown = {module: [plan.products(node, profile) for profile in range(profiles)] for node, module in promised.items()}
    wide = {module: reason for module, products in shown.items() if (reason := _why_wide(products))}
    fp8 = frozenset(shown.keys() - wide.keys())
    narrow = frozenset(
        module for module in fp8 for products in shown[module] for product in products if product.result != "fp32"
    )
    known = not shown or any(any(products) for products in shown.values())
    return Evidence(plan.kind if known else "unknown", fp8, wide, narrow)


def modules_by_types(plan: Plan) -> dict[str, int]:
    """Count modules by the types of their products, as `{"int8 × int8 -> fp32": 28}`, the most frequent first; types
    that differ between profiles are joined by `and`.
    """
    shown: dict[str, set[str]] = {}
    for product in (product for products in plan.profiles.values() for product in products):
        for node in product.nodes:
            if (module := names.module_of(node)) and node == names.matmul(module):
                shown.setdefault(module, set()).add(str(product))
    return dict(Counter(" and ".join(sorted(types)) for types in shown.values()).most_common())


def _why_wide(products: list[list[EngineProduct]]) -> str | None:
    """Say why a product, given for each profile, lacks FP8 on a side somewhere; None where it does not."""
    for profile, shown in enumerate(products):
        if not shown:
            return f"the engine shows no such product in profile {profile}"
        for product in shown:
            if not product.fp8:
                return f"{product} in profile {profile}"
    return None
