"""What an engine will run, read from the engine: which matrix products take FP8 on both sides.

An engine's size or its graph does not tell. A graph with FP8 weights alone stores FP8 too, and multiplies in BF16. But
a TensorRT-RTX plan holds the program of its compiler, Myelin, as text, one for each optimization profile and one for
each fused kernel that is finished at run time:

    header { version = 5 … }
    descriptors {
      tensor={ … dims={ 128 512 } name="__mye1_dconst" … type=fp8_e4m3 }
      sub_tensor={ … name="__mye2^deref" … type=fp8_e4m3 }
    }
    main {
      fully_connected={ name="q.matmul+k.matmul" output={"__mye3" } input={"__mye2^deref" "__mye1_dconst" "…_alpha"
      "…_beta" } … } function={ name=__myl_MulCast … layers="[ONNX Layer: q.matmul]" }
    }

A `fully_connected` is a matrix product: its name lists the ONNX nodes it computes (several where products of one input
were merged), the first two inputs are its operands. In the programs of profile 1 and up every name ends in ` [profile
1]`. A product's node also appears in the
`layers` of pointwise kernels that scale its result; those are no products, so only the names of `fully_connected`
count. Found by reading plans of TensorRT-RTX 1.7.1 for sm89 and sm120; the format is undocumented, so whatever does not
read is "unknown", never a pass.

What the result's type says: with per-channel weights and FP32 scales an FP8 product answers in FP32, and one
multiplication applies
`s_x · s_w[channel]`. With scales in BF16 or FP16 it answers in that narrower type, unscaled (`narrow`). Per-tensor
weights put the scale into the product itself, which then answers in the compute type, whatever the scale's own type:
there only the graph tells (`lint`).

TensorRT proper needs a GPU to look into an engine; its inspector answers in JSON, read here into the same shape.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from .. import names

#: What the plan and the inspector call an element type -> the name used here.
TYPES = {"float": "fp32", "half": "fp16", "bfloat16": "bf16", "fp8_e4m3": "fp8", "float8": "fp8", "float16": "fp16"}
Profile = int
Kind = Literal["plan", "inspector", "unknown"]


@dataclass(frozen=True)
class Product:
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
        """Whether both operands are FP8."""
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
    `targets` that its programs name (sm89).
    """

    profiles: Mapping[Profile, tuple[Product, ...]]
    kind: Kind = "plan"
    kernels: Mapping[Profile, tuple[Kernel, ...]] = field(default_factory=dict, compare=False)
    targets: frozenset[str] = field(default=frozenset(), compare=False)

    def products(self, node: str, profile: Profile) -> list[Product]:
        """The products that compute an ONNX node in one profile."""
        return [product for product in self.profiles.get(profile, ()) if node in product.nodes]


@dataclass(frozen=True)
class Evidence:
    """What an engine makes of the promised products.

    `fp8`: modules whose product takes FP8 on both sides in every profile. `wide`: every other promised module, and what
    ran instead. `narrow`: those of `fp8` whose product answers, unscaled, in less than FP32. `unknown` is said when the
    engine does not read, misses a profile or has more, or names no promised product at all.
    """

    kind: Kind
    fp8: frozenset[str] = frozenset()
    wide: Mapping[str, str] = field(default_factory=dict)
    narrow: frozenset[str] = frozenset()


# A program: the run of text after its header's first line. Names may hold any UTF-8, so only control characters end it
# (0x1F separates ONNX layers).
_PROGRAM = re.compile(rb"header \{\n  version = \d[\t\n\x1f\x20-\x7e\x80-\xff]*")
_TENSOR = re.compile(rb'^  (?:sub_)?tensor=\{[^\n]*? name="([^"\n]*)"[^\n]*? type=(\w+) \}$', re.MULTILINE)
_PRODUCT = re.compile(
    rb'^  fully_connected=\{ name="([^"\n]*)" output=\{([^\n]*?)\} input=\{([^\n]*?)\} [a-z]([^\n]*)', re.MULTILINE
)
_KERNEL = re.compile(
    rb"^  function=\{ name=(\S+) [^\n]*? input_args=\{([^\n]*?)\} [^\n]*?output_args=\{([^\n]*?)\} ([^\n]*)",
    re.MULTILINE,
)
# What a program runs on; that of a single kernel may say `*`, any.
_TARGET = re.compile(rb"^  accelerators=\{([^\n}]*)\}$", re.MULTILINE)
_LAYERS = re.compile(rb' layers="([^"\n]*)"')
_QUOTED = re.compile(rb'"([^"\n]*)"')
_NODE = re.compile(r"(?P<node>.+?)(?: \[profile (?P<profile>\d+)\])?")


def read_plan(plan: bytes | bytearray | memoryview) -> Plan | None:
    """Read the matrix products out of a serialized TensorRT-RTX engine; None when it holds none that read.

    `plan`: the whole engine, bytes or a mapping of the file; it is searched in place (3 GB/s), and only its programs
    are copied, one at a time.
    """
    found: dict[Profile, list[Product]] = {}
    kernels: dict[Profile, list[Kernel]] = {}
    targets: set[str] = set()
    for program in _PROGRAM.finditer(memoryview(plan).cast("B")):
        types = {name: _type_name(kind.decode()) for name, kind in _TENSOR.findall(program.group())}
        products = list(_products(program.group(), types))
        targets.update(name for listed in _TARGET.findall(program.group()) for name in listed.decode().split())
        for profile, product in products:
            found.setdefault(profile, []).append(product)
        if products:  # a program of one profile; those of single kernels repeat what it says
            kernels.setdefault(products[0][0], []).extend(_kernels(program.group(), types))
    told = {profile: tuple(found[profile]) for profile in sorted(found)}
    return (
        Plan(
            told,
            kernels={profile: tuple(made) for profile, made in kernels.items()},
            targets=frozenset(targets - {"*"}),
        )
        if found
        else None
    )


