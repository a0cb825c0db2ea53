"""Prove an engine: compare its types and numbers with those that its run expects.

First the types (`plan.evidence`): which expected GEMMs take FP8 on both sides. Then, for TensorRT-RTX's plans, the
numbers of these GEMMs (`numbers`), the types of the KV cache's inputs and outputs, and the GEMMs of attention.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from ...quantize.scales.scheme import in_two_codes
from ..lint.rules import Expectation
from ..onnx_file import names
from ..onnx_file.indexed import Indexed
from .expected_gemms import ExpectedGemm, attended, expected_gemms
from .numbers import CODES, FACTORS, INPUT, RELATIVE, Difference, compare_numbers
from .plan import Evidence, Plan, evidence
from .program import Buffer, Pool, read_pool
from .second_codes import TERMS, compare_attention, compare_terms

_CACHE = re.compile(r"(?P<name>(?:past|new)_key_values\.\d+\.(?:key|value))(?: \[profile \d+\])?(?:\.\d+)?")
_FP8 = TensorProto.FLOAT8E4M3FN
_ELEMENTS: dict[int, str] = {
    _FP8: "fp8",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.FLOAT16: "fp16",
    TensorProto.FLOAT: "fp32",
}
_ALPHA = 2
#: The check of an attention GEMM whose types are hidden inside a fused kernel.
INSIDE = "types inside a kernel"


@dataclass(frozen=True)
class Proof:
    """The result of a proof: `compared` are the modules whose numbers were compared (None: impossible for this
    runtime), `differences` where engine and run differ.
    """

    evidence: Evidence
    compared: frozenset[str] | None = None
    differences: tuple[Difference, ...] = ()

    def matching(self, what: str) -> int | None:
        """The number of modules whose codes (or factors, or input scale) equal the run's; None if not compared."""
        if self.compared is None:
            return None
        return len(self.compared - {difference.module for difference in self.differences if difference.what == what})


def broken(differences: Sequence[Difference]) -> list[Difference]:
    """The differences that fail an engine, once for each module, known differences first.

    Values hidden inside a kernel's code do not fail it: the scale of an input, and fused attention.
    """
    once = {(difference.module, difference.what, difference.told): difference for difference in reversed(differences)}
    failing = [
        difference
        for difference in reversed(once.values())
        if difference.told or difference.what not in (INPUT, INSIDE)
    ]
    return sorted(failing, key=lambda difference: not difference.told)


def prove(data: Buffer, plan: Plan | None, graph: Indexed, expected: Expectation, profiles: Sequence[str]) -> Proof:
    """Compare an engine, its bytes and its `plan`, with `expected` (the scales and forms of its run) and the numbers of
    its `graph`.

    `profiles`: the names of the engine's profiles.
    """
    gemm_types = evidence(plan, {names.matmul(module): module for module in expected.modules}, len(profiles))
    if plan is None or gemm_types.kind == "unknown":
        return Proof(gemm_types)
    attention = list(_attention(plan, expected.attention, profiles))
    if not plan.programs:
        return Proof(gemm_types, None, tuple(attention))
    pool = read_pool(data)
    compared = gemm_types.fp8 - gemm_types.narrow
    gemms = list(expected_gemms(graph, [module for module in expected.modules if module in compared]))
    missing = [module for module in expected.modules if module in compared - {numbers.module for numbers in gemms}]
    differences = [
        *(
            Difference(module, profiles[0], what, "model.onnx does not have it on FP8 codes", "", told=False)
            for module in missing
            for what in (CODES, FACTORS, INPUT)
        ),
        *sorted(
            compare_numbers(plan, pool, gemms, expected.attention, profiles),
            key=lambda difference: expected.modules.index(difference.module),
        ),
        *_terms(plan, pool, (graph, expected), gemms, profiles),
        *_cache(plan, graph, expected, profiles),
        *attention,
        *(_attention_scales(plan, pool, expected.attention, profiles) if pool is not None else ()),
    ]
    return Proof(gemm_types, compared, tuple(differences))


def _terms(
    plan: Plan, pool: Pool | None, graph_and_expected: tuple[Indexed, Expectation], gemms: Sequence[ExpectedGemm],
    profiles: Sequence[str],
) -> Iterator[Difference]:  # fmt: skip
    """Yield the inputs that are expected in two terms and whose GEMMs do not multiply both."""
    graph, expected = graph_and_expected
    in_two = in_two_codes(expected.forms)
    both = [numbers for numbers in gemms if numbers.module in in_two]
    attention = {node: scales for node, scales in expected.attention.items() if node in in_two}
    if pool is not None:
        yield from compare_terms(plan, pool, both, profiles, expected.forms)
        yield from compare_attention(plan, pool, list(attended(graph, attention)), profiles)
    else:
        reason = "its constants do not read"
        named = [*(numbers.module for numbers in both), *attention]
        yield from (Difference(name, profiles[0], TERMS, reason, "", told=False) for name in named)


