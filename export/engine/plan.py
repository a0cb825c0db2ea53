"""Read from an engine's plan which GEMMs take FP8 on both sides.

Neither the size of an engine nor its graph shows this: a graph with FP8 weights alone stores FP8 too, and multiplies in
BF16. A TensorRT-RTX plan holds the program of its compiler as text (`program`). A `fully_connected` in it is a matrix
GEMM: its name lists the ONNX nodes that it computes (several where GEMMs of one input were merged), and its first
two inputs are the operands. In the programs of profile 1 and up every name ends in ` [profile 1]`. The GEMM's node
also appears in the `layers` of pointwise kernels that scale its result; those are no GEMMs, so only the names of
`fully_connected` count. A program that does not parse is "unknown", never a pass.

The result's type: with per-channel weights and FP32 scales an FP8 GEMM has an FP32 result, and one multiplication
applies `s_x · s_w[channel]`. With scales in BF16 or FP16 the result has that narrower type, unscaled (`narrow`).
Per-tensor weights put the scale into the GEMM itself, whose result then has the compute type: fp8q does not export
this, and it counts as narrow too.

TensorRT proper needs a GPU to inspect an engine; its inspector's JSON is read into the same classes (`inspector`), with
two differences: a type that the inspector does not show makes a GEMM unknown, and a result narrower than FP32 belongs
to a kernel that applies the scales itself.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..onnx_file import names
from .program import Buffer, Program, read_programs

Profile = int
Kind = Literal["plan", "inspector", "unknown"]
_OPERANDS = 2
#: The type of an operand that the engine does not show.
UNTOLD = "unknown"


@dataclass(frozen=True)
class EngineGemm:
    """One GEMM of an engine: its ONNX `nodes`, the types of its `operands` and of its `result` (`fp8`,
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

    @property
    def untold(self) -> bool:
        """Tell whether it may take FP8 on both sides: an operand's type is not shown, and no other type is."""
        return UNTOLD in self.operands and set(self.operands) <= {UNTOLD, "fp8"}

    def __str__(self) -> str:
        """Format it as `fp8 × fp8 -> fp32`."""
        return f"{self.operands[0]} × {self.operands[1]} -> {self.result}"


@dataclass(frozen=True)
class Kernel:
    """A kernel that is no plain GEMM: the ONNX nodes fused in it (`layers`), and the types of its inputs and
    outputs, in order.
    """

    name: str
    layers: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The GEMMs of an engine by optimization profile, the source of this knowledge (`kind`), the other
    kernels, and the `targets` named by its programs (sm89); `programs` is empty for an inspector's.
    """

    profiles: Mapping[Profile, tuple[EngineGemm, ...]]
    kind: Kind = "plan"
    kernels: Mapping[Profile, tuple[Kernel, ...]] = field(default_factory=dict, compare=False)
    targets: frozenset[str] = field(default=frozenset(), compare=False)
    programs: tuple[Program, ...] = field(default=(), compare=False, repr=False)

    def gemms(self, node: str, profile: Profile) -> list[EngineGemm]:
        """The GEMMs that compute an ONNX node in one profile."""
        return [gemm for gemm in self.profiles.get(profile, ()) if node in gemm.nodes]


@dataclass(frozen=True)
class Evidence:
    """The types in which an engine runs the GEMMs that `scales.json` expects on FP8.

    `fp8`: modules whose GEMM takes FP8 on both sides in every profile. `not_fp8`: module -> the types that ran instead.
    `unknown`: module -> why its types are not known; all modules if the engine cannot be read, has fewer or more
    profiles, or names none of the expected GEMMs (`kind` is `unknown` then). `narrow`: modules of `fp8` whose result is
    narrower than FP32; in a plan's own program that is an unscaled sum.
    """

    kind: Kind
    fp8: frozenset[str] = frozenset()
    not_fp8: Mapping[str, str] = field(default_factory=dict)
    narrow: frozenset[str] = frozenset()
    unknown: Mapping[str, str] = field(default_factory=dict)


def read_plan(plan: Buffer) -> Plan | None:
    """Read the GEMMs of a serialized TensorRT-RTX engine, the whole of it as bytes or a mapped file; None
    where none parse.
    """
    by_profile: dict[Profile, list[EngineGemm]] = {}
    kernels: dict[Profile, list[Kernel]] = {}
    programs: list[Program] = []
    targets: set[str] = set()
    for program in read_programs(plan):
        targets |= program.targets
        if gemms := list(_gemms(program)):  # a program of one profile; those of single kernels repeat what it says
            by_profile.setdefault(program.profile, []).extend(gemms)
            kernels.setdefault(program.profile, []).extend(_kernels(program))
            programs.append(program)
    if not by_profile:
        return None
    return Plan(
        {profile: tuple(by_profile[profile]) for profile in sorted(by_profile)},
        kernels={profile: tuple(made) for profile, made in kernels.items()},
        targets=frozenset(targets - {"*"}),
        programs=tuple(programs),
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


def _gemms(program: Program) -> Iterator[EngineGemm]:
    for statement in program.statements:
        types, results = [[program.type(name) for name in names] for names in (statement.inputs, statement.outputs)]
        if statement.nodes and len(types) >= _OPERANDS and len(results) == 1:
            yield EngineGemm(statement.nodes, (types[0], types[1]), results[0], statement.layers)


def _kernels(program: Program) -> Iterator[Kernel]:
    for statement in program.statements:
        if not statement.nodes:
            ends = (tuple(program.type(name) for name in names) for names in (statement.inputs, statement.outputs))
            yield Kernel(statement.name, statement.layers, *ends)


def evidence(plan: Plan | None, expected: Mapping[str, str], profiles: int = 1) -> Evidence:
    """Tell which modules' GEMMs take FP8 on both sides in every one of `profiles` profiles.

    `expected`: name of the GEMM's ONNX node -> module. A GEMM that a profile of a plan does not show counts as
    not FP8, and as unknown where the inspector does not show it.
    """
    if (reason := _unreadable(plan, profiles)) is not None or plan is None:
        return Evidence("unknown", unknown=dict.fromkeys(expected.values(), reason or ""))
    shown = {module: [plan.gemms(node, profile) for profile in range(profiles)] for node, module in expected.items()}
    if shown and not any(any(gemms) for gemms in shown.values()):
        return Evidence("unknown", unknown={module: _why_not_fp8(gemms) or "" for module, gemms in shown.items()})
    unknown = {
        module: reason
        for module, gemms in shown.items()
        if plan.kind == "inspector" and (reason := _why_unknown(gemms))
    }
    not_fp8 = {
        module: reason for module, gemms in shown.items() if module not in unknown and (reason := _why_not_fp8(gemms))
    }
    fp8 = frozenset(shown.keys() - not_fp8.keys() - unknown.keys())
    exact = {"fp32", UNTOLD} if plan.kind == "inspector" else {"fp32"}
    narrow = frozenset(
        module for module in fp8 for gemms in shown[module] for gemm in gemms if gemm.result not in exact
    )
    known = not shown or fp8 or not_fp8
    return Evidence(plan.kind if known else "unknown", fp8, not_fp8, narrow, unknown)


def _unreadable(plan: Plan | None, profiles: int) -> str | None:
    """Say why an engine that should have `profiles` profiles cannot be judged; None if it can."""
    if plan is None:
        return "the engine does not read"
    if missing := [profile for profile in range(profiles) if profile not in plan.profiles]:
        return f"the engine shows no GEMM of profile {missing[0]}"
    if more := [profile for profile in plan.profiles if profile not in range(profiles)]:
        return f"the engine shows GEMMs of profile {more[0]}, and {profiles} are expected"
    return None


def modules_by_types(plan: Plan) -> dict[str, int]:
    """Count modules by the types of their GEMMs, as `{"int8 × int8 -> fp32": 28}`, the most frequent first; types
    that differ between profiles are joined by `and`.
    """
    shown: dict[str, set[str]] = {}
    for gemm in (gemm for gemms in plan.profiles.values() for gemm in gemms):
        for node in gemm.nodes:
            if (module := names.module_of(node)) and node == names.matmul(module):
                shown.setdefault(module, set()).add(str(gemm))
    return dict(Counter(" and ".join(sorted(types)) for types in shown.values()).most_common())


def _why_not_fp8(gemms: list[list[EngineGemm]]) -> str | None:
    """Say where a GEMM lacks FP8 on a side; None if it never does. `gemms`: the GEMM in each profile."""
    for profile, shown in enumerate(gemms):
        if not shown:
            return f"the engine shows no such GEMM in profile {profile}"
        for gemm in shown:
            if not gemm.fp8:
                return f"{gemm} in profile {profile}"
    return None


def _why_unknown(gemms: list[list[EngineGemm]]) -> str | None:
    """Say why it is unknown whether a GEMM is FP8 on both sides; None if it is known, also if it is not FP8 in some
    profile. `gemms`: the GEMM in each profile.
    """
    if any(not (gemm.fp8 or gemm.untold) for shown in gemms for gemm in shown):
        return None
    for profile, shown in enumerate(gemms):
        if not shown:
            return f"the inspector shows no such GEMM in profile {profile}"
        for gemm in shown:
            if gemm.untold:
                return f"{gemm} in profile {profile}"
    return None
