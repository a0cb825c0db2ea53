"""Read the program of an engine from its plan: which matrix products take FP8 on both sides.

An engine's size or its graph does not tell. A graph with FP8 weights alone stores FP8 too, and multiplies in BF16. But
a TensorRT-RTX plan holds the program of its compiler as text (`program`). A `fully_connected` in it is a matrix
product: its name lists the ONNX nodes it computes (several where products of one input were merged), the first two
inputs are its operands. In the programs of profile 1 and up every name ends in ` [profile 1]`. A product's node also
appears in the `layers` of pointwise kernels that scale its result; those are no products, so only the names of
`fully_connected` count. Whatever does not read is "unknown", never a pass.

What the result's type says: with per-channel weights and FP32 scales an FP8 product answers in FP32, and one
multiplication applies `s_x · s_w[channel]`. With scales in BF16 or FP16 it answers in that narrower type, unscaled
(`narrow`). Per-tensor weights put the scale into the product itself, which then answers in the compute type, whatever
the scale's own type: that is not what fp8q exports, and counts as narrow too.

TensorRT proper needs a GPU to look into an engine; its inspector answers in JSON, read here into the same shape.
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
    """One matrix product of an engine: the ONNX `nodes` it computes, its `operands`' types and its `result`'s (`fp8`,
    `bf16`, …).

    `layers`: every ONNX node that went into it, the DequantizeLinears behind its operands included.
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
        """As `fp8 × fp8 -> fp32`."""
        return f"{self.operands[0]} × {self.operands[1]} -> {self.result}"


@dataclass(frozen=True)
class Kernel:
    """A kernel that is no plain product: the ONNX nodes fused in it (`layers`), and the types of what it reads and
    writes, in its own order.
    """

    name: str
    layers: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The matrix products of an engine by optimization profile, who told (`kind`), the kernels around them, and the
    `targets` that its programs name (sm89); `programs` as they stand in the plan, none from an inspector.
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
    engine does not read, misses a profile or has more, or names no promised product at all.
    """

    kind: Kind
    fp8: frozenset[str] = frozenset()
    wide: Mapping[str, str] = field(default_factory=dict)
    narrow: frozenset[str] = frozenset()


def read_plan(plan: Buffer) -> Plan | None:
    """Read the matrix products out of a serialized TensorRT-RTX engine (the whole of it, bytes or a mapping of the
    file); None when it holds none that read.
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
    """Why a TensorRT-RTX engine is not what its text says, or not for `target`: the file is not as long as it states (8
    bytes from 16), or its programs name another.
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
    """Read the matrix products out of an engine inspector's JSON (`get_engine_information`, built with detailed
    profiling verbosity).

    Written from NVIDIA's documentation of TensorRT 10 and 11, never run on an engine: each of `Layers` has a `Name`, a
    `LayerType`, its ONNX nodes in
    `Metadata`, and `Inputs` and `Outputs` with a `Format/Datatype` (10) or a `DataType` (11). Only layers that call
    themselves matrix products count, and what does not read leaves None, so the worst that can come of a surprise is
    "unknown".
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
    """Hold a plan against the promise: which modules' products take FP8 on both sides in every one of `profiles`
    profiles.

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
    known = any(any(products) for products in shown.values())
    return Evidence(plan.kind if known else "unknown", fp8, wide, narrow)


def modules_by_types(plan: Plan) -> dict[str, int]:
    """Count modules by the types of their products, as `{"int8 × int8 -> fp32": 28}`, the most first; what differs
    between profiles is joined by `and`.
    """
    shown: dict[str, set[str]] = {}
    for product in (product for products in plan.profiles.values() for product in products):
        for node in product.nodes:
            if (module := names.module_of(node)) and node == names.matmul(module):
                shown.setdefault(module, set()).add(str(product))
    return dict(Counter(" and ".join(sorted(types)) for types in shown.values()).most_common())


def _why_wide(products: list[list[EngineProduct]]) -> str | None:
    """Why a product, given as it is in each profile, is not FP8 on both sides everywhere; None when it is."""
    for profile, shown in enumerate(products):
        if not shown:
            return f"the engine shows no such product in profile {profile}"
        for product in shown:
            if not product.fp8:
                return f"{product} in profile {profile}"
    return None