def doubt(data: bytes | bytearray | memoryview, plan: Plan, target: str) -> str | None:
    """Why a TensorRT-RTX engine is not what its text says, or not for `target`: the file is not as long as it states (8
    bytes from 16), or its programs name another.
    """
    stated = int.from_bytes(memoryview(data).cast("B")[16:24], "little")
    if stated != len(data):
        return f"it has {len(data)} bytes and states {stated}, so it is cut off or of another format"
    if plan.targets != {target}:
        return f"its programs are for {' and '.join(sorted(plan.targets)) or 'no target that it names'}"
    return None


def _products(program: bytes, types: Mapping[bytes, str]) -> Iterator[tuple[Profile, Product]]:
    for statement in _PRODUCT.finditer(program):
        label, output, inputs, rest = (statement.group(i) for i in (1, 2, 3, 4))
        operands, results = _types(inputs, types)[:2], _types(output, types)
        if len(operands) == 2 and len(results) == 1:
            yield _named(label.decode(errors="replace").split("+"), operands, results[0], _layers(rest))


def _kernels(program: bytes, types: Mapping[bytes, str]) -> Iterator[Kernel]:
    for statement in _KERNEL.finditer(program):
        name, inputs, outputs, rest = (statement.group(i) for i in (1, 2, 3, 4))
        yield Kernel(
            name.decode(errors="replace"), _layers(rest), tuple(_types(inputs, types)), tuple(_types(outputs, types))
        )


def _types(names: bytes, types: Mapping[bytes, str]) -> list[str]:
    return [types.get(name, "unknown") for name in _QUOTED.findall(names)]


def _layers(rest: bytes) -> tuple[str, ...]:
    """The ONNX nodes at the end of a statement, without the profile's mark."""
    listed = _LAYERS.search(rest)
    nodes = _LAYER.findall(listed[1].decode(errors="replace")) if listed else []
    return tuple(match["node"] for match in map(_NODE.fullmatch, nodes) if match)


def _type_name(name: str) -> str:
    return TYPES.get(name.lower(), name.lower())


def _named(labels: Iterable[str], operands: list[str], result: str, layers: tuple[str, ...]) -> tuple[Profile, Product]:
    """The product of nodes labelled as the engine does, and the profile they are of."""
    matches = [match for label in labels if (match := _NODE.fullmatch(label.strip()))]
    profile = max((int(match["profile"] or 0) for match in matches), default=0)
    return profile, Product(tuple(match["node"] for match in matches), (operands[0], operands[1]), result, layers)


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
    found: dict[Profile, list[Product]] = {}
    kernels: dict[Profile, list[Kernel]] = {}
    for layer in layers:
        nodes, mark = tuple(_LAYER.findall(str(layer.get("Metadata")))), _PROFILE.search(str(layer.get("Name")))
        operands = [_inspected_type(tensor) for tensor in layer.get("Inputs") or []]
        results = [_inspected_type(tensor) for tensor in layer.get("Outputs") or []]
        profile = int(mark[1]) if mark else 0
        if _IS_PRODUCT.search(str(layer.get("LayerType"))) and nodes and len(operands) >= 2 and len(results) == 1:
            found.setdefault(profile, []).append(Product(nodes, (operands[0], operands[1]), results[0], nodes))
        else:
            kernels.setdefault(profile, []).append(
                Kernel(str(layer.get("Name")), nodes, tuple(operands), tuple(results))
            )
    told = {profile: tuple(found[profile]) for profile in sorted(found)}
    return Plan(told, "inspector", {profile: tuple(made) for profile, made in kernels.items()}) if found else None


_LAYER = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
_IS_PRODUCT = re.compile("gemm|matrix|matmul", re.IGNORECASE)
_PROFILE = re.compile(r"\[profile (\d+)\]")
_INSPECTED = re.compile("fp8|float8|bfloat16|bf16|half|fp16|float16|float|fp32|int8", re.IGNORECASE)


def _inspected_type(tensor: Mapping[str, object]) -> str:
    match = _INSPECTED.search(str(tensor.get("DataType") or tensor.get("Format/Datatype")))
    return _type_name(match[0]) if match else "unknown"


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
    """How many modules' products are of which types, as `{"int8 × int8 -> fp32": 28}`, the most first; what differs
    between profiles is joined by `and`.
    """
    shown: dict[str, set[str]] = {}
    for product in (product for products in plan.profiles.values() for product in products):
        for node in product.nodes:
            if (module := names.module_of(node)) and node == names.matmul(module):
                shown.setdefault(module, set()).add(str(product))
    return dict(Counter(" and ".join(sorted(types)) for types in shown.values()).most_common())


def _why_wide(products: list[list[Product]]) -> str | None:
    """Why a product, given as it is in each profile, is not FP8 on both sides everywhere; None when it is."""
    for profile, shown in enumerate(products):
        if not shown:
            return f"the engine shows no such product in profile {profile}"
        for product in shown:
            if not product.fp8:
                return f"{product} in profile {profile}"
    return None
