"""The site builds without a warning: links lead somewhere, every page is in the menu, and made pages are whole."""

import importlib.util
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

from fp8q import api
from fp8q.cli import commands
from fp8q.stages.lint import explain_rules

from ..conftest import ROOT

DOCS = ROOT / "docs"
DECISIONS = DOCS / "decisions"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does: a warning, such as of a link that leads nowhere, ends it."""
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed (pip install 'fp8q[docs]')")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return folder


def text_of(page: Path) -> str:
    """The words of a page of the site."""
    return unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))


def test_the_site_has_all_pages_and_those_that_are_made(site: Path) -> None:
    pages = {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.rglob("*.md")}
    pages |= {"reference/options.html", "reference/api.html", "decisions/index.html", "vllm-plugin.html"}
    assert {page for page in pages if not (site / page).is_file()} == set()


def test_the_reference_has_every_option_and_every_public_name(site: Path) -> None:
    options, python = text_of(site / "reference" / "options.html"), text_of(site / "reference" / "api.html")
    for name in (name for name in commands.app if not name.startswith("-")):
        section = options.rpartition(f"fp8q {name}¶")[2]
        arguments = [each for each in commands.app[name].assemble_argument_collection() if each.parse]
        assert [each.name for each in arguments if each.name != "*" and each.name not in section] == []
    assert [name for name in api.__all__ if name not in python] == []
    assert "calibrate(model, data, out, eval_data=None, options=CalibrateOptions()" in python


def test_the_name_of_a_page_in_backticks_is_a_link(site: Path) -> None:
    assert '<a href="corpora.html"><code>docs/corpora.md</code></a>' in (site / "input.html").read_text("utf-8")
    assert '<a href="../exact-answers.html"><code>docs/exact-answers.md</code></a>' in (
        site / "decisions" / "0030-a-tail-of-second-terms.html"
    ).read_text("utf-8")


def test_every_page_begins_with_whom_it_is_for() -> None:
    pages = [path for path in DOCS.rglob("*.md") if path.parent != DECISIONS]
    assert len(pages) > 40
    openings = {path.name: path.read_text(encoding="utf-8").split("\n\n")[1] for path in pages}
    assert [name for name, words in openings.items() if not words.startswith("For ")] == []


def test_the_page_of_the_lint_has_every_rule_with_its_reason_and_an_example(site: Path) -> None:
    page = " ".join(text_of(site / "lint.html").split())
    rules = [rule for letter in "FCRS" for rule in explain_rules(letter)]
    assert len(rules) > 90
    for rule in rules:
        section = page.rpartition(f"{rule.rule} {rule.name}¶ ")[2]
        assert section.startswith(f"{rule.severity.capitalize()}, for {rule.applies_to}. "), rule.rule
        assert f" {rule.severity} {rule.rule} {rule.name}: " in section.partition("¶")[0], rule.rule