def _attention(plan: Plan, scales: Mapping[str, tuple[float, float]], profiles: Sequence[str]) -> Iterator[Difference]:
    """Yield the attention GEMMs that are FP8 and should not be, or should be and are not.

    In a profile of one token a row those of a step stand in their place, which read codes of keys and values alone.
    """
    for index, profile in enumerate(profiles):
        for node in scales:
            shown = plan.gemms(node, index)
            if plan.kind == "inspector" and (untold := [gemm for gemm in shown if gemm.untold]):
                yield Difference(node, profile, INSIDE, f"the GEMM is {untold[0]}", "", told=False)
            elif not_fp8 := [gemm for gemm in shown if not gemm.fp8]:
                yield Difference(node, profile, "types", f"the GEMM is {not_fp8[0]}", "FP8 on both sides")
            elif not shown and not _has_step(plan, index, node):
                yield _fused(plan, index, node, profile)
        for gemm in plan.profiles.get(index, ()):
            for node in gemm.nodes:
                if gemm.fp8 and node not in scales and names.module_of(node) and names.gemm_name(node) == node:
                    yield Difference(node, profile, "types", f"the GEMM is {gemm}", "attention not in FP8")


def _has_step(plan: Plan, index: int, node: str) -> bool:
    """Tell whether a profile has the GEMM of a decode step in the place of an attention GEMM."""
    step = names.step_gemm(names.module_of(node) or "", node.rpartition("_")[2])
    return bool(plan.gemms(step, index)) or any(step in kernel.layers for kernel in plan.kernels.get(index, ()))


def _fused(plan: Plan, index: int, node: str, profile: str) -> Difference:
    """Make the Difference for an expected attention GEMM that a profile does not show as a GEMM.

    A fused attention kernel may quantize its operands, but the types that it multiplies are unknown.
    """
    module = names.module_of(node) or ""
    quantized = "q" if node.endswith("scores") else "p"
    kernel = next((kernel for kernel in plan.kernels.get(index, ()) if node in kernel.layers), None)
    if kernel is None and plan.kind == "inspector":
        return Difference(node, profile, INSIDE, "the inspector shows no such GEMM", "", told=False)
    if kernel is None:
        return Difference(node, profile, "types", "the engine has no such GEMM", "one on FP8 codes")
    if names.attention_pair(module, quantized).quantize in kernel.layers:
        return Difference(node, profile, INSIDE, f"{kernel.name} quantizes and multiplies in one", "", told=False)
    return Difference(node, profile, "types", f"{kernel.name} attends in it without codes", "FP8 on both sides")


def _attention_scales(
    plan: Plan, pool: Pool, scales: Mapping[str, tuple[float, float]], profiles: Sequence[str]
) -> Iterator[Difference]:
    """Yield the attention GEMMs on codes whose scalar factor is not the product of their two scales.

    A GEMM with an FP8 result also includes the scale of the next input, which `numbers` compares.
    """
    for program in plan.programs:
        for statement in program.statements:
            node = next((node for node in statement.nodes if node in scales), None)
            types = [program.type(name) for name in (*statement.inputs[:_ALPHA], *statement.outputs)]
            if node is None or types[:_ALPHA] != ["fp8"] * _ALPHA or "fp8" in types[_ALPHA:]:
                continue
            alpha = pool.read(program.tensors.get(next(iter(statement.inputs[_ALPHA:]), "")))
            left, right = scales[node]
            profile = profiles[program.profile]
            expected = left * right
            if alpha is None or alpha.dtype != np.float32 or alpha.size != 1:
                yield Difference(node, profile, FACTORS, "the GEMM states no alpha", "", told=False)
            elif not math.isclose(actual := float(alpha.astype(np.float32).ravel()[0]), expected, rel_tol=RELATIVE):
                yield Difference(node, profile, FACTORS, f"the GEMM is scaled by {actual:.9g}", f"{expected:.9g}")


def _cache(plan: Plan, graph: Indexed, expected: Expectation, profiles: Sequence[str]) -> Iterator[Difference]:
    """Yield the inputs and outputs of the KV cache whose type differs from the run's."""
    wanted = _cache_types(graph, expected)
    for index, profile in enumerate(profiles):
        bound = {
            match["name"]: program.type(name)
            for program in plan.programs
            if program.profile == index
            for name in program.bound
            if (match := _CACHE.fullmatch(name))
        }
        for name, wanted_type in wanted.items():
            if name not in bound:
                yield Difference(name, profile, "type", "the engine has no such input or output", "", told=False)
            elif bound[name] != wanted_type:
                yield Difference(name, profile, "type", f"it is {bound[name]}", wanted_type)


def _cache_types(graph: Indexed, expected: Expectation) -> dict[str, str]:
    """The type of each `past_key_values.N.key`, `new_key_values.N.value` …: FP8 where scales.json has a scale, else the
    graph's.
    """
    quantizers = {names.cache_pair(*name.rsplit(".", 1)).quantize for name in expected.cache}
    codes = {node.output[0] for node in graph.nodes if node.name in quantizers}
    return {
        name: "fp8"
        if re.sub("^past_", "new_", name) in codes
        else _ELEMENTS.get(int(value.type.tensor_type.elem_type), "")
        for name, value in {**graph.inputs, **graph.outputs}.items()
        if _CACHE.fullmatch(name)
    }
