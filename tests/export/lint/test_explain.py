"""`fp8q lint --explain`: the reason of a rule, or of all whose code begins alike, and what is refused."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fp8q.export.lint.check import RULES as GRAPH_RULES
from fp8q.quantize.lint.check import RULES as CHECKPOINT_RULES
from fp8q.serve.lint.check import RULES as REPOSITORY_RULES

Fp8q = Callable[..., Any]


def test_a_rule_is_explained_by_severity_scope_and_reason(fp8q: Fp8q) -> None:
    told = fp8q("lint", "--explain", "f202")
    assert told.code == 0
    assert told.out == (
        "F202 weight-only\n"
        "Warning, for a graph of which nothing is expected. A GEMM with an FP8 weight and no Q/DQ on its\n"
        "input multiplies in the compute type: it saves memory, and no time.\n"
    )


@pytest.mark.parametrize(
    ("letter", "rules"), [("F", GRAPH_RULES), ("c", CHECKPOINT_RULES), ("R", REPOSITORY_RULES)], ids="FCR"
)
def test_the_beginning_of_codes_explains_every_rule_that_begins_so(
    fp8q: Fp8q, letter: str, rules: Mapping[str, Any]
) -> None:
    explained = json.loads(fp8q("lint", "--explain", letter, "--json").out)["rules"]
    assert [each["rule"] for each in explained] == sorted(rules)
    for each in explained:
        rule = rules[each["rule"]]
        assert (each["name"], each["severity"]) == (rule.name, rule.severity)
        assert each["why"] == " ".join(rule.why.split())
        assert each["why"].endswith(".")


def test_explained_rules_are_apart_by_a_line(fp8q: Fp8q) -> None:
    parts = fp8q("lint", "--explain", "F2").out.split("\n\n")
    assert [part.split()[0] for part in parts] == sorted(number for number in GRAPH_RULES if number.startswith("F2"))


@pytest.mark.parametrize("code", ["", "F999", "101"])
def test_a_code_of_no_rule_is_refused(fp8q: Fp8q, code: str) -> None:
    assert fp8q("lint", "--explain", code).complaint() == (
        f"--explain {code}: is no rule's code; name one, such as F101, or its beginning: F (graphs), C (checkpoints), "
        "S (servers), R (repositories)"
    )


@pytest.mark.parametrize("words", [[], ["graph.onnx", "--explain", "F101"]])
def test_a_path_or_a_code_is_needed_and_not_both(fp8q: Fp8q, words: list[str]) -> None:
    assert fp8q("lint", *words).complaint() == "lint takes either a PATH or --explain CODE; name one of them"
