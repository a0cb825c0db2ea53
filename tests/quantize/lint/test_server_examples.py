"""The examples of the rules for servers: every rule has one, which breaks it, with the words that are printed."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8q.core.findings import Finding
from fp8q.quantize.lint.check import SERVER_RULES, open_served
from fp8q.quantize.lint.servers import TITLES

from .conftest import Damaged

PAGE = Path(__file__).with_name("server_examples.md")


@dataclass(frozen=True)
class Section:
    """A rule's section: its title, form, server and version, what is done to it, and what the lint says."""

    title: str
    form: str
    server: Any
    version: str | None
    code: str
    findings: list[str]


def section(part: str) -> Section:
    first = r"# (.+?) for (\S+)(?: (\S+))?"
    match = re.fullmatch(rf"(.+?)\n\n```python\n{first}\n(.*?)```\n\n```text\n(.*?)\n```\n*", part, re.DOTALL)
    assert match, f"the section {part[:60]!r} has another form"
    assert match[3] in TITLES
    return Section(match[1], match[2], match[3], match[4], match[5], match[6].split("\n"))


SECTIONS = [section(part) for part in PAGE.read_text(encoding="utf-8").split("\n### ")[1:]]


def findings_of(entry: Section, damaged: Callable[[str], Damaged]) -> list[Finding]:
    it = damaged(entry.form)
    exec(entry.code, {"torch": torch, "os": os, "json": json, "tensors": it.tensors, "config": it.config})
    it.save()
    return SERVER_RULES.findings(open_served(it.folder, entry.server, entry.version))


def test_every_rule_has_an_example_in_order() -> None:
    assert [entry.title for entry in SECTIONS] == [
        f"{number} {SERVER_RULES[number].name}" for number in sorted(SERVER_RULES)
    ]


@pytest.mark.parametrize("entry", SECTIONS, ids=lambda entry: entry.title)
def test_the_example_breaks_its_rule_with_the_words_that_are_printed(
    entry: Section, damaged: Callable[[str], Damaged]
) -> None:
    number = entry.title.partition(" ")[0]
    found = [finding for finding in findings_of(entry, damaged) if finding.rule == number]
    assert [f"{finding.severity:<8}{finding}" for finding in found] == entry.findings


@pytest.mark.parametrize("line", [line for entry in SECTIONS for line in entry.findings])
def test_every_finding_ends_with_what_to_do(line: str) -> None:
    what, _, remedy = line.rpartition("; ")
    assert what
    verbs = "calibrate|compare|copy|give|install|leave|load|name|quantize|save|say|set|take|write"
    assert re.match(rf"({verbs})\b", remedy), remedy


@pytest.mark.parametrize("number", sorted(SERVER_RULES))
def test_every_rule_names_its_servers_and_what_was_read(number: str) -> None:
    rule = SERVER_RULES[number]
    servers = [title for title in TITLES.values() if title in rule.applies_to]
    assert len(servers) == len(rule.applies_to.split(", ")) > 0
    sources = rule.why.partition(" Read in ")[2]
    assert all(re.search(rf"{title}: [^;]", sources) for title in servers)
