"""Every command and option that a message, a docstring or a page names is one of the program's."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fp8q.cli.commands import app
from fp8q.core.commands import stage_command
from fp8q.stages.pipeline.stages import STAGES
from tests.conftest import ROOT

FOLDERS = ("calibrate", "cli", "core", "export", "options", "quantize", "serve", "stages", "validate")
#: A command of fp8q in backticks, up to what the reader is to fill in: `fp8q scales RUN --terms 2`.
COMMAND = re.compile(r"`(?:\w+=\S* )*fp8q ([^`]*)`")
#: A long option, as messages name it.
OPTION = re.compile(r"(?<![\w-])--[a-z][A-Za-z0-9-]*")


@cache
def options_of(command: str) -> frozenset[str]:
    return frozenset(name for argument in app[command].assemble_argument_collection() for name in argument.names)


@cache
def commands() -> frozenset[str]:
    return frozenset(name for name in app if not name.startswith("-"))


def literals(file: Path) -> Iterator[str]:
    """The strings in the source of `file`, with `…` for what is filled in."""
    nodes = [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


@cache
def texts() -> list[tuple[str, str]]:
    """Where a text is, and the text: the strings of all sources, and the pages."""
    sources = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    pages = [page for page in pages if page.parent.name != "decisions"]  # they tell of what was
    return [
        *((str(file.relative_to(ROOT)), text) for file in sources for text in literals(file)),
        *((str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")) for page in pages),
    ]


def wrong(words: str) -> str | None:
    """What is no command, or no option of it, in the command line `fp8q words`; None where all is."""
    name, _, rest = " ".join(words.split()).partition(" ")
    if not re.fullmatch(r"[a-z][a-z-]*", name):  # COMMAND, or filled in
        unknown = [option for option in OPTION.findall(words) if option not in every_option()]
        return unknown[0] if unknown else None
    if name not in commands():
        return name
    return next((option for option in OPTION.findall(rest) if option not in options_of(name)), None)


@cache
def every_option() -> frozenset[str]:
    return frozenset({"--help", "--version"}).union(*map(options_of, commands()))


def test_every_command_in_a_text_is_there_with_its_options() -> None:
    named = [(where, words) for where, text in texts() for words in COMMAND.findall(text)]
    assert len(named) > 300
    assert [(where, words, found) for where, words in named if (found := wrong(words))] == []


def test_every_stage_is_done_by_a_command_that_is_there() -> None:
    for stage in STAGES:
        assert wrong(stage_command(stage.name, Path("run")).removeprefix("fp8q ")) is None, stage.name


@pytest.mark.parametrize(
    ("words", "found"),
    [("continue RUN", "continue"), ("report RUN --pages 3", "--pages"), ("report RUN", None), ("COMMAND --help", None)],
)
def test_a_command_or_an_option_that_is_none_is_found(words: str, found: str | None) -> None:
    assert wrong(words) == found


#: Options of other programs, which messages and scripts name: of Docker, vLLM, torchrun, tritonserver, trtexec,
#: nvidia-smi and Jupyter; variables of CSS, which begin as they do; and our own `--help-all`, which `launch` reads.
OF_OTHERS = {
    "--build-arg", "--rm", "--enable-lora", "--kv-cache-dtype", "--kv-cache-dtype-skip-layers",
    "--lora-modules", "--max-logprobs", "--max-lora-rank", "--nproc-per-node", "--load-model", "--model-control-mode",
    "--model-repository", "--format", "--query-gpu", "--ipython-dir", "--ink", "--paper", "--help-all",
}  # fmt: skip
#: Where the script for trtexec is made, whose options are its own.
TRTEXEC = ("export/engine/script.py", "export/engine/header.py")


def test_every_option_that_a_message_names_is_there() -> None:
    named = {
        option: where
        for where, text in texts()
        if where.endswith(".py") and where not in TRTEXEC
        for option in OPTION.findall(text)
    }
    assert {option: where for option, where in named.items() if option not in every_option() | OF_OTHERS} == {}
    assert named.keys() - every_option() >= OF_OTHERS
