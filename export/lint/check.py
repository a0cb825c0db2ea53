"""Check a written ONNX file against everything that is known to go wrong between a graph and its engine; no GPU needed,
no torch, no weight read.

Any FP8 graph can be checked, others' too. With an expectation (which modules run on FP8, and their scales) the graph is
also held against `scales.json` and against the interface that serving relies on. The rules are in the files `rules_…`.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from ...core.errors import InputError
from ...core.files import read_document
from ...core.findings import Finding, enter_rules
from ...core.run import Run
from ...options import ONE, TWO, Form
from ...quantize.scales.decisions import AttentionScales, Scales
from ..onnx_file import names
from ..onnx_file.indexed import Indexed
from ..onnx_file.loading import load_graph
from ..onnx_file.tensors import Array
from .rules import RULES, Expectation

enter_rules(__package__)
#: The rule about well-formed nodes and tensors, without which no other rule is checked.
FORM = "F314"
#: The rules about external data that can be opened.
PLACES = ("F401", "F402", "F403")
__all__ = [
    "FORM",
    "RULES",
    "Finding",
    "expected_attention",
    "lint_file",
    "lint_graph",
    "run_expectation",
    "sound_graph",
]


def lint_file(
    onnx_file: Path,
    input_scales: Mapping[str, float | None] | None = None,
    weight_scales: Mapping[str, Array] | None = None,
    attention: Mapping[str, tuple[float, float]] | None = None,
    forms: Mapping[str, Form] = MappingProxyType({}),
) -> list[Finding]:
    """Check an ONNX file; return its findings in the order of the rules' numbers.

    `input_scales`: module -> the scale of its input as in `scales.json` (None: any); None for a graph without a run.
    `weight_scales`: module -> the scales of its weight, float32 [output channels], of the modules to compare.
    `attention`: as `expected_attention` returns it; `forms`: as in `Expectation`. Raises InputError if there is no such
    file, or it is no ONNX model.
    """
    return lint_graph(
        load_graph(onnx_file),
        None if input_scales is None else Expectation(input_scales, weight_scales or {}, attention or {}, forms=forms),
    )


def sound_graph(onnx_file: Path) -> Indexed:
    """Read an ONNX file that a runtime is about to open, with the files of its external data.

    Raises InputError where nodes or tensors are not of their form, and for external data that lie outside its
    directory, are no file, or are cut short.
    """
    graph = load_graph(onnx_file)
    for number in (FORM, *PLACES):
        for finding in RULES[number].findings(graph, None):
            raise InputError(onnx_file, str(finding))
    return graph


def expected_attention(run: Run) -> dict[str, tuple[float, float]]:
    """Read `attention.json`: the node of each attention GEMM on FP8 codes -> the scales of its two sides; empty without
    that file.

    Raises InputError for a file that does not read, or lacks a scale.
    """
    if not run.attention.is_file():
        return {}
    stored = read_document(run.attention, AttentionScales)
    scales: dict[str, tuple[float, float]] = {}
    try:
        for module in (name.removesuffix(".q") for name in stored.tensors if name.endswith(".q")):
            q, k, v = (stored.tensors[f"{module}.{part}"].scale for part in "qkv")
            scales |= {
                names.attention_gemm(module, "scores"): (q, k),
                names.attention_gemm(module, "values"): (stored.probabilities, v),
            }
    except KeyError as error:
        raise InputError(
            run.attention, f"has no scale of {error.args[0]}", "run `fp8q export --attention fp8` again"
        ) from None
    return scales


def run_expectation(run: Run, scales: Scales, weight_scales: Mapping[str, Array] = MappingProxyType({})) -> Expectation:
    """Collect what a run with these `scales` expects of its graph and its engines; `weight_scales` as in `lint_file`.

    Raises InputError for an `attention.json` that does not read or lacks a scale.
    """
    attention = expected_attention(run)
    forms = scales.forms
    if attention:
        in_two = read_document(run.attention, AttentionScales).terms == TWO.terms
        forms |= dict.fromkeys(attention, TWO if in_two else ONE)
    inputs = {module: activation.scale for module, activation in scales.activations.items()}
    cache = {name: scale.stored for name, scale in scales.kv_cache.items()}
    return Expectation(inputs, weight_scales, attention, cache, forms)


def lint_graph(graph: Indexed, expected: Expectation | None) -> list[Finding]:
    """Check a graph; return its findings in the order of the rules' numbers.

    With a `expected` the rules for a run's graph apply, without one those for other graphs. If nodes or tensors are
    malformed, only that is reported: no other rule can be checked then.
    """
    if malformed := list(RULES[FORM].findings(graph, expected)):
        return malformed
    others = (RULES[number] for number in sorted(RULES) if number != FORM)
    return [finding for rule in others for finding in rule.findings(graph, expected)]
