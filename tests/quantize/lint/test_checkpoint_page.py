"""The part of `docs/lint.md` about checkpoints against the rules: every rule has its section, its reason is the rule's
own, and its example, run on a good checkpoint, breaks it with the words that are printed.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fp8q.quantize.lint.check import RULES, checkpoint_findings

from .conftest import FORMS, Damaged

PAGE = Path(__file__).resolve().parents[3] / "docs" / "lint.md"


@dataclass(frozen=True)
class Section:
    """A rule's section: its title, what stands under it, the form and what is done to it, and what the lint says."""

    title: str
    text: str
    form: str
    code: str
    findings: list[str]


def section(part: str) -> Section:
    match = re.fullmatch(r"(.+?)\n\n(.+?)\n\n```python\n# (.+?)\n(.*?)\n```\n\n```text\n(.*?)\n```\n*", part, re.DOTALL)
    assert match, f"the section {part[:60]!r} has another form"
    assert match[3] in FORMS
    return Section(match[1], match[2], match[3], match[4], match[5].split("\n"))


CHECKPOINTS = PAGE.read_text(encoding="utf-8").partition("\n## C1xx")[2].partition("\n## R1xx")[0]
SECTIONS = [section(part) for part in CHECKPOINTS.split("\n### ")[1:]]


def test_the_page_has_a_section_for_every_rule_in_order() -> None:
    assert [entry.title for entry in SECTIONS] == [f"{number} {RULES[number].name}" for number in sorted(RULES)]


@pytest.mark.parametrize("entry", SECTIONS, ids=lambda entry: entry.title)
def test_severity_and_reason_are_the_rules_own(entry: Section) -> None:
    rule = RULES[entry.title.partition(" ")[0]]
    why = " ".join(rule.why.split())
    assert " ".join(entry.text.split()) == f"{rule.severity.capitalize()}. {why}"


@pytest.mark.parametrize("entry", SECTIONS, ids=lambda entry: entry.title)
def test_the_example_breaks_its_rule_with_the_words_that_the_page_prints(
    entry: Section, damaged: Callable[[str], Damaged]
) -> None:
    it = damaged(entry.form)
    names = {"tensors": it.tensors, "config": it.config, "folder": it.folder, "save": it.save}
    exec(entry.code, {"torch": torch, "os": os, "json": json} | names)
    if not it.saved:
        it.save()
    number = entry.title.partition(" ")[0]
    found = [finding for finding in checkpoint_findings(it.folder)[1] if finding.rule == number]
    assert [f"{finding.severity:<8}{finding}" for finding in found] == entry.findings


@pytest.mark.parametrize("line", [line for entry in SECTIONS for line in entry.findings])
def test_every_finding_ends_with_what_to_do(line: str) -> None:
    what, _, remedy = line.rpartition("; ")
    assert what
    assert re.match(r"(export|copy|store|call|set|calibrate|give|leave|load|name|quantize|say|take)\b", remedy)
