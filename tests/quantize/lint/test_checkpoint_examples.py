"""The examples of the rules for checkpoints: every rule has one, which breaks it, run on a good checkpoint, with the
words that are printed.
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

PAGE = Path(__file__).with_name("examples.md")


@dataclass(frozen=True)
class Section:
    """A rule's section: its title, the form and what is done to it, and what the lint says."""

    title: str
    form: str
    code: str
    findings: list[str]


def section(part: str) -> Section:
    match = re.fullmatch(r"(.+?)\n\n```python\n# (.+?)\n(.*?)\n```\n\n```text\n(.*?)\n```\n*", part, re.DOTALL)
    assert match, f"the section {part[:60]!r} has another form"
    assert match[2] in FORMS
    return Section(match[1], match[2], match[3], match[4].split("\n"))


SECTIONS = [section(part) for part in PAGE.read_text(encoding="utf-8").split("\n### ")[1:]]


def test_every_rule_has_an_example_in_order() -> None:
    assert [entry.title for entry in SECTIONS] == [f"{number} {RULES[number].name}" for number in sorted(RULES)]


@pytest.mark.parametrize("entry", SECTIONS, ids=lambda entry: entry.title)
def test_the_example_breaks_its_rule_with_the_words_that_are_printed(
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
