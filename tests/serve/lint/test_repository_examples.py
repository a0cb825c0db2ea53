"""The examples of the rules for repositories: every rule has one, which breaks it, run on a good repository, with the
words that are printed.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from fp8q import api
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.serve.lint.check import RULES, lint_engines

PAGE = Path(__file__).with_name("examples.md")


@dataclass(frozen=True)
class Section:
    """A rule's section: its title, the commands that damage, and what the lint says then."""

    title: str
    commands: str
    findings: list[str]


def section(part: str) -> Section:
    match = re.fullmatch(r"(.+?)\n\n```sh\n(.*?)\n```\n\n```text\n(.*?)\n```\n*", part, re.DOTALL)
    assert match, f"the section {part[:60]!r} has another form"
    return Section(match[1], match[2], match[3].split("\n"))


SECTIONS = [section(part) for part in PAGE.read_text(encoding="utf-8").split("\n### ")[1:]]


def damage(run: Run, entry: Section) -> list[str]:
    """Run the commands in the repository, or in the run where the rule is of one; what the lint says of that rule."""
    number = entry.title.partition(" ")[0]
    of_run = RULES[number].applies_to == "a run"
    if entry.commands.startswith("fp8q export "):  # needs torch, and more than a graph of numbers
        with RunWriter(run).stage("export", {}, {"again": True}) as log:
            run.onnx_fp32.write_bytes(run.onnx_fp32.read_bytes() + b"\x2a\0")
            log.outputs += [run.onnx, run.onnx_fp32]
    else:
        subprocess.run(["bash", "-ec", entry.commands], cwd=run.root if of_run else run.triton, check=True)
    found = lint_engines(run) if of_run else api.lint(run.triton).findings
    lines = [f"{finding.severity:<8}{finding}" for finding in found if finding.rule == number]
    return [line.replace(str(run.root), "RUN") for line in lines]


def test_every_rule_has_an_example_in_order() -> None:
    assert [entry.title for entry in SECTIONS] == [f"{number} {RULES[number].name}" for number in sorted(RULES)]


@pytest.mark.parametrize("entry", SECTIONS, ids=lambda entry: entry.title)
def test_the_example_breaks_its_rule_with_the_words_that_are_printed(entry: Section, good: Run) -> None:
    assert damage(good, entry) == entry.findings


@pytest.mark.parametrize("line", [line for entry in SECTIONS for line in entry.findings])
def test_every_finding_ends_with_what_to_do(line: str) -> None:
    what, _, remedy = line.rpartition("; ")
    assert what
    assert re.match(r"(run|set|give|make|put|name|take|rename|copy|keep|calibrate|a server waits)\b", remedy)
