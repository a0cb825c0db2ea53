"""Check a written ONNX file against everything that is known to go wrong between a graph and its engine; no GPU needed, no torch, no weight read.

Any FP8 graph can be checked, others' too. With a promise (which modules run on FP8, and their scales) the graph is also held against `scales.json` and
against the interface that serving relies on. The rules are in `rules_codes` (F1xx), `rules_products` (F2xx), `rules_graph` (F3xx) and `rules_storage` (F4xx).
"""

from collections.abc import Mapping
from pathlib import Path

from . import rules_codes, rules_form, rules_graph, rules_products, rules_storage  # noqa: F401  # they enter their rules
from .indexed import Array, Indexed, load_graph
from .rules import RULES, Finding, Promise, Rule

#: The rule that the others take for granted.
FORM = "F314"
__all__ = ["FORM", "RULES", "Finding", "Rule", "lint", "lint_graph"]


def lint(onnx_file: Path, promised: Mapping[str, float | None] | None = None, weight_scales: Mapping[str, Array] | None = None) -> list[Finding]:
    """The rules that an ONNX file breaks, in the order of their numbers; an empty list for a good one.

    `promised`: module -> the scale of its input as in `scales.json` (None: any), or None where nothing is known to be promised; `weight_scales`:
    module -> the scales of its weight, float32 [output channels], for as many as are to be compared. Raises InputError when there is no such file, or it is no ONNX model.
    """
    return lint_graph(load_graph(onnx_file), None if promised is None else Promise(promised, weight_scales or {}))


def lint_graph(graph: Indexed, promise: Promise | None) -> list[Finding]:
    """The rules that a graph breaks, in the order of their numbers; without a promise those for others' graphs, with one those for `fp8q export`'s.

    Where nodes or tensors are not of their form, that alone is said: no other rule could be held against them.
    """
    if malformed := list(RULES[FORM].findings(graph, promise)):
        return malformed
    return [finding for number in sorted(RULES) for finding in RULES[number].findings(graph, promise)]
